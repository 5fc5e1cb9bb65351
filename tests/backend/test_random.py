"""Random numbers: the device's own, reproducible, equal to the CPU's under one seed, never the CPU's own."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

DRAWS = {
    "rand": lambda d, **g: torch.rand(17, device=d, **g),
    "randn": lambda d, **g: torch.randn(17, device=d, **g),
    "randint": lambda d, **g: torch.randint(100, (17,), device=d, **g),
    "randperm": lambda d, **g: torch.randperm(17, device=d, **g),
    "normal": lambda d, **g: torch.normal(0.0, torch.ones(17, device=d), **g),
    "bernoulli": lambda d, **g: torch.bernoulli(torch.full((17,), 0.5, device=d), **g),
    "multinomial": lambda d, **g: torch.multinomial(torch.ones(17, device=d), 5, **g),
    "poisson": lambda d, **g: torch.poisson(torch.full((17,), 3.0, device=d), **g),
    "uniform_": lambda d, **g: torch.empty(17, device=d).uniform_(1, 2, **g),
    "exponential_": lambda d, **g: torch.empty(17, device=d).exponential_(**g),
    "cauchy_": lambda d, **g: torch.empty(17, device=d).cauchy_(**g),
    "geometric_": lambda d, **g: torch.empty(17, device=d).geometric_(0.3, **g),
    "log_normal_": lambda d, **g: torch.empty(17, device=d).log_normal_(**g),
    "random_": lambda d, **g: torch.empty(17, device=d).random_(**g),
}
WITHOUT_GENERATOR = {
    "dropout": lambda d: F.dropout(torch.ones(64, device=d), 0.4),
    "rand_like": lambda d: torch.rand_like(torch.ones(17, device=d)),
    "randn_like": lambda d: torch.randn_like(torch.ones(17, device=d)),
    "rrelu": lambda d: F.rrelu(-torch.ones(17, device=d), training=True),
    "gumbel_softmax": lambda d: F.gumbel_softmax(torch.ones(17, device=d)),
    "fractional_max_pool2d": lambda d: F.fractional_max_pool2d(
        torch.ones(1, 1, 9, 9, device=d).cumsum(2), 2, output_size=4
    ),
    "gamma": lambda d: torch.distributions.Gamma(torch.ones(5, device=d), torch.ones(5, device=d)).sample(),
    "dirichlet": lambda d: torch.distributions.Dirichlet(torch.ones(5, device=d)).sample(),
    "binomial": lambda d: torch.distributions.Binomial(10, torch.full((5,), 0.3, device=d)).sample(),
    "dropout2d": lambda d: F.dropout2d(torch.ones(2, 40, 3, 3, device=d), 0.4),
    "alpha_dropout": lambda d: F.alpha_dropout(torch.ones(64, device=d), 0.4, training=True),
    "randint_like": lambda d: torch.randint_like(torch.ones(17, device=d), 1000),
    "bernoulli_": lambda d: torch.empty(64, device=d).bernoulli_(torch.full((64,), 0.3, device=d)),
    "complex": lambda d: torch.randn(17, dtype=torch.complex64, device=d),
    "attention": lambda d: F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 8, 4, device=d), dropout_p=0.4),
    "trunc_normal_": lambda d: torch.nn.init.trunc_normal_(torch.empty(4, 4, device=d)),
    "init": lambda d: torch.nn.init.kaiming_uniform_(torch.empty(4, 4, device=d)),
}


@pytest.mark.parametrize("name", DRAWS | WITHOUT_GENERATOR)
def test_reproducible_equal_to_the_cpus_and_apart_from_it(name):
    draw = (DRAWS | WITHOUT_GENERATOR)[name]
    torch.manual_seed(11)
    expected = draw("cpu")
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first, second = draw("openreg"), draw("openreg")
    assert torch.get_rng_state().equal(state), "a draw on the device moved the CPU's generator"
    assert first.is_openreg and first.cpu().equal(expected)
    assert name in ("fractional_max_pool2d", "bernoulli") or not first.equal(second)


@pytest.mark.parametrize("name", DRAWS)
def test_generators(name):
    generator = torch.Generator(device="openreg:1").manual_seed(4)
    default = torch.openreg.get_rng_state(1)
    first = DRAWS[name]("openreg:1", generator=generator)
    generator.manual_seed(4)
    assert DRAWS[name]("openreg:1", generator=generator).equal(first)
    assert torch.openreg.get_rng_state(1).equal(default)
    with pytest.raises(RuntimeError, match="device type|Expected a|on openreg:0 but found"):
        DRAWS[name]("openreg:0", generator=generator)
    with pytest.raises(RuntimeError, match="device type|Expected a"):
        DRAWS[name]("openreg:1", generator=torch.Generator())


def draws(generator):
    return torch.rand(3, device=generator.device, generator=generator).tolist()


def test_generator_interface():
    generator = torch.Generator(device="openreg:1")
    assert generator.device == torch.device("openreg:1")
    assert generator.manual_seed(7).initial_seed() == 7
    state = generator.get_state()
    first = draws(generator)
    generator.set_state(state)
    assert draws(generator) == first
    with pytest.raises(RuntimeError, match=r"Generator.set_state\(\) expected the \d+ bytes .* but got 3"):
        generator.set_state(state[:3])
    assert generator.seed() != 7
    assert torch.Generator("openreg").device == torch.device("openreg:0")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7; there are 2 devices"):
        torch.Generator(device="openreg:7")


COPIES = {
    "clone_state": lambda g: g.clone_state(),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_generators_go_their_own_way(name):
    generator = torch.Generator(device="openreg:1").manual_seed(7)
    draws(generator)
    clone = COPIES[name](generator)
    assert clone.device == generator.device and clone.initial_seed() == 7
    first = draws(generator)
    assert draws(clone) == first
    draws(clone)
    assert draws(clone) != draws(generator)


def test_graph_safe_state_is_shared():
    one, two = torch.Generator(device="openreg").manual_seed(7), torch.Generator(device="openreg")
    two.graphsafe_set_state(one.graphsafe_get_state())
    first, second = draws(one), draws(two)
    one.manual_seed(7)
    assert first != second and [draws(two), draws(one)] == [first, second]


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 1])
def test_offsets_count_what_was_drawn(seed):
    generator = torch.Generator(device="openreg").manual_seed(seed)
    assert generator.get_offset() == 0
    reached = []
    for count in (1, 622, 1, 1, 623, 5000):
        torch.rand(count, device="openreg", generator=generator)
        reached.append(generator.get_offset())
    assert reached == [1, 623, 624, 625, 1248, 6248]
    following = draws(generator)
    for offset in (6248, 0, 624, 6248):
        assert generator.set_offset(offset) is generator and generator.get_offset() == offset
    assert draws(generator) == following and generator.initial_seed() == seed


def test_an_offset_that_is_reached_changes_nothing():
    generator = torch.Generator(device="openreg").manual_seed(7)
    state = torch.Generator(device="openreg")
    torch.randn(3, device="openreg", generator=generator)  # draws pairs, and keeps a half
    state.set_state(generator.get_state())
    generator.set_offset(generator.get_offset())
    expected, got = (torch.randn(3, device="openreg", generator=g) for g in (state, generator))
    assert got.equal(expected)


def test_states_are_read_whole_while_another_thread_draws():
    generator = torch.Generator(device="openreg").manual_seed(7)
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            generator.manual_seed(7)
            torch.rand(700, device="openreg", generator=generator)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(20_000):
            assert generator.get_offset() in (0, 700)
    finally:
        stop.set()
        thread.join()


def test_offsets_that_cannot_be_had():
    generator = torch.Generator(device="openreg")
    with pytest.raises(RuntimeError, match="set_offset.. takes at most 8589934592, but got 8589934593"):
        generator.set_offset((1 << 33) + 1)


def test_each_device_has_its_own_default_generator():
    torch.manual_seed(3)
    assert [g.device.index for g in torch.openreg.default_generators] == [0, 1]
    a = torch.rand(3, device="openreg:0")
    assert torch.rand(3, device="openreg:1").cpu().equal(a.cpu())  # torch.manual_seed seeds all
    with torch.openreg.device(1):
        torch.openreg.manual_seed(9)
    assert (
        torch.openreg.default_generators[1].initial_seed() == 9
        and torch.openreg.default_generators[0].initial_seed() == 3
    )


def test_states():
    states = torch.openreg.get_rng_state_all()
    first = torch.rand(3, device="openreg:1")
    torch.openreg.set_rng_state_all(states)
    assert torch.rand(3, device="openreg:1").equal(first)
    torch.openreg.seed_all()
    assert torch.openreg.initial_seed() == torch.openreg.default_generators[1].initial_seed()
    torch.openreg.seed()


@pytest.mark.parametrize("devices", [[0], [0, 1], None], ids=str)
def test_fork_rng(devices):
    states = torch.get_rng_state(), torch.openreg.get_rng_state(0), torch.openreg.get_rng_state(1)
    with torch.random.fork_rng(devices=devices, device_type="openreg"):
        torch.manual_seed(2)
        torch.rand(100, device="openreg")
    restored = torch.get_rng_state(), torch.openreg.get_rng_state(0), torch.openreg.get_rng_state(1)
    assert [a.equal(b) for a, b in zip(states, restored, strict=True)] == [True, True, devices != [0]]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoint(use_reentrant, preserve):
    x = torch.ones(64, device="openreg:1", requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(
        lambda x: F.dropout(x, 0.5), x, use_reentrant=use_reentrant, preserve_rng_state=preserve
    )
    torch.rand(5, device="openreg:1")
    state = torch.openreg.get_rng_state(1)
    out.sum().backward()
    assert x.grad.equal(out.detach()) == preserve  # the same elements were dropped
    assert torch.openreg.get_rng_state(1).equal(state) == preserve


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("other", ["meta", "cpu", "openreg:0"])
@pytest.mark.parametrize("place", ["first", "last", "in a list", "in a dict"])
@pytest.mark.parametrize("mode", ["inline", "async"])
@pytest.mark.filterwarnings("ignore:Tensor arguments, excluding CPU tensors:UserWarning")
def test_checkpoint_with_arguments_on_other_devices(mode, place, other, use_reentrant):
    x, extra = torch.ones(256, device="openreg:1", requires_grad=True), torch.ones(1, device=other)
    arguments = {"first": (extra, x), "last": (x, extra), "in a list": ([extra], x), "in a dict": ({"a": [extra]}, x)}

    def run(*arguments):
        (x,) = [argument for argument in arguments if isinstance(argument, torch.Tensor) and argument.numel() == 256]
        return F.dropout(x, 0.5)

    with torch.openreg.launch_mode(mode):
        out = torch.utils.checkpoint.checkpoint(run, *arguments[place], use_reentrant=use_reentrant)
        torch.rand(5, device="openreg:1")
        out.sum().backward()
        assert x.grad.equal(out.detach())


def test_checkpoint_without_a_tensor_of_the_device():
    """PyTorch's choice stays."""
    infer = torch.utils.checkpoint._infer_device_type
    assert infer(torch.ones(1, device="meta"), 3) == "meta"
    assert infer(torch.ones(1), [None]) == infer() == "openreg"  # the accelerator


