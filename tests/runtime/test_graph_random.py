"""Random numbers in graphs: the same as in eager mode, as if drawn at the launch of a replay."""

import pytest
import torch
import torch.utils.checkpoint
from graph_kit import DEVICE, settled
from processes import python
from stream_kit import captured, in_threads
from torch import nn

DRAWS = {
    "dropout": lambda p: nn.functional.dropout(p, 0.4),
    "rrelu": lambda p: nn.functional.rrelu(p - 0.5, training=True),
    "alpha_dropout": lambda p: nn.functional.alpha_dropout(p, 0.3, training=True),
    "dropout_add": lambda p: torch.ops.openreg.dropout_add(p, p, 0.5)[0],
    "bernoulli": lambda p: torch.bernoulli(p),
    "normal": lambda p: torch.normal(p + 1, 1.0),
    "normal of two tensors": lambda p: torch.normal(p, p + 1),
    "poisson": lambda p: torch.poisson(p * 5),
    "rand": lambda p: torch.rand(49, device=DEVICE),
    "randint": lambda p: torch.randint(0, 30, (50,), device=DEVICE, dtype=torch.float32),
    "randn": lambda p: torch.randn(5, device=DEVICE),
    "multinomial": lambda p: torch.multinomial(p, 20, replacement=True),
    "randperm": lambda p: torch.randperm(50, device=DEVICE),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_replays_draw_the_numbers_of_eager_mode(draw):
    """Two calls in a graph, replayed between calls in eager mode, draw what these would draw, from whichever seed."""
    p, draw = torch.rand(50, device=DEVICE), DRAWS[draw]
    graph, out = captured(lambda: (draw(p), draw(p)))
    for seed in (6, 314):
        torch.openreg.manual_seed(seed)
        expected = [draw(p).cpu() for _ in range(8)]
        torch.openreg.manual_seed(seed)
        found = []
        for _ in range(2):
            found += [draw(p).cpu(), draw(p).cpu()]
            graph.replay()
            found += [y.cpu() for y in out]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not torch.equal(expected[2], expected[3])


def test_generators_are_registered():
    generator = torch.Generator(DEVICE)
    with pytest.raises(torch.AcceleratorError, match="register_generator_state"):
        captured(lambda: torch.rand(3, device=DEVICE, generator=generator))
    graph = torch.openreg.Graph()
    graph.register_generator_state(generator)
    with torch.openreg.graph(graph):
        y = torch.rand(3, device=DEVICE, generator=generator)
    generator.manual_seed(5)
    graph.replay()
    first = y.cpu()
    generator.manual_seed(5)
    assert torch.equal(first, torch.rand(3, device=DEVICE, generator=generator).cpu())


def test_graphs_with_two_generators():
    """Each generator continues from its own state in any graph; freeing the graphs frees their memory."""
    settled()
    before = torch.openreg.memory_allocated(DEVICE)
    own = torch.Generator(DEVICE)

    def draw():
        return torch.rand(9, device=DEVICE), torch.rand(9, device=DEVICE, generator=own)

    def both():
        graph = torch.openreg.Graph()
        graph.register_generator_state(own)
        with torch.openreg.graph(graph):
            return graph, draw()

    def seeded():
        torch.openreg.manual_seed(1)
        own.manual_seed(2)

    seeded()
    expected = [draw() for _ in range(4)]
    graphs = [both(), both()]
    seeded()
    for i in range(4):
        graph, out = graphs[i % 2]
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, expected[i], strict=True))
    del graphs, graph, out, expected
    settled()
    assert torch.openreg.memory_allocated(DEVICE) == before


