"""Checks of the dtypes that CUDA has and the CPU lacks, and of autocast, over PyTorch's OpInfo database.

`cuda_dtypes`: an operator must take every dtype that CUDA takes. Its results must equal the CPU's results in a wider
dtype, rounded, and have the dtypes that the meta device gives. `autocast`: every operator that runs in float32 runs under
`torch.autocast` in float16 and bfloat16 too, forward, backward and under `torch.func.grad`, with nearly the results of
float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.conformance import transforms
from openreg_tools.conformance.one_sample import OneSample, empty, sized
from openreg_tools.conformance.outcomes import Outcome, Tally, one_line, run
from openreg_tools.core import opinfo
from openreg_tools.core.blocks import first_line
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

# In half precision, results may differ by two roundings; a gradient passes through several operators.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.complex32: 4e-3}

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


def _map(value: Any, tensor: Callable[[torch.Tensor], Any], dtype: Callable[[torch.dtype], Any]) -> Any:
    def each(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return tensor(leaf)
        return dtype(leaf) if isinstance(leaf, torch.dtype) else leaf

    return tree_map(each, value)


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """With fractions, because a quotient of floats may round into the next bin."""
    low, high = int(min), int(max)
    if low == high and x.numel():
        low, high = int(x.min()), int(x.max())
    if low == high:
        low, high = low - 1, high + 1
    counts = [0] * bins
    for value in x.flatten().tolist():
        if low <= value <= high:
            counts[int(min_(Fraction((value - low) * bins, high - low), bins - 1))] += 1
    return torch.tensor(counts, dtype=x.dtype)


min_ = min


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(x), 0, x)


def _nanmean(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    counts = torch.isnan(x).logical_not().sum(*args, **{k: v for k, v in kwargs.items() if k != "dtype"})
    return torch.sum(_without_nan(x), *args, **kwargs) / counts


# The CPU has no wider dtype for these either.
REFERENCES: dict[str, Callable] = {
    "histc": _histc,
    "nansum": lambda x, *args, **kwargs: torch.sum(_without_nan(x), *args, **kwargs),
    "nanmean": _nanmean,
}


@dataclasses.dataclass
class _Case:
    """One sample on the device, and its expected results."""

    op: Any
    sample: Any
    index: int
    dtype: torch.dtype
    device: str
    tally: Tally

    def fail(self, kind: str, message: str) -> None:
        self.tally.fail("cuda_dtypes", kind, self.index, f"{self.dtype}: {message}")

    def call(self, function: Callable, move: Callable, **more: Any) -> Any:
        s = self.sample
        return function(move(s.input), *move(tuple(s.args)), **move(s.kwargs), **more)

    def expected(self, backward: bool, **more: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The CPU's results and gradients in the wider dtype."""
        leaves: list[torch.Tensor] = []
        made: dict[int, torch.Tensor] = {}

        def wide(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in made:
                made[id(x)] = x.detach().to(WIDER.get(x.dtype, x.dtype), copy=True)
                if backward and x.requires_grad:
                    leaves.append(made[id(x)].requires_grad_())
            return made[id(x)]

        torch.manual_seed(opinfo.SEED)
        result = self.call(
            REFERENCES.get(self.op.name, self.op), lambda value: _map(value, wide, lambda d: WIDER.get(d, d)), **more
        )
        return _tensors(result), _gradients(self.sample, result, leaves, self.dtype) if backward else []

    def run(self, backward: bool) -> None:
        self.tally.ran["cuda_dtypes"] += 1
        expected, gradients = self.expected(backward)
        move = Move(self.device, backward)
        torch.manual_seed(opinfo.SEED)
        try:
            result = self.call(self.op, move)
        except Exception as error:
            return self.fail("error", first_line(error))
        actual = _tensors(result)
        self.compare(expected, actual, "value", self.dtypes())
        if backward:
            try:
                found = _gradients(self.sample, result, move.leaves, self.dtype)
            except Exception as error:
                return self.fail("gradient", f"backward: {first_line(error)}")
            self.compare(gradients, found, "gradient", [x.dtype for x in move.leaves] if found else [])
        self.inplace(actual)
        self.out(actual)

    def dtypes(self) -> list[torch.dtype] | None:
        """The dtypes of the results according to the meta kernels; None if they fail."""
        try:
            return [x.dtype for x in _tensors(self.call(self.op, Move("meta")))]
        except Exception:
            return None

    def compare(
        self, expected: list[Any], actual: list[Any], kind: str, dtypes: list[torch.dtype] | None = None
    ) -> None:
        if len(expected) != len(actual):
            return self.fail("structure", f"expected {len(expected)} tensors, but got {len(actual)}")
        for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
            if e is None or a is None:
                if (e is None) != (a is None):
                    self.fail(kind, f"input {i}: expected {'no' if e is None else 'a'} gradient")
                continue
            if a.device.type != torch.device(self.device).type:
                return self.fail("device", f"a result is on {a.device}")
            if dtypes and a.dtype != dtypes[i]:
                return self.fail("dtype", f"expected {dtypes[i]}, but got {a.dtype}")
            if e.shape != a.shape:
                return self.fail("shape", f"expected {list(e.shape)}, but got {list(a.shape)}")
            self.close(e.detach().to(a.dtype), a.detach().cpu(), kind)

    def close(self, expected: torch.Tensor, actual: torch.Tensor, kind: str) -> None:
        if expected.layout != torch.strided:
            expected, actual = expected.to_dense(), actual.to_dense()
        tolerance = TOLERANCE.get(actual.dtype)
        if tolerance is None:
            options = {}
        else:
            wide = torch.complex64 if actual.is_complex() else torch.float32
            expected, actual = expected.to(wide), actual.to(wide)
            if kind == "gradient":
                # A value that half precision rounds to infinity between the operators of a derivative stays infinite.
                chosen = torch.isfinite(actual)
                if not chosen.any():
                    chosen = torch.isfinite(expected)
                expected, actual = expected[chosen], actual[chosen]
            finite = expected[torch.isfinite(expected)].abs()
            largest = finite.max().item() if finite.numel() else 0.0
            tolerance *= 2 if kind == "gradient" else 1
            options = {"rtol": tolerance, "atol": tolerance * largest + 1e-7}
        try:
            torch.testing.assert_close(actual, expected, equal_nan=True, **options)
        except AssertionError as error:
            self.fail(kind, one_line(error))

    def inplace(self, forward: list[torch.Tensor]) -> None:
        """In place, the values must equal the forward call's, bit for bit."""
        function, input_ = self.op.get_inplace(), self.sample.input
        if function is None or self.sample.broadcasts_input or not isinstance(input_, torch.Tensor) or not forward:
            return
        if forward[0].dtype != input_.dtype:
            return
        move = Move(self.device)
        torch.manual_seed(opinfo.SEED)
        try:
            result = self.call(function, move)
        except Exception as error:
            return self.fail("error", f"in place: {first_line(error)}")
        if result is not move(input_):
            self.fail("alias", "in place: expected the first argument back")
        self.same(result, forward[0], "in place")

    def out(self, forward: list[torch.Tensor]) -> None:
        """Call with out= tensors of the right size, permuted, and empty ones, which are resized."""
        if not self.op.supports_out or "out" in self.sample.kwargs or not forward:
            return
        if self.leaves_out(forward):
            self.tally.notes["out= is not written by PyTorch's composite"] += 1
            return
        dense = all(x.layout == torch.strided for x in forward)
        for make in (sized, strided, empty) if dense else (sized,):
            move = Move(self.device)
            outs = [move(make(x.detach().cpu())) for x in forward]
            torch.manual_seed(opinfo.SEED)
            try:
                self.call(self.op, move, out=outs[0] if len(outs) == 1 else tuple(outs))
            except Exception as error:
                return self.fail("error", f"out= ({make.__name__}): {first_line(error)}")
            for e, a in zip(forward, outs, strict=True):
                self.same(a, e, f"out= ({make.__name__})")

    def leaves_out(self, forward: list[torch.Tensor]) -> bool:
        """Returns true if the CPU fails to resize an empty out= in the wider dtype, as in fft.ihfftn of one dimension."""
        if len(forward) != 1 or not forward[0].numel():
            return False
        out = torch.empty(0, dtype=WIDER.get(forward[0].dtype, forward[0].dtype))
        try:
            self.expected(backward=False, out=out)
        except Exception:
            return False
        return not out.numel()

    def same(self, actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        actual, expected = actual.detach().cpu(), expected.detach().cpu()
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return self.fail("shape", f"{where}: expected {expected.dtype}{list(expected.shape)}, but got "
                             f"{actual.dtype}{list(actual.shape)}")  # fmt: skip
        try:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            self.fail("value", f"{where}: {one_line(error)}")


def strided(t: torch.Tensor) -> torch.Tensor:
    """The reversed dimension order, every second element."""
    if not t.dim():
        return torch.ones(3, dtype=t.dtype)[1]
    big = torch.ones([*reversed(t.shape[:-1]), t.shape[-1]][: t.dim() - 1] + [2 * t.shape[-1]], dtype=t.dtype)
    return big[..., ::2].permute(*reversed(range(t.dim() - 1)), t.dim() - 1)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def _gradients(sample: Any, result: Any, leaves: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Gradients of the results, weighted by the same numbers, which `dtype` can represent whatever the results' dtype."""
    outputs = [x for x in _tensors(sample.output_process_fn_grad(result)) if x.requires_grad]
    if not outputs or not leaves:
        return []
    host, weights = torch.Generator().manual_seed(opinfo.SEED), []
    for y in outputs:
        y = y.to_dense() if y.layout != torch.strided else y
        weight = torch.randn(y.shape, dtype=torch.complex64 if y.is_complex() else torch.float32, generator=host)
        if dtype in TOLERANCE:
            half = torch.float16 if dtype == torch.complex32 else dtype
            weight = weight.to(torch.complex32 if y.is_complex() else half)
        weights.append(weight.to(y.dtype).to(y.device))
    outputs = [y.to_dense() if y.layout != torch.strided else y for y in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def check_dtype(
    op: Any, dtype: torch.dtype, device: str, samples: int, tally: Tally, at: Callable[[str], None]
) -> None:
    """Check `op` in one dtype that the CPU lacks."""
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
    for i, sample in enumerate(opinfo.samples(op, dtype, backward, samples)):
        at(f"cuda_dtypes, sample {i}")
        _Case(op, sample, i, dtype, device, tally).run(backward)


# ---- autocast ----


def check_autocast(op: Any, device: str, samples: int, tally: Tally, at: Callable[[str], None]) -> None:
    """What runs in float32 must run under autocast in float16 and bfloat16, with nearly equal results and gradients."""
    backward = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    if op.full_name in REFUSED_UNDER_AUTOCAST:
        return
    for i, sample in enumerate(opinfo.samples(op, torch.float32, backward, samples)):
        one = OneSample(op, sample, i, device, tally)
        plain, plain_gradients = _outcome(one, contextlib.nullcontext(), backward)
        if plain.error or (plain_gradients and plain_gradients.error):
            continue
        transformed = backward and not run(functools.partial(_transformed, one), device).error
        for dtype in (torch.float16, torch.bfloat16):
            at(f"autocast, sample {i}")
            tally.ran["autocast"] += 1
            cast, gradients = _outcome(one, torch.autocast(torch.device(device).type, dtype=dtype), backward)
            if transformed:
                with torch.autocast(torch.device(device).type, dtype=dtype):
                    again = run(functools.partial(_transformed, one), device)
                if again.error:
                    message = f"{dtype}, torch.func.grad: {first_line(again.error)}"
                    tally.fail("autocast", "gradient", i, message)
            for kind, wide, half in (("error", plain, cast), ("gradient", plain_gradients, gradients)):
                if half is None or wide is None:
                    continue
                if half.error:
                    tally.fail("autocast", kind, i, f"{dtype}: {first_line(half.error)}")
                    break
                if not one.values or cast.drew:
                    continue
                far = list(_far(wide.value, half.value, dtype))
                if far and _as_on_cpu(op, sample, i, dtype, (cast, gradients), backward):
                    tally.notes["as far from float32 as autocast on the CPU"] += 1
                    break
                for message in far:
                    tally.fail("autocast", "value" if kind == "error" else kind, i, f"{dtype}: {message}")


def _outcome(one: Any, context: Any, backward: bool) -> tuple[Outcome, Outcome | None]:
    def call(move: Move) -> Any:
        with context:
            return one.call(one.op, move)

    result = run(call, one.device, backward)
    if result.error or not backward:
        return result, None
    dtype = torch.float32
    return result, run(lambda move: _gradients(one.sample, result.value, result.mover.leaves, dtype), one.device)


def _as_on_cpu(op: Any, sample: Any, index: int, dtype: torch.dtype, found: tuple, backward: bool) -> bool:
    """Returns true if autocast differs as much on the CPU: float16 changes the softmax of large scores by 2 %."""
    one = OneSample(op, sample, index, "cpu", Tally())
    cpu = _outcome(one, torch.autocast("cpu", dtype=dtype), backward)
    return all(not (e.error or list(_far(e.value, a.value, dtype))) for e, a in zip(cpu, found, strict=True) if e and a)


def _transformed(one: Any, move: Move) -> Any:
    """torch.func.grad of one sample, where code of the backend above the dispatcher receives wrapped tensors."""
    arguments = transforms.Arguments(one)
    if not arguments.differentiable:
        return None
    gradient = torch.func.grad(transforms.loss(arguments.function(one.op, move)), arguments.differentiable)
    return gradient(*[move(x) for x in arguments.tensors])


def _far(expected: Any, actual: Any, dtype: torch.dtype) -> Iterator[str]:
    """Where half precision differs from float32 by more than rounding explains."""
    expected, actual = tree_leaves(expected), tree_leaves(actual)
    if len(expected) != len(actual):
        yield f"expected {len(expected)} results, but got {len(actual)}"
        return
    tolerance = 0.02 if dtype == torch.float16 else 0.15
    for e, a in zip(expected, actual, strict=True):
        if not isinstance(e, torch.Tensor) or not isinstance(a, torch.Tensor):
            if (e is None) != (a is None):
                yield f"expected {'no' if e is None else 'a'} gradient"
            continue
        if e.layout != torch.strided or e.is_nested or not (e.is_floating_point() or e.is_complex()) or not e.numel():
            continue
        if e.shape != a.shape:
            yield f"expected {list(e.shape)}, but got {list(a.shape)}"
            continue
        wide = torch.complex128 if e.is_complex() else torch.float64
        e, a = e.detach().cpu().to(wide), a.detach().cpu().to(wide)
        finite = torch.isfinite(e)
        if not finite.any():
            continue
        largest, error = e[finite].abs().max().item(), (a - e)[finite].abs().max().item()
        if not error <= tolerance * (largest + 0.05):
            yield f"differs from float32 by {error:.3g}, of values up to {largest:.3g}"
