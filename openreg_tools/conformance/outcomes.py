"""Calls on a device and on the CPU, and comparisons of all that a program can observe of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from openreg_tools import backends
from openreg_tools.core.blocks import first_line
from openreg_tools.core.compare import apart, is_small, same_bits
from openreg_tools.core.move import Move
from openreg_tools.core.opinfo import SEED

# Operators that return uninitialized memory: everything but the values is compared.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Operators that expect these tensor arguments on the CPU, on every device including CUDA.
HOST_ARGUMENTS = {"tensor_split": "tensor_indices_or_sections is read while the shapes are made"}


def draws_as_cpu(kind: str) -> bool:
    """Returns true if the generator of a device type draws the same numbers as the CPU's."""
    return kind == "cpu" or backends.of_device(kind).draws_as_cpu


@dataclasses.dataclass
class Failure:
    """One difference between the device and the CPU."""

    check: str  # one of CHECKS
    kind: str  # what differed: see `KINDS`
    sample: int
    message: str


KINDS = {
    "error": "the device raised, the CPU did not",
    "no error": "the CPU raised, the device did not",
    "error type": "the CPU and the device raised errors of different types",
    "value": "values differ",
    "gradient": "gradients differ, or exist on one side only",
    "dtype": "dtypes differ",
    "shape": "shapes differ",
    "structure": "results of another type or number, or Python values that differ",
    "layout": "layout, conj or neg bit, coalescing, or requires_grad differ",
    "device": "a result is not on the device",
    "late": "an error of the call appeared at the next synchronization",
    "alias": "a result shares memory with an argument on one side only",
    "guard": "memory outside a result was written to",
    "rng": "the CPU's generator moved, or the device drew other numbers from the same seed",
    "crash": "the worker process died",
    "internal": "the device failed an internal assertion",
    "timeout": "the operator took longer than allowed",
}


@dataclasses.dataclass
class Tally:
    """What the checks of one case found: how many comparisons they made, and the failures."""

    ran: Counter[str] = dataclasses.field(default_factory=Counter)  # number of comparisons, by check
    failures: list[Failure] = dataclasses.field(default_factory=list)
    notes: Counter[str] = dataclasses.field(default_factory=Counter)  # differences that are allowed: strides, rounding

    def fail(self, check: str, kind: str, sample: int, message: str) -> None:
        self.failures.append(Failure(check, kind, sample, message))

    def add(self, other: Tally) -> None:
        self.ran.update(other.ran)
        self.failures += other.failures
        self.notes.update(other.notes)


# ---- running and comparing ----


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold the elements of another one: the parts of a nested tensor, indices and values."""
    if x.is_nested:
        return list(x.unbind())
    if x.is_quantized:
        return [x.dequantize()]
    if x.layout == torch.sparse_coo:
        return [x.coalesce().indices(), x.coalesce().values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x if x.layout == torch.strided else x.to_dense()]


def is_simple(x: torch.Tensor) -> bool:
    """Returns true if `parts` are the tensor itself."""
    return x.layout == torch.strided and not x.is_nested and not x.is_quantized


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns true if everything that a program can observe of two results of one device is equal, bit for bit."""
    if (a.dtype, a.layout, a.device, a.requires_grad) != (b.dtype, b.layout, b.device, b.requires_grad):
        return False
    if is_simple(a) != is_simple(b):
        return False
    if not is_simple(a):
        of_a, of_b = parts(a.detach()), parts(b.detach())
        return len(of_a) == len(of_b) and all(map(same, of_a, of_b))
    if a.shape != b.shape or a.stride() != b.stride():
        return False
    if any(size < 0 for size in a.shape):  # as_strided makes such a tensor, which nothing can read
        return True
    a, b = (x.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for x in (a, b))
    if (a.dtype.is_floating_point or a.dtype.is_complex) and not is_small(a) and a.dtype != torch.complex32:
        return same_bits(a, b)
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) if a.numel() else True


def short(x: Any) -> str:
    """A result in a message: its dtype, its shape and its first elements."""
    return f"{x.dtype} {list(x.shape)} {x.flatten()[:3].tolist()}" if isinstance(x, torch.Tensor) else repr(x)


@dataclasses.dataclass
class Outcome:
    """What a call returned or raised, and its arguments."""

    value: Any = None
    error: Exception | None = None
    mover: Move | None = None
    drew: bool = False  # random numbers from the CPU's generator