def test_states_of_one_generator_go_on_as_in_eager_mode():
    """A graph that switches between two registered states moves the offset of each as eager mode does."""

    def states(generator):
        generator.manual_seed(3)
        return generator, generator.graphsafe_get_state(), generator.clone_state()

    def draw(generator, own, other):
        out = []
        for state, times in ((other, 1), (own, 2)):
            generator.graphsafe_set_state(state)
            out += [torch.rand(5, device=DEVICE, generator=generator) for _ in range(times)]
        return out

    eager, graphed = states(torch.Generator(DEVICE)), states(torch.openreg.default_generators[0])
    graph = torch.openreg.Graph()
    for state in graphed[1:]:
        graph.register_generator_state(state)
    with torch.openreg.graph(graph):
        out = draw(*graphed)
    for _ in range(3):
        expected = draw(*eager)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert [s.get_offset() for s in graphed[1:]] == [s.get_offset() for s in eager[1:]]


def test_eager_mode_draws_after_a_void_capture():
    torch.openreg.manual_seed(8)
    expected = torch.randn(4, device=DEVICE)
    torch.openreg.manual_seed(8)
    with pytest.raises(torch.AcceleratorError, match="_local_scalar_dense"):
        captured(lambda: torch.randn(4, device=DEVICE).sum().item())
    assert torch.equal(torch.randn(4, device=DEVICE), expected)
    graph, y = captured(lambda: torch.randn(4, device=DEVICE))
    torch.openreg.manual_seed(8)
    graph.replay()
    assert torch.equal(y, expected)


# ---- the state at the launch ----


