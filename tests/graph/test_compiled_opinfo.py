"""A slice of `python -m openreg_ops compiled`: operators of PyTorch's OpInfo database, compiled against eager mode.

Every ninth of about 740 in the order of their names, forward only; the command takes all, with gradients.
"""

import argparse
import functools
import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves

from openreg_ops.testing import compiled

pytestmark = pytest.mark.compiles

STEP = 9


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_compiled_operators_agree_with_eager_mode(half):
    batch = list(itertools.islice(compiled.cases(), half * STEP, None, 2 * STEP))
    assert len(batch) > 30
    found = compiled.check(batch)
    assert not found.different, "\n".join(f"{name}: {message[:300]}" for name, message in found.different.items())
    assert all(name.startswith("jiterator_") for name in found.invalid)  # CUDA's


@pytest.mark.slow
def test_a_wrong_operator_is_found():
    """Finds it among correct operators, and distinguishes it from one that needs a graph break and from an invalid
    call."""

    def wrong(x):
        return x + torch.compiler.is_compiling()

    def breaks_graph(x):
        return x + 1 if x.sum() > 0 else x

    def invalid(x):
        return x.reshape(2)

    cases = [
        compiled.Case(function.__name__, function, ((torch.ones(3),), {}), False)
        for function in (torch.sin, wrong, torch.cos, breaks_graph, invalid)
    ]
    found = compiled.check(cases)
    assert set(found.different) == {"wrong"}
    assert (found.breaks, found.invalid) == ({"breaks_graph"}, {"invalid"})


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs are captured, and not compiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def case_of(function):
    return compiled.Case(function.__name__, function, ((torch.ones(3),), {}), False)


def wrong_on(device):
    """Wrong in a graph on that device alone."""
    return lambda x: x + (x.device.type == device and torch.compiler.is_compiling())


@pytest.mark.parametrize("device", ["cpu", "openreg"])
@pytest.mark.parametrize("breaks", [False, True])
def test_the_device_runs_every_graph(uncompiled, device, breaks):
    """Also those with breaks."""
    wrong = {each: wrong_on(each) for each in ("cpu", "openreg")}

    def on_cpu(x):
        return wrong["cpu"](x) if not breaks or x.sum() > 0 else x

    def on_device(x):
        return wrong["openreg"](x) if not breaks or x.sum() > 0 else x

    found = compiled.check([case_of(on_cpu), case_of(on_device)], device)
    assert set(found.different) == {"on_cpu" if device == "cpu" else "on_device"} and not found.invalid
    assert found.breaks == ({"on_cpu", "on_device"} if breaks else set())


@pytest.mark.parametrize("batch", ["1", "3", "10"])
def test_the_command_counts_what_it_finds(uncompiled, monkeypatch, capsys, batch):
    def breaks_graph(x):
        return x + 1 if x.sum() > 0 else x

    def invalid(x):
        return x.reshape(2)

    def wrong(x):
        return wrong_on("openreg")(x)

    def said(*functions):
        chosen = [case_of(function) for function in functions]
        monkeypatch.setattr(compiled, "cases", lambda *_: iter(chosen))
        parser = argparse.ArgumentParser()
        compiled.add_arguments(parser)
        status = compiled.main(parser.parse_args(["--batch", batch]))
        return status, capsys.readouterr().out

    status, text = said(torch.sin, breaks_graph, invalid, torch.cos)
    counts = "4 operators: 3 agree with eager mode, 1 of them with a graph break; 0 differ or fail; 1 fail in eager mode too: "
    assert status == 0 and text.startswith(f"{counts}invalid.")
    status, text = said(torch.sin, wrong, torch.cos)
    counts = "3 operators: 2 agree with eager mode, 0 of them with a graph break; 1 differ or fail; 0 fail in eager mode too: "
    assert status == 1 and text.startswith("wrong: Tensor-likes are not close!") and f"\n{counts}none." in text


def test_samples_have_a_result():
    """Of operators whose first sample is empty."""
    cases = list(compiled.cases(r"^(cholesky_solve|linalg\.svd|nn\.functional\.unfold|nonzero)$"))
    assert len(cases) == 4
    for case in cases:
        args, kwargs = case.arguments
        assert any(x.numel() for x in tree_leaves(case.function(*args, **kwargs))), case.name


def test_a_wrong_gradient_is_found(uncompiled):
    """Finds it among correct ones, of which one takes an argument that its result does not depend on."""

    def wrong(x):
        return x + (x - x.detach() if torch.compiler.is_compiling() else 0)

    def first(x, y):
        return x * 2

    def integer(x):
        return x + 1

    def ones():
        return torch.ones(3, requires_grad=True)

    cases = [
        compiled.Case("sin", torch.sin, ((ones(),), {}), True),
        compiled.Case("wrong", wrong, ((ones(),), {}), True),
        compiled.Case("first", first, ((ones(), ones()), {}), True),
        compiled.Case("integer", integer, ((torch.ones(3, dtype=torch.int64),), {}), False),
    ]
    assert set(compiled.compare(cases)) == {"wrong"}
    assert not compiled.compare(cases[3:])
