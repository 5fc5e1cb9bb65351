"""Dynamo's support for the device: devices, streams, events and autocast inside compiled regions."""

import pytest
import torch
from processes import python
from torch.testing import assert_close

pytestmark = pytest.mark.compiles


def compiled(function, backend="eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.slow
def test_the_device_is_registered_when_dynamo_was_imported_first():
    code = (
        "import torch, torch._dynamo, torch._inductor.compile_fx\n"
        "import openreg_ops\n"
        "from torch._inductor.codegen.common import get_scheduling_for_device\n"
        "assert get_scheduling_for_device('openreg')\n"
        "x = torch.ones(3, device='openreg')\n"
        "graph = torch.compile(lambda x: x + torch.openreg.current_device(), backend='eager', fullgraph=True)\n"
        "assert graph(x).equal(x)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_device_is_registered_after_a_search_and_an_interrupted_import():
    code = (
        "import builtins, importlib.util, sys, torch, openreg_ops\n"
        "importlib.util.find_spec('torch._inductor.compile_fx')\n"
        "original, module = builtins.__import__, 'torch._inductor.compile_fx'\n"
        "def interrupted(name, *args, **kwargs):\n"
        "    if module in sys.modules: raise KeyboardInterrupt\n"
        "    return original(name, *args, **kwargs)\n"
        "builtins.__import__ = interrupted\n"
        "try: import torch._inductor.compile_fx\n"
        "except KeyboardInterrupt: print('interrupted')\n"
        "builtins.__import__ = original\n"
        "import torch._inductor.compile_fx\n"
        "from torch._inductor.codegen.common import get_scheduling_for_device\n"
        "assert get_scheduling_for_device('openreg')\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.fast
def test_the_interface_is_that_of_the_device():
    """Inductor's compile processes have only the first three functions."""
    found = torch._dynamo.device_interface.get_interface_for_device("openreg")
    names = ("set_device", "current_device", "get_device_properties")
    assert [getattr(found.Worker, name) for name in names] == [getattr(torch.openreg, name) for name in names]
    names += ("device_count", "is_available", "stream", "current_stream", "set_stream", "synchronize")
    for name in (*names[:2], *names[3:], "memory_allocated", "Event", "Stream", "device"):
        assert getattr(found, name) is getattr(torch.openreg, name), name
    assert (found.exchange_device(1), torch.openreg.current_device()) == (0, 1)
    assert (found.maybe_exchange_device(-1), found.maybe_exchange_device(0)) == (1, 1)
    assert torch.openreg.current_device() == 0


@pytest.mark.fast
def test_constants_of_the_device():
    def function(x):
        index = torch.openreg.current_device() + torch.accelerator.current_device_index()
        count = torch.openreg.device_count() if torch.openreg.is_available() and x.is_openreg else 0
        memory = torch.openreg.get_device_properties().total_memory
        return x.to(torch.accelerator.current_accelerator()) + index + count, memory

    x = torch.randn(3, device="openreg")
    assert_close(compiled(function)(x), function(x))


@pytest.mark.fast
def test_the_current_device_is_guarded():
    def function(x):
        return x + torch.openreg.current_device()

    x, graph = torch.zeros(1, device="openreg:1"), compiled(function)
    assert graph(x).item() == 0
    with torch.openreg.device(1):
        assert graph(x).item() == 1
    assert graph(x).item() == 0


@pytest.mark.parametrize("context", [lambda: torch.openreg.device(1), lambda: torch.accelerator.device_index(1)])
@pytest.mark.parametrize("backend", ["eager", "inductor"])  # AOTAutograd drops the context, for Inductor to see to it
def test_a_device_context(context, backend):
    def function(x):
        with context():
            y = torch.ones(3, device="openreg")
        return y, torch.zeros(3, device="openreg") + x

    y, z = compiled(function, backend)(torch.ones(3, device="openreg"))
    assert y.device.index == 1 and z.device.index == 0 and torch.openreg.current_device() == 0


@pytest.mark.slow
def test_two_devices_in_one_graph():
    def function(x, y):
        return (x.sin() + 1).to("openreg:1") * y, y.to("openreg:0") + x

    x, y = torch.randn(5, device="openreg:0"), torch.randn(5, device="openreg:1")
    results = compiled(function, "inductor")(x, y)
    assert_close(results, function(x, y))
    assert [result.device.index for result in results] == [1, 0]


@pytest.mark.fast
def test_synchronize():
    def function(x):
        y = x * 2
        torch.openreg.synchronize()
        torch.accelerator.synchronize()
        return y + 1

    x = torch.randn(3, device="openreg")
    assert_close(compiled(function)(x), function(x))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_streams_and_events(backend):
    """Each way to make and enter a stream; the sleep shows an order that is not kept."""
    given, event = torch.openreg.Stream(), torch.openreg.Event()

    def function(x):
        made, done = torch.openreg.Stream(), torch.Event(device="openreg")
        outer = torch.openreg.current_stream()
        y = x + 1
        event.record(outer)
        with torch.openreg.stream(given):
            event.wait(given)
            y = y * 2
            done.record(given)
        with made:
            made.wait_event(done)
            y = y - 3
        outer.wait_stream(made)
        return y * 5

    x = torch.randn(1000, device="openreg")
    graph = compiled(function, backend)
    expected = (x + 1).mul(2).sub(3).mul(5).cpu()
    for _ in range(3):
        torch.openreg._sleep(20_000_000)
        assert_close(graph(x).cpu(), expected)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_autocast(backend):
    """Inside the region, with its end, and around it, which is guarded."""

    def inside(x):
        with torch.autocast("openreg", dtype=torch.bfloat16):
            y = x @ x
        return y, y.float() @ x

    x = torch.randn(4, 4, device="openreg")
    results = compiled(inside, backend)(x)
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float32]
    assert_close(results, inside(x))
    graph = compiled(lambda x: x @ x, backend)
    assert graph(x).dtype == torch.float32
    with torch.autocast("openreg", dtype=torch.float16):
        assert graph(x).dtype == torch.float16


@pytest.mark.slow
def test_a_dynamic_size_is_compiled_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    graph = torch.compile(lambda x: torch.softmax(x, -1) * 2, backend=counter, fullgraph=True)
    for size in (5, 8, 13):
        x = torch.randn(size, 7, device="openreg", requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        result, expected = graph(x), torch.softmax(x, -1) * 2
        assert_close(result, expected)
        seed = torch.randn_like(result)
        assert_close(torch.autograd.grad(result, x, seed), torch.autograd.grad(expected, x, seed))
    assert counter.frame_count == 1


@pytest.mark.fast
def test_a_graph_for_each_device_and_dtype():
    counter = torch._dynamo.testing.CompileCounter()
    graph = torch.compile(lambda x: x + 1, backend=counter, fullgraph=True)
    half = torch.ones(3, dtype=torch.half, device="openreg")
    for x in (torch.ones(3, device="openreg:0"), torch.ones(3, device="openreg:1"), torch.ones(3), half):
        for result in (graph(x), graph(x)):
            assert (result.device, result.dtype) == (x.device, x.dtype)
    assert counter.frame_count == 4
