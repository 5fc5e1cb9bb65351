"""Checks of the dtypes that CUDA has and the CPU lacks, and of autocast, over PyTorch's OpInfo database.

`cuda_dtypes`: an operator must take every dtype that CUDA takes. Its results must equal the CPU's results in a wider
dtype, rounded, and have the dtypes that the meta device gives. `autocast`: every operator that runs in float32 runs under
`torch.autocast` in float16 and bfloat16 too, forward, backward and under `torch.func.grad`, with nearly the results of
float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_tools.conformance import transforms
from openreg_tools.conformance.one_sample import OneSample, empty, sized
from openreg_tools.conformance.outcomes import Comparison, Outcome, Tally, is_simple, run
from openreg_tools.core import opinfo
from openreg_tools.core.compare import has_numbers
from openreg_tools.core.move import Move

CHECKS = ("cuda_dtypes", "autocast")

# What an argument becomes on the CPU.
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.uint8,
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz), torch.float32
    ),
}

# The difference that autocast makes, relative to the largest element.
ROUNDED = {torch.float16: 0.02, torch.bfloat16: 0.15}

# Operators that autocast breaks on CUDA too, and why.
REFUSED_UNDER_AUTOCAST = {
    "nn.functional.binary_cross_entropy": "PyTorch refuses it on every accelerator: its gradient overflows in float16",
    "svd_lowrank": "its matrix product comes out in half precision, in which no device has a QR decomposition",
    "pca_lowrank": "as svd_lowrank",
    "pinverse": "calls linalg.pinv",
    "linalg.pinv": "its forward multiplies in half precision, and its backward then multiplies that by float32",
    "linalg.pinv.singular": "its sample is a matrix product, in half precision, which linalg.pinv takes on no device",
    "linalg.pinv.hermitian": "as linalg.pinv",
}


def dtypes_of(op: Any) -> list[torch.dtype]:
    """The dtypes that CUDA supports for `op`, forward or backward, and the CPU does not."""
    if not op.supported_dtypes("cpu"):
        return []  # the CPU has no kernel to compare with
    missing = op.supported_dtypes("cuda") - op.supported_dtypes("cpu")
    if op.supports_autograd:
        missing |= op.supported_backward_dtypes("cuda") - op.supported_backward_dtypes("cpu")
    return sorted(missing, key=str)


def check(
    op: Any,
    dtype: torch.dtype,
    device: str,
    samples: int = 8,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda where: None,
) -> Tally:
    """Run the checks of this module; `cuda_dtypes` goes with the first dtype of `op`, `autocast` with float32."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "cuda_dtypes" in checks and dtype == opinfo.first_dtype(op):
            for missing in dtypes_of(op):
                check_dtype(op, missing, device, samples, tally, at)
        if "autocast" in checks and dtype == torch.float32 and not op.name.startswith("_foreach"):
            check_autocast(op, device, samples, tally, at)
    return tally


# ---- dtypes ----


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(x), 0, x)