BAD_STATES = {
    "of the device": (lambda state: state.to("openreg"), TypeError, "RNG state must be a torch.ByteTensor"),
    "meta": (lambda state: state.to("meta"), TypeError, "RNG state must be a torch.ByteTensor"),
    "int32": (lambda state: state.int(), TypeError, "RNG state must be a torch.ByteTensor"),
    "bool": (lambda state: state.bool(), TypeError, "RNG state must be a torch.ByteTensor"),
    "sparse": (lambda state: state.to_sparse(), TypeError, "RNG state must be a torch.ByteTensor"),
    "list": (lambda state: state.tolist(), TypeError, "expected a torch.ByteTensor, but got list"),
    "None": (lambda state: None, TypeError, "expected a torch.ByteTensor, but got NoneType"),
    "too short": (lambda state: state[:-1], RuntimeError, r"expected the \d+ bytes that get_state\(\) gives, but got"),
    "empty": (lambda state: state[:0], RuntimeError, r"expected the \d+ bytes that get_state\(\) gives, but got 0"),
    "strided": (lambda state: torch.stack([state, state], 1)[:, 0], RuntimeError, "RNG state must be contiguous"),
}
SETTERS = {
    "torch.openreg.set_rng_state": torch.openreg.set_rng_state,
    "of device 1": lambda state: torch.openreg.set_rng_state(state, "openreg:1"),
    "set_rng_state_all": lambda state: torch.openreg.set_rng_state_all([torch.openreg.get_rng_state(0), state]),
    "Generator.set_state": torch.Generator("openreg").set_state,
}


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("state", BAD_STATES)
def test_a_state_is_a_byte_tensor_on_the_cpu(state, setter):
    make, error, match = BAD_STATES[state]
    before = torch.openreg.get_rng_state_all()
    with pytest.raises(error, match=match):
        SETTERS[setter](make(torch.openreg.get_rng_state()))
    assert all(a.equal(b) for a, b in zip(before, torch.openreg.get_rng_state_all(), strict=True))