@pytest.mark.parametrize("launch_mode", ["inline", "async", "sync"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_replay_draws_from_the_state_at_its_launch(launch_mode, busy):
    """As an operator of eager mode, and as on CUDA, where replay() itself takes the seed and moves the offset."""
    graph, y = captured(lambda: torch.rand(64, device=DEVICE))
    generator, stream = torch.openreg.default_generators[0], torch.openreg.Stream()
    torch.openreg.manual_seed(1)
    first, second = (torch.rand(64, device=DEVICE) for _ in range(2))
    offset = generator.get_offset() // 2
    torch.openreg.synchronize()
    with torch.openreg.launch_mode(launch_mode):

        def launch():
            torch.openreg.manual_seed(1)
            with stream:
                if busy:
                    torch.openreg._sleep(50_000_000)
                graph.replay()

        launch()
        assert generator.get_offset() == offset
        z = torch.rand(64, device=DEVICE)
        torch.openreg.synchronize()
        assert torch.equal(y, first) and torch.equal(z, second)
        launch()
        torch.openreg.manual_seed(99)
        torch.openreg.synchronize()
        assert torch.equal(y, first) and generator.get_offset() == 0


def test_threads_ask_for_the_state_while_a_replay_draws():
    """A wait for the replay holds neither Python's lock nor the generator's."""
    graph, _ = captured(lambda: torch.rand(8, device=DEVICE))
    generator = torch.openreg.default_generators[0]
    torch.openreg.manual_seed(1)
    torch.rand(8, device=DEVICE)
    expected = generator.get_state()
    with torch.openreg.launch_mode("async"):
        torch.openreg.manual_seed(1)
        torch.openreg._sleep(50_000_000)
        graph.replay()
        states = in_threads(*[generator.get_state] * 4)
        torch.openreg.synchronize()
    assert all(torch.equal(state, expected) for state in states)


def test_a_replay_in_another_graph_draws_in_its_order():
    inner, y = captured(lambda: torch.rand(8, device=DEVICE))
    outer, _ = captured(inner.replay)
    torch.openreg.manual_seed(1)
    expected = [torch.rand(8, device=DEVICE) for _ in range(2)]
    with torch.openreg.launch_mode("async"):
        torch.openreg.manual_seed(1)
        torch.openreg._sleep(20_000_000)
        outer.replay()
        z = torch.rand(8, device=DEVICE)
        torch.openreg.synchronize()
    assert torch.equal(y, expected[0]) and torch.equal(z, expected[1])


# ---- the state in a capture ----


def test_a_capture_rewinds_a_generator():
    """From torch 2.10 on, CUDA reads and sets the state in a capture: the offset relative to the replay's."""

    def draw():
        first = torch.rand(8, device=DEVICE)
        state = torch.openreg.get_rng_state(DEVICE)
        second = torch.rand(8, device=DEVICE)
        torch.openreg.set_rng_state(state, DEVICE)
        return first, second, torch.rand(8, device=DEVICE)

    torch.openreg.manual_seed(5)
    graph, out = captured(draw)
    for seed in (5, 6):
        torch.openreg.manual_seed(seed)
        expected, after = draw(), torch.rand(8, device=DEVICE)
        torch.openreg.manual_seed(seed)
        graph.replay()
        assert torch.equal(out[1], out[2]) and not torch.equal(out[0], out[1])
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert torch.equal(torch.rand(8, device=DEVICE), after)


def test_a_capture_can_only_set_the_seed_that_is_set():
    torch.openreg.manual_seed(0)
    graph, (_, seed, y) = captured(
        lambda: (torch.openreg.manual_seed(0), torch.openreg.initial_seed(), torch.rand(3, device=DEVICE))
    )
    graph.replay()
    assert seed == 0
    with pytest.raises(RuntimeError, match="seed"):
        captured(lambda: torch.openreg.manual_seed(1))
    state = torch.openreg.get_rng_state(DEVICE)
    torch.openreg.manual_seed(1)
    other = torch.openreg.get_rng_state(DEVICE)
    torch.openreg.set_rng_state(state, DEVICE)
    with pytest.raises(RuntimeError, match="seed"):
        captured(lambda: torch.openreg.set_rng_state(other, DEVICE))
    assert torch.openreg.initial_seed() == 0


def test_what_a_capture_cannot_do_with_a_generator():
    """A replay decides from which state it draws."""
    generator = torch.openreg.default_generators[0]
    before = torch.openreg.get_rng_state(DEVICE)
    own = torch.Generator(DEVICE)
    _, of_another = captured(lambda: torch.openreg.get_rng_state(DEVICE))

    def rewound():
        torch.rand(3, device=DEVICE)
        torch.openreg.set_rng_state(before, DEVICE)

    for call in (
        lambda: torch.openreg.manual_seed(torch.openreg.initial_seed() + 1),
        torch.openreg.seed,
        generator.get_offset,
        lambda: generator.set_offset(0),
        generator.clone_state,
        own.get_state,
        lambda: torch.openreg.set_rng_state(of_another, DEVICE),
        rewound,
    ):
        graph = torch.openreg.Graph()
        with pytest.raises(torch.AcceleratorError, match="not permitted when stream is capturing.*Generator"):  # noqa: SIM117
            with torch.openreg.graph(graph):
                call()
    captured(lambda: torch.openreg.set_rng_state(before, DEVICE))  # as it is
    torch.openreg.set_rng_state(of_another, DEVICE)  # an ordinary state outside
    assert torch.equal(torch.openreg.get_rng_state(DEVICE), before)


@pytest.mark.processes
def test_the_state_of_a_capture_in_another_process(tmp_path):
    """Each process numbers them from a place of its own, so it takes none for one of its captures."""
    code = f"""
import torch
x = torch.zeros(3, device="openreg")
graph = torch.openreg.Graph()
with torch.openreg.graph(graph):
    state = torch.openreg.get_rng_state()
    x.normal_()
    if {{load}}:
        torch.openreg.set_rng_state(torch.load({str(tmp_path / "state")!r}))
torch.save(state, {str(tmp_path / "state")!r})
"""
    assert python("-c", code.format(load=False)).returncode == 0
    done = python("-c", code.format(load=True))
    assert "the state was not taken in this capture" in done.stderr


def test_the_state_of_a_capture_outside_of_it():
    """It is the state at the capture's begin, wherever in the capture it was taken."""
    torch.openreg.manual_seed(2)
    before = torch.openreg.get_rng_state(DEVICE)
    graph, state = captured(lambda: (torch.rand(3, device=DEVICE), torch.openreg.get_rng_state(DEVICE))[1])
    graph.replay()
    torch.openreg.set_rng_state(state, DEVICE)
    assert torch.equal(torch.openreg.get_rng_state(DEVICE), before)