def _nanmean(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    counts = torch.isnan(x).logical_not().sum(*args, **{k: v for k, v in kwargs.items() if k != "dtype"})
    return torch.sum(_without_nan(x), *args, **kwargs) / counts


# The CPU has no wider dtype for these either.
REFERENCES: dict[str, Callable] = {
    "histc": lambda x, *args, **kwargs: torch.histc(x.to(torch.float64), *args, **kwargs),
    "nansum": lambda x, *args, **kwargs: torch.sum(_without_nan(x), *args, **kwargs),
    "nanmean": _nanmean,
}


class _Wide(Move):
    """Copies arguments to contiguous memory of the CPU in a wider dtype."""

    def __init__(self, requires_grad: bool) -> None:
        super().__init__("cpu", requires_grad)
        self.dtypes: dict[int, torch.dtype] = {}  # the narrow ones, by the id of the copy

    def __call__(self, value: Any) -> Any:
        return WIDER.get(value, value) if isinstance(value, torch.dtype) else super().__call__(value)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = super().tensor(tensor)
        self.dtypes[id(copy)] = tensor.dtype
        return copy

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.to(WIDER.get(tensor.dtype, tensor.dtype), copy=True)
        return wide.contiguous() if is_simple(wide) else wide  # some of the CPU's kernels ignore the strides of out=


def _as(value: Any, like: Any) -> Any:
    """Results in the dtypes of other results, if there are as many."""
    (leaves, spec), (others, theirs) = tree_flatten(value), tree_flatten(like)
    if spec != theirs:
        return value
    pairs = zip(leaves, others, strict=True)
    both = (x.to(y.dtype) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x for x, y in pairs)
    return tree_unflatten(list(both), spec)


class _Rounded(Comparison):
    """Compares results of which one was computed in another dtype and rounded, which copies it."""

    def __init__(self, one: OneSample, check: str, dtype: torch.dtype) -> None:
        super().__init__(one.tally, check, one.index, one.device, one.values)
        self.dtype, self.where = dtype, f"{dtype}: "

    def aliases(self, *_: Any) -> None:
        pass

    def returned(self, cpu: Outcome, device: Outcome, kind: str = "error", where: str = "") -> bool:
        return super().returned(cpu, device, "error", where)

    def tensors(self, expected: torch.Tensor, actual: torch.Tensor, kind: str = "value") -> None:
        super().tensors(expected.resolve_conj(), actual.resolve_conj(), kind)

    def close(self, expected: torch.Tensor, actual: torch.Tensor, kind: str) -> None:
        if self.check == "autocast":
            if not has_numbers(expected):
                return  # an index, which rounding may change
            self.near = {"coarse": ROUNDED[self.dtype]}
        elif kind == "gradient":  # it passes through several operators
            self.near = {"factor": 0.5}
        if is_simple(expected) and (self.check == "autocast" or kind == "gradient"):
            # A value that half precision rounds to infinity between the operators of a derivative stays infinite.
            known = [x.abs().isfinite() for x in (expected.cpu(), actual)]
            known = known[1] if kind == "gradient" and known[1].any() else known[0]
            expected = torch.where(known, expected.cpu(), actual)
        super().close(expected, actual, kind)


class _InMissingDtype(OneSample):
    """Compares the device in a dtype that the CPU lacks with the CPU in a wider one, rounded as the meta device says."""

    exact = False

    def __init__(self, op: Any, sample: Any, index: int, device: str, tally: Tally, dtype: torch.dtype) -> None:
        super().__init__(op, sample, index, device, tally)
        self.dtype, self.outs = dtype, (sized, strided, empty)

    def comparison(self, check: str) -> Comparison:
        return _Rounded(self, check, self.dtype)

    def host(self, requires_grad: bool) -> Move:
        return _Wide(requires_grad)

    def both(self, call: Callable[[Move], Any], requires_grad: bool = False) -> tuple[Outcome, Outcome]:
        cpu, there = super().both(call, requires_grad)
        like = run(call, "meta")
        cpu.value = _as(cpu.value, like.value if like.error is None else there.value)
        return cpu, there

    def call(self, function: Callable, move: Move, **more: Any) -> Any:
        reference = REFERENCES.get(self.op.name)
        if reference is None or function is not self.op or not isinstance(move, _Wide):
            return super().call(function, move, **more)
        result = super().call(reference, move)
        return more["out"].resize_(result.shape).copy_(result) if more else result

    def gradient(self, outcome: Outcome) -> list[torch.Tensor | None]:
        found, move = super().gradient(outcome), outcome.mover
        if not isinstance(move, _Wide):
            return found
        return [x if x is None else x.to(move.dtypes[id(leaf)]) for x, leaf in zip(found, move.leaves, strict=True)]

    def inplace(self, check: str = "inplace") -> None:
        """Skips operators whose result does not fit into the first argument: the wider one may have room for it."""
        results, inputs = (
            [getattr(x, "dtype", None) for x in tree_leaves(value)] for value in (self.result(), self.sample.input)
        )
        if results == inputs:
            super().inplace(check)

    def out(self, check: str = "out") -> None:
        """Skips operators that leave an empty out= as it is on the CPU, such as fft.ihfftn of one dimension."""
        result = self.result()
        if self.op.supports_out and isinstance(result, torch.Tensor) and result.numel():
            written = torch.empty(0, dtype=WIDER.get(result.dtype, result.dtype))
            host = run(lambda move: self.call(self.op, move, out=written), self.host(False))
            if host.error is None and not written.numel():
                self.tally.notes["out= is not written by PyTorch's composite"] += 1
                return
        super().out(check)

    def result(self) -> Any:
        """What the operator returns on the device, copied to the CPU; None if it raises."""
        there = run(lambda move: self.call(self.op, move), self.device)
        leaves, spec = tree_flatten(there.value)
        if there.error or not all(isinstance(x, torch.Tensor) for x in leaves):
            return None
        return tree_unflatten([x.detach().cpu() for x in leaves], spec)


def strided(t: torch.Tensor) -> torch.Tensor:
    """The reversed dimension order, every second element."""
    if not t.dim():
        return torch.ones(3, dtype=t.dtype)[1]
    big = torch.ones([*reversed(t.shape[:-1]), t.shape[-1]][: t.dim() - 1] + [2 * t.shape[-1]], dtype=t.dtype)
    return big[..., ::2].permute(*reversed(range(t.dim() - 1)), t.dim() - 1)


def check_dtype(
    op: Any, dtype: torch.dtype, device: str, samples: int, tally: Tally, at: Callable[[str], None]
) -> None:
    """Check `op` in one dtype that the CPU lacks."""
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
    for i, sample in enumerate(opinfo.samples(op, dtype, backward, samples)):
        at(f"cuda_dtypes, sample {i}")
        one = _InMissingDtype(op, sample, i, device, tally, dtype)
        for check in (one.backward if backward else one.forward, one.inplace, one.out):
            check("cuda_dtypes")


# ---- autocast ----


class _UnderAutocast(OneSample):
    """Compares the device under autocast with the device in float32, or with the CPU under autocast."""

    on_cpu = False

    def __init__(self, op: Any, sample: Any, index: int, device: str, tally: Tally, dtype: torch.dtype) -> None:
        super().__init__(op, sample, index, device, tally)
        self.dtype = dtype

    def comparison(self, check: str) -> Comparison:
        return _Rounded(self, check, self.dtype)

    def both(self, call: Callable[[Move], Any], requires_grad: bool = False) -> tuple[Outcome, Outcome]:
        place = "cpu" if self.on_cpu else self.device
        with torch.autocast(torch.device(place).type, dtype=self.dtype, enabled=self.on_cpu):
            expected = run(call, place, requires_grad)
        if expected.error:
            return expected, expected  # it fails without autocast too
        with torch.autocast(torch.device(self.device).type, dtype=self.dtype):
            actual = run(call, self.device, requires_grad)
        self.values &= not actual.drew
        actual.value, actual.drew = _as(actual.value, expected.value), False
        expected.drew = False
        return expected, actual


def check_autocast(op: Any, device: str, samples: int, tally: Tally, at: Callable[[str], None]) -> None:
    """What runs in float32 must run under autocast in float16 and bfloat16, with nearly equal results and gradients."""
    backward = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    if op.full_name in REFUSED_UNDER_AUTOCAST:
        return
    for i, sample in enumerate(opinfo.samples(op, torch.float32, backward, samples)):
        for dtype in ROUNDED:
            at(f"autocast, sample {i}")
            one = _UnderAutocast(op, sample, i, device, Tally(), dtype)
            check = one.backward if backward else one.forward
            check("autocast")
            if one.tally.failures and {failure.kind for failure in one.tally.failures} <= {"value", "gradient"}:
                found, one.tally, one.on_cpu = one.tally, Tally(), True
                check("autocast")
                # float16 changes the softmax of large scores by 2 %.
                if one.tally.failures:
                    one.tally = found
                else:
                    one.tally.notes["as far from float32 as autocast on the CPU"] += 1
            tally.add(one.tally)
            if backward:  # where code of the backend above the dispatcher receives wrapped tensors
                one = _UnderAutocast(op, sample, i, device, tally, dtype)
                one.values = False
                transforms.grad(one, "autocast")
