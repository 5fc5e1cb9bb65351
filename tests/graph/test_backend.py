"""torch.compile(backend="openreg") is Inductor for the device, as `torch.compile` without a backend is."""

import pytest
import torch
from graphs import run_and_get_code, uncached
from processes import python
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

pytestmark = pytest.mark.compiles


def function(x, weight):
    return torch.relu(x @ weight).sum(-1)


def code(device, **options):
    torch.manual_seed(0)
    arguments = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
    with uncached():
        out, (text,) = run_and_get_code(torch.compile(function, fullgraph=True, **options), *arguments)
    assert_close(out, function(*arguments))
    return "\n".join(line for line in text.splitlines() if "AOT ID" not in line)


@pytest.mark.slow
def test_dynamo_lists_it_and_the_import_loads_no_compiler():
    program = (
        "import sys, torch, openreg_ops\n"
        "x = torch.ones(3, device='openreg', requires_grad=True); x.sin().sum().backward()\n"
        "assert not {'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)\n"
        "assert 'openreg' in torch._dynamo.list_backends()\n"
        "assert 'openreg' in torch.compiler.list_backends()\n"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", ["openreg", "cpu"])
def test_it_generates_the_code_of_inductor(device):
    assert code(device, backend="openreg") == code(device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "default"),
    [
        ({"mode": "default"}, {}),
        ({"options": {"epilogue_fusion": False, "size_asserts": False}}, {"options": {"size_asserts": False}}),
    ],
    ids=lambda options: str(next(iter(options.values()), "default")),
)
def test_modes_and_options(named, default):
    text = code("openreg", backend="openreg", **named)
    assert text == code("openreg", **default)
    assert (text != code("openreg")) == ("options" in named)


def test_an_option_that_does_not_exist():
    with pytest.raises(Exception, match="Unexpected optimization option nonesuch"):
        code("openreg", backend="openreg", options={"nonesuch": 1})


@pytest.mark.slow
def test_graphs_are_counted_and_breaks_go_on():
    """A graph on the CPU, between two on the device. Between graphs, Python sees what the first computed."""
    counter, seen = CompileCounterWithBackend("openreg"), []

    @torch.compile(backend=counter)
    def program(x):
        host = (x + 1).cpu()
        torch._dynamo.graph_break()
        seen.append(host.tolist())
        host = host * 2
        torch._dynamo.graph_break()
        return host.to("openreg") - 1

    x = torch.randn(4, device="openreg")
    assert_close(program(x), (x + 1) * 2 - 1)
    assert counter.frame_count == 3 and seen == [(x + 1).tolist()]


def test_other_devices_are_refused():
    with pytest.raises(Exception, match="expected tensors on openreg or the CPU, but got one on meta; use backend="):
        torch.compile(function, backend="openreg")(torch.ones(4, 8, device="meta"), torch.ones(8, 8, device="meta"))
