"""Where CUDA makes the host wait, set_sync_debug_mode reports it, and what CUDA refuses as not deterministic is refused."""

import json
from pathlib import Path

import cuda_calls
import pytest
import torch
from torch.nn import functional

TOLD = json.loads((Path(__file__).parent / "cuda_calls.json").read_text())
ON_CUDA = TOLD["calls"] | dict.fromkeys(TOLD["never"], {})
# F.pad replaces these on CUDA, by the device's type, with deterministic operators.
REPLACED = {f"aten.replication_pad{n}d_backward.default" for n in (1, 2, 3)}


@pytest.mark.slow
def test_calls_of_the_samples(monkeypatch):
    """The host waits, and calls are refused, in the same samples of each operator as on CUDA."""
    monkeypatch.setattr("warnings.showwarning", lambda *_, **__: None)
    compared, differ = 0, []
    for op, calls in cuda_calls.outcomes("openreg", count=3).items():
        for key, said in calls.items():
            if op not in ON_CUDA or (ON_CUDA[op] and key not in ON_CUDA[op]):
                continue  # another version of PyTorch has other samples
            compared += 1
            waits, refused = ON_CUDA[op][key] if ON_CUDA[op] else (False, False)
            on_cuda = [waits, refused and op not in REPLACED]
            if said != on_cuda:
                differ.append(f"{op} {key}: {on_cuda} on CUDA, {said} here")
    assert not differ, "\n".join(differ)
    assert compared > 2000


def test_the_error_names_the_operator_and_the_remedy():
    x = torch.rand(1, 3, 8, device="openreg", requires_grad=True)
    out = functional.pad(x, (1, 1), "reflect").sum()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(
            RuntimeError, match="aten::reflection_pad1d_backward on openreg, as on CUDA, does not have a "
        ):
            out.backward(retain_graph=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(
            UserWarning, match="aten::reflection_pad1d_backward on openreg, as on CUDA, does not have a "
        ):
            out.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.grad is not None


def plane(x):
    """A tensor of `x` in 4 dimensions that requires a gradient."""
    return x.expand(1, 1, 3, 3).clone().requires_grad_()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: torch.histc(x, 3),
        lambda x, i: torch.bincount(i, x),
        lambda x, i: x.median(0),
        lambda x, i: x.put_(i, x.clone(), accumulate=True),
        lambda x, i: x.scatter(0, i, x, reduce="multiply"),
        lambda x, i: x.scatter_(0, i, x.clone(), reduce="add"),
        lambda x, i: x.scatter_reduce(0, i, x, "prod"),
        lambda x, i: torch.median(x, 0, out=(x.new_empty(()), i.new_empty(()))),
        lambda x, i: x.put(i, x),
        lambda x, i: functional.cross_entropy(x.view(1, 3, 1, 1), i[:1].view(1, 1, 1)),
        lambda x, i: functional.embedding_bag(i, plane(x)[0, 0], i[:1], mode="max").sum().backward(),
        lambda x, i: functional.interpolate(plane(x), size=5, mode="bicubic", antialias=True).sum().backward(),
        lambda x, i: torch.ops.aten.upsample_bilinear2d(plane(x), [5, 5], False).sum().backward(),
    ],
)
@pytest.mark.parametrize("mode", ["inline", "async"])
def test_refused(call, mode):
    x, i = torch.rand(3, device="openreg"), torch.arange(3, device="openreg")
    with torch.openreg.launch_mode(mode):
        call(x.clone(), i)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                call(x.clone(), i)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: torch.histc(x.long(), 3),
        lambda x, i: torch.bincount(i),
        lambda x, i: x.median(),
        lambda x, i: x.scatter_reduce(0, i, x, "sum"),
        lambda x, i: x.scatter_reduce(0, i[:0], x, "prod"),
        lambda x, i: x.scatter_(0, i, 2.0, reduce="add"),
        lambda x, i: x.index_add(0, i, x),
        lambda x, i: functional.cross_entropy(x.view(1, 3, 1, 1), i[:1].view(1, 1, 1), reduction="none"),
        lambda x, i: functional.embedding_bag(i, plane(x)[0, 0], i[:1], mode="sum").sum().backward(),
        lambda x, i: (
            functional.interpolate(x.view(1, 1, 1, 3).requires_grad_(), scale_factor=2.0, mode="bilinear")
            .sum()
            .backward()
        ),
        lambda x, i: functional.pad(x.view(1, 1, 3).requires_grad_(), (1, 1), "replicate").sum().backward(),
    ],
)
def test_permitted(call):
    x, i = torch.rand(3, device="openreg"), torch.arange(3, device="openreg")
    torch.use_deterministic_algorithms(True)
    try:
        call(x, i)
    finally:
        torch.use_deterministic_algorithms(False)