def seed(device: str) -> None:
    """Seed the generators of the CPU and of a device. torch.manual_seed also queues calls for devices that are not in use."""
    torch.default_generator.manual_seed(SEED)
    if torch.device(device).type not in ("cpu", "meta"):
        module = getattr(torch, torch.device(device).type, None)
        seeds = [getattr(module, name) for name in ("manual_seed_all", "manual_seed") if hasattr(module, name)]
        for function in seeds[:1]:  # a device without a generator has neither
            function(SEED)


def run(call: Callable[[Move], Any], on: Move | str, requires_grad: bool = False) -> Outcome:
    """Seed everything, then call with a `Move` to a device."""
    outcome = Outcome(mover=on if isinstance(on, Move) else Move(on, requires_grad))
    seed(str(outcome.mover.device))
    before = torch.get_rng_state()
    try:
        outcome.value = call(outcome.mover)
    except Exception as error:
        outcome.error = error
        error.__traceback__ = None
    outcome.drew = not torch.equal(before, torch.get_rng_state())
    return outcome


class Draws(TorchDispatchMode):
    """Detects whether random numbers are drawn, even if the generator's state is restored (OpInfo's wrappers do that)."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.drew |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import dynamo


class Comparison:
    """Compares the device's outcome with the CPU's, and adds failures and notes to a tally.

    Attributes:
        near: how far results may be apart, as `core.compare.apart` takes it. By default, it is a quarter of what `check`
            allows, because the other side computes the same, and not in another way.
        where: how messages begin.
    """

    def __init__(self, tally: Tally, check: str, sample: int, device: str, values: bool) -> None:
        self.tally, self.check, self.sample, self.values = tally, check, sample, values
        self.device, self.where = torch.device(device), ""
        self.exact, self.near = False, {"factor": 0.25}
        # The results whose values differ: the CPU's, and the device's.
        self.unequal: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fail(self, kind: str, message: str) -> None:
        self.tally.fail(self.check, kind, self.sample, f"{self.where}{message}")

    def outcomes(self, cpu: Outcome, device: Outcome) -> bool:
        """Returns true if both returned; if so, their values are compared."""
        self.tally.ran[self.check] += 1
        if self.device.type != "cpu" and device.drew:
            self.fail("rng", "the CPU's generator moved")
        # The same seed gives the same numbers, to the bit, where the device's generator is the CPU's algorithm; elsewhere
        # random values are not comparable.
        self.exact = cpu.drew
        self.values &= not cpu.drew or draws_as_cpu(self.device.type)
        if not self.returned(cpu, device):
            return False
        self.results(cpu, device)
        return True

    def returned(self, cpu: Outcome, device: Outcome, kind: str = "error", where: str = "") -> bool:
        """Returns true if neither raised. If one raised, the other must raise the same type."""
        if cpu.error is None and device.error is None:
            return True
        ours, theirs = device.error and first_line(device.error), cpu.error and first_line(cpu.error)
        if cpu.error is None:
            self.fail(kind, f"{where}{ours}")
        elif device.error is None:
            self.fail("no error", f"{where}the CPU raised {theirs}")
        elif type(cpu.error) is not type(device.error):
            self.fail("error type", f"{where}the CPU raised {theirs}; the device {ours}")
        return False

    def results(self, cpu: Outcome, device: Outcome) -> None:
        expected, expected_spec = tree_flatten(cpu.value)
        actual, actual_spec = tree_flatten(device.value)
        if expected_spec != actual_spec:
            return self.fail("structure", f"expected {expected_spec}, but got {actual_spec}")
        for e, a in zip(expected, actual, strict=True):
            if isinstance(e, torch.Tensor) and isinstance(a, torch.Tensor):
                self.tensors(e, a)
                self.aliases(e, a, cpu.mover, device.mover)
            elif isinstance(e, torch.ScriptObject) and isinstance(a, torch.ScriptObject):
                pass  # packed weights, which cannot be compared
            elif type(e) is not type(a):
                self.fail("structure", f"expected {type(e).__name__}, but got {type(a).__name__}")
            elif not isinstance(e, torch.device) and not (e == a or e != e):
                self.fail("structure", f"expected {e!r}, but got {a!r}")

    def tensors(self, expected: torch.Tensor, actual: torch.Tensor, kind: str = "value") -> None:
        if actual.device.type != self.device.type:
            return self.fail("device", f"a result is on {actual.device}")
        if actual.dtype != expected.dtype:
            return self.fail("dtype", f"expected {expected.dtype}, but got {actual.dtype}")
        if actual.layout != expected.layout or actual.is_nested != expected.is_nested:
            return self.fail("layout", f"expected {expected.layout}, but got {actual.layout}")
        if expected.layout == torch.sparse_coo and actual.is_coalesced() != expected.is_coalesced():
            self.fail("layout", f"expected is_coalesced() to be {expected.is_coalesced()}")
        if not expected.is_nested and actual.shape != expected.shape:
            return self.fail("shape", f"expected {list(expected.shape)}, but got {list(actual.shape)}")
        for bit in ("is_conj", "is_neg"):
            if getattr(actual, bit)() != getattr(expected, bit)():
                self.fail("layout", f"expected {bit}() to be {getattr(expected, bit)()}")
        if actual.requires_grad != expected.requires_grad:
            self.fail("layout", f"expected requires_grad={expected.requires_grad}")
        if expected.layout == torch.strided and not expected.is_nested:
            # Strides of dimensions of size 0 and 1 are meaningless.
            if expected.numel() and any(
                size > 1 and e != a
                for size, e, a in zip(expected.shape, expected.stride(), actual.stride(), strict=True)
            ):
                self.tally.notes["strides"] += 1
        if self.values and _is_beyond_storage(expected):
            self.tally.notes["beyond its storage"] += 1
        elif self.values:
            try:
                actual = actual.detach()
                # PyTorch's .cpu() leaves a quantized tensor with gaps between its elements on its device.
                actual = (actual.contiguous() if actual.is_quantized else actual).cpu()
            except RuntimeError as error:
                if not _is_readable(expected):
                    self.tally.notes["cannot be compared"] += 1
                    return
                return self.fail("error", f"reading a result: {first_line(error)}")
            self.close(expected.detach(), actual, kind)

    def close(self, expected: torch.Tensor, actual: torch.Tensor, kind: str) -> None:
        if not is_simple(expected):
            try:
                wanted, found = parts(expected), parts(actual)
            except (RuntimeError, IndexError):  # a tensor that its maker has not checked
                if _is_readable(expected):
                    raise
                self.tally.notes["cannot be compared"] += 1
                return
            shapes, theirs = ([list(x.shape) for x in side] for side in (found, wanted))
            if shapes != theirs:
                return self.fail(kind, f"expected parts of shapes {theirs}, but got {shapes}")
            for e, a in zip(wanted, found, strict=True):
                self.close(e, a, kind)
        elif wrong := apart(actual, expected, exact=True):
            if self.exact:
                self.fail("rng", f"from the same seed: a result {wrong}")
            elif wrong := apart(actual, expected, **self.near):
                self.unequal.append((expected, actual))
                self.fail(kind, f"{'a gradient' if kind == 'gradient' else 'a result'} {wrong}")
            else:
                self.tally.notes["rounding"] += 1

    def aliases(self, expected: torch.Tensor, actual: torch.Tensor, cpu: Move, device: Move) -> None:
        e, a = _shares(expected, cpu), _shares(actual, device)
        if e != a:
            self.fail("alias", f"expected a result that shares memory with {_arguments(e)}, not with {_arguments(a)}")

    def gradients(self, cpu: Outcome, device: Outcome) -> None:
        if not self.returned(cpu, device, "gradient", "backward: "):
            return
        for i, (e, a) in enumerate(zip(cpu.value, device.value, strict=True)):
            if (e is None) != (a is None):
                self.fail("gradient", f"input {i}: expected {'no' if e is None else 'a'} gradient")
            elif e is not None:
                self.tensors(e, a, "gradient")


def _is_beyond_storage(x: torch.Tensor) -> bool:
    """Returns true if the geometry covers more than the storage: operators such as _reshape_alias do not check."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized or not x.numel() or x.device.type == "meta":
        return False
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() > x.untyped_storage().nbytes()


def _is_readable(x: torch.Tensor) -> bool:
    """Returns true if nothing is wrong with the indices or offsets of a tensor."""
    try:
        repr(parts(x.clone()))
        repr(x)
    except (RuntimeError, IndexError):
        return False
    return True


def _storage(tensor: torch.Tensor) -> int | None:
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage()._cdata


def _shares(result: torch.Tensor, mover: Move) -> tuple[int, ...]:
    """The arguments, in order, that a result shares its storage with."""
    mine = _storage(result)
    if mine is None:
        return ()
    return tuple(i for i, argument in enumerate(mover.tensors.values()) if _storage(argument) == mine)


def _arguments(which: tuple[int, ...]) -> str:
    return f"tensor arguments {list(which)}" if which else "no argument"
