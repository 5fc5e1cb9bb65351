"""Generators and threads: a child created by fork() may seed, as with CUDA, and the host keeps its own numbers."""

import threading

import pytest
import torch
from processes import python

DEVICE = "openreg:0"

pytestmark = pytest.mark.processes

DRAWS = """
import os, signal, threading, time, warnings, torch
warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads, since Python 3.12

def in_child(body):
    if (pid := os.fork()) == 0:
        signal.alarm(60)  # it may only wait for a thread that it does not have
        body()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.parametrize("graphed", [True, False], ids=["replay", "eager"])
def test_a_child_seeds_while_its_parents_work_draws(graphed):
    """The kernel on the worker holds the generator's mutex, which the child inherits."""
    code = f"""{DRAWS}
x, own = torch.zeros(1_000_000, device="openreg"), torch.Generator("openreg")
graph = torch.openreg.Graph()
graph.register_generator_state(own)

def draw():
    for _ in range(8):
        x.normal_()
        x.normal_(generator=own)

if {graphed}:
    with torch.openreg.graph(graph):
        draw()
torch.openreg.set_launch_mode("async")
work = threading.Thread(target=graph.replay if {graphed} else draw)
work.start()
time.sleep(0.02)

def child():
    torch.openreg.manual_seed(1)
    torch.manual_seed(1)
    torch.openreg.seed_all()
    own.manual_seed(1)
    own.seed()
    shared = own.graphsafe_get_state()
    shared.manual_seed(7)
    assert own.initial_seed() == 7
    own.set_state(own.get_state())

in_child(child)
work.join()
torch.openreg.synchronize()
torch.openreg.manual_seed(1)
first = torch.rand(3, device="openreg")
torch.openreg.manual_seed(1)
assert torch.equal(first, torch.rand(3, device="openreg"))
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_has_the_hosts_generator_while_an_operator_draws_from_it():
    """A fallback without a Generator argument draws from the CPU's generator, which has the device's state meanwhile."""
    code = f"""{DRAWS}
warnings.simplefilter("ignore", UserWarning)  # of the fallback
library = torch.library.Library("forks", "DEF")
library.define("draw(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
drawing, forked = threading.Event(), threading.Event()

def draw(x):
    drawing.set()
    forked.wait()
    return torch.rand_like(x)

library.impl("draw", draw, "CPU")
torch.manual_seed(3)
expected = torch.rand(4)
torch.manual_seed(3)
x = torch.ones(4, device="openreg")
work = threading.Thread(target=lambda: torch.ops.forks.draw(x))
work.start()
drawing.wait()

def child():
    if not torch.equal(torch.rand(4), expected):
        os._exit(1)
    torch.manual_seed(1)

in_child(child)
forked.set()
work.join()
assert torch.equal(torch.rand(4), expected)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", ["torch", "torch.openreg", "torch.default_generator"])
def test_a_seed_is_set_while_the_generator_is_lent(seed):
    library = torch.library.Library("seeded_lend", "DEF")
    library.define("draw(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    drawing, seeded = threading.Event(), threading.Event()

    def draw(x):
        y = torch.rand_like(x)
        drawing.set()
        seeded.wait()
        return y + torch.rand_like(x)

    library.impl("draw", draw, "CPU")
    x = torch.ones(4, device=DEVICE)
    torch.manual_seed(5)
    torch.rand(1)
    before = torch.rand(4)
    torch.manual_seed(5)
    torch.rand(1)
    work = threading.Thread(target=lambda: torch.ops.seeded_lend.draw(x))
    work.start()
    drawing.wait()
    eval(seed).manual_seed(11)
    seeded.set()
    work.join()
    expected = torch.rand(4, generator=torch.Generator().manual_seed(11))
    assert torch.equal(torch.rand(4), before if seed == "torch.openreg" else expected)
    if seed != "torch.default_generator":
        assert torch.equal(torch.rand(4, device=DEVICE).cpu(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 0), (0, 1, 1)], ids=str)
def test_an_operator_that_draws_in_another_goes_on_with_its_numbers(devices):
    library = torch.library.Library("nested_lend", "DEF")
    for name in ("outer", "middle", "inner"):
        library.define(f"{name}(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    at = [torch.ones(4, device=f"openreg:{index}") for index in devices]
    drawn = ([], [])

    def kernel(level):
        def draw(x):
            drawn[devices[level]].append(torch.rand_like(x))
            if level < 2:
                (torch.ops.nested_lend.middle, torch.ops.nested_lend.inner)[level](at[level + 1])
                drawn[devices[level]].append(torch.rand_like(x))
            return x.clone()

        return draw

    for level, name in enumerate(("outer", "middle", "inner")):
        library.impl(name, kernel(level), "CPU")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.ops.nested_lend.outer(at[0])
    assert torch.equal(torch.get_rng_state(), before)
    for index, seen in enumerate(drawn):
        after = torch.rand(4, device=f"openreg:{index}").cpu()
        expected = torch.rand(4 * len(seen) + 4, generator=torch.Generator().manual_seed(5))
        assert torch.equal(torch.cat([*seen, after]), expected)


def test_an_operator_that_draws_launches_while_another_waits_to_draw():
    """The other has its stream's turn, which it gives up while it waits for the host's generator."""
    code = """
import threading, warnings, torch
from openreg_ops import fallback
warnings.simplefilter("ignore", UserWarning)  # of the fallback
library = torch.library.Library("turns", "DEF")
for name in ("outer", "shared"):
    library.define(f"{name}(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
drawing = threading.Event()
x = torch.ones(4, device="openreg")

def outer(y):
    drawing.set()
    work.join(0.3)  # until it waits
    return (x + 1).cpu() + torch.rand_like(y)

library.impl("outer", outer, "CPU")
library.impl("shared", torch.rand_like, "CPU")
with fallback.share("turns::shared"):
    work = threading.Thread(target=lambda: (drawing.wait(), torch.ops.turns.shared(x)))
    work.start()
    torch.ops.turns.outer(x)
    work.join()
"""
    done = python("-c", code, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
