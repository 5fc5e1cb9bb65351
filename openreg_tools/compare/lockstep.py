"""Runs each operator of a program on a reference device too, with the same inputs, and compares what it returned and wrote.

The reference starts each operator from the device's own inputs, so each error belongs to one operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools import backends
from openreg_tools.compare.differences import Difference, Differences
from openreg_tools.compare.facts import Facts, facts, is_tie
from openreg_tools.compare.reference import Arguments, drawing, shares_numbers, state_of
from openreg_tools.compare.tolerance import SUM, Tolerance, Tolerances
from openreg_tools.core.blocks import first_line
from openreg_tools.core.compare import Error, dense, equal, largest, measure
from openreg_tools.core.device import synchronize
from openreg_tools.core.move import tensors_of
from openreg_tools.core.place import Place, Places, site, stack
from openreg_tools.core.report import Progress
from openreg_tools.core.samples import shown
from openreg_tools.threads import InThreads, Turn

__all__ = ["Lockstep"]

# Fused attention that only some devices have. Its formula gives the first result.
ATTENTION = ("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")  # fmt: skip

_DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
_ABSENT = object()  # in place of a result that the reference does not have


class Quiet:
    """In the body, modes, autograd and injected faults do not see the tool's own work."""

    def __init__(self, device: str) -> None:
        self._own = backends.of_device(device).own_work

    def __enter__(self) -> None:
        self._work = self._own()
        self._work.__enter__()
        self._guards = (
            torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
        )  # fmt: skip
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
        self._work.__exit__(None, None, None)


@dataclasses.dataclass
class ComparedCall:
    """One call of an operator, on both devices."""

    func: OpOverload
    of: Facts
    index: int  # among the program's calls
    place: Place
    args: tuple[Any, ...]  # on the device
    kwargs: dict[str, Any]
    arguments: Arguments | None = None  # on the reference; None if they cannot be copied
    state: Tensor | None = None  # of the generator that it draws from, if the reference can draw the same numbers

    def inputs(self) -> list[str]:
        """The arguments before the call, for the report."""
        args, kwargs = (self.args, self.kwargs) if self.arguments is None else self.arguments.before()
        words = [shown(v if isinstance(v, torch.device) else b) for v, b in zip(self.args, args, strict=True)]
        named = {name: v if isinstance(v, torch.device) else kwargs[name] for name, v in self.kwargs.items()}
        return [*words, *(f"{name}={shown(value)}" for name, value in named.items())]


class Lockstep(TorchDispatchMode):
    """Compares operators on `device` with `reference`, in a program that runs inside it."""

    supports_higher_order_operators = True

    def __init__(
        self, device: str, reference: str, tolerances: Tolerances, result: Differences, progress: bool
    ) -> None:
        super().__init__()
        self.type, self.reference = torch.device(device).type, torch.device(reference)
        self.tolerances, self.result = tolerances, result
        self.progress = Progress(quiet=not progress, every=5)
        self.places, self.turn = Places(), Turn()
        self.active = False  # a thread that the program started may outlive the context
        self.draws = shares_numbers(self.type, self.reference.type)
        self._threads = InThreads(self)
        self._queues = self.type not in ("cpu", "meta")  # and says when its work is done

    def quiet(self) -> Quiet:
        """A context for what `compare` does itself: modes, autograd and injected faults do not see it."""
        return Quiet(self.type)

    def own_work(self) -> contextlib.AbstractContextManager[None]:
        """A context for what `compare` runs itself: injected faults do not see it."""
        return backends.of_device(self.type).own_work()

    # ---- one call ----

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):  # of a subclass
            return func(*args, **kwargs) if _is_traced(types) else NotImplemented  # its operators arrive separately
        if not self._touches(args, kwargs):
            return func(*args, **kwargs)
        of, place = facts(func), self.places.now()  # of a view too, for its backward
        if of.view:
            return func(*args, **kwargs)
        if place.site is None:  # of a function with a backward in Python
            place = dataclasses.replace(place, site=site())
        with self.turn:
            differ = len(self.result.differences)
            self.progress.show(f"compare: {self.result.operators:,} operators, {differ} differ")
            return self._both(ComparedCall(func, of, self.result.count(), place, args, kwargs))

    def _touches(self, args: tuple, kwargs: dict) -> bool:
        """Returns true if a call has a tensor on the device, or makes one."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self.type:
            return True
        return any(t.device.type == self.type for t in (*tensors_of(args), *tensors_of(kwargs)))

    def _both(self, call: ComparedCall) -> Any:
        """Make the call on the device, and then on the reference."""
        if call.of.undefined:
            return self._run(call)
        with self.quiet():
            self.synchronize()  # an error of what was launched before does not belong to this operator
            try:
                call.arguments = Arguments(call.of, call.args, call.kwargs, self.reference, self.type)
            except _DEVICE_ERRORS:
                raise
            except (NotImplementedError, RuntimeError) as error:
                self._skip(call.of, f"its arguments cannot be copied: {first_line(error)}")
            if call.of.random and self.draws:
                call.state = state_of(call.args, call.kwargs, self.type)
        out = self._run(call)
        if call.arguments is not None:
            _wait_for_tensors(call.of, out)
            with self.quiet():
                self._compare(call, out, self._expected(call))
        return out

    def _run(self, call: ComparedCall) -> Any:
        """Make the call and wait for the device; otherwise a later failure would be blamed on another operator."""
        try:
            out = call.func(*call.args, **call.kwargs)
            if call.of.collective:
                _wait(out)
            with self.own_work():
                self.synchronize()
        except Exception as error:
            with self.quiet():
                if not getattr(error, "_compared", False) and not self._raises_too(call, error):
                    error._compared = True
                    self.result.row(call.of.name).calls += 1
                    self._differs(call, "the call", f"raised {first_line(error)}")
            raise
        return out

    def synchronize(self) -> None:
        """Wait for the device, and raise the errors of its queued work."""
        if self._queues and not synchronize(self.type):
            self._queues = False
            self.result.note(
                f"{self.type} has no synchronize(): an error in its queued work may be blamed on a later operator."
            )

    # ---- the reference ----

    def _raises_too(self, call: ComparedCall, error: Exception) -> bool:
        """Returns true if the reference raises as well, because the call itself is wrong."""
        if (
            call.arguments is None or isinstance(error, _DEVICE_ERRORS) or "c10d" in call.of.name
        ):  # ranks do not join in
            return False
        try:
            self._on_reference(call)
        except Exception:
            return True
        return False

    def _on_reference(self, call: ComparedCall) -> Any:
        with drawing(self.reference, call.state) if call.of.random else contextlib.nullcontext():
            return call.func(*call.arguments.args, **call.arguments.kwargs)

    def _expected(self, call: ComparedCall) -> Any:
        """The reference's results, or `_ABSENT`."""
        try:
            expected = self._on_reference(call)
            if call.of.collective:
                _wait(expected)
            _wait_for_tensors(call.of, expected)
            return expected
        except Exception as error:
            if call.func._schema.name.partition("::")[2] in ATTENTION:
                with contextlib.suppress(Exception):
                    return _attention(call)
            self._skip(call.of, f"{self.reference} raised {first_line(error)}")
            return _ABSENT

    # ---- comparing ----

    def _compare(self, call: ComparedCall, out: Any, expected: Any) -> None:
        row = self.result.row(call.of.name)
        row.calls += 1
        if expected is _ABSENT:
            return
        row.compared += 1
        drawn = call.of.random and call.state is None
        if drawn:
            self.result.note(
                f"{call.of.name}: {self.reference} draws different random numbers; only shape, dtype and mean are compared"
            )
        for what, got, want in _pairs(call, out, expected):
            if found := self._unlike(call, what, got, want):
                self._differs(call, what, found)
            elif isinstance(got, Tensor) and isinstance(want, Tensor):
                self._tensors(call, what, got, want, drawn)
            elif isinstance(got, (bool, int, float, complex)) and got != want and not (got != got and want != want):
                self._judge(call, what, *self._of_number(call, what, got, want))

    def _unlike(self, call: ComparedCall, what: str, got: Any, want: Any) -> str:
        """How a result differs in its form: it is missing, or has another shape or dtype; "" if it does not."""
        if isinstance(got, (list, tuple)):
            return f"has {len(got)} tensors, and {len(want)} on {self.reference}"
        if got is None and isinstance(want, Tensor) and want.numel():
            return f"has no tensor, and {shown(want)} on {self.reference}"
        if isinstance(got, Tensor) and isinstance(want, Tensor):
            if (got.dtype, *got.shape) != (want.dtype, *want.shape):
                return f"is {shown(got)}, and {shown(want)} on {self.reference}"
        return ""

    def _tensors(self, call: ComparedCall, what: str, tensor: Tensor, want: Tensor, drawn: bool) -> None:
        try:
            got, want = dense(tensor.detach().to(self.reference)), dense(want)
        except _DEVICE_ERRORS:
            raise
        except (NotImplementedError, RuntimeError) as error:  # a subclass without memory of its own
            self._skip(call.of, f"its results cannot be copied: {first_line(error)}")
            return
        if drawn:
            self._means(call, what, got, want)
        elif got.numel() and not equal(got, want) and not is_tie(call.of, *call.arguments.before(), got, want):
            error, tolerance = self._measure(call, what, got, want)
            if error is not None:
                self._judge(call, what, error, tolerance, shown(got))

    def _judge(self, call: ComparedCall, what: str, error: Error, tolerance: Tolerance, result: str = "") -> None:
        self.result.row(call.of.name).add(error, tolerance)
        if error.ulps > tolerance.ulps:
            self._differs(call, what, "", error, tolerance, result)

    def _measure(self, call: ComparedCall, what: str, got: Tensor, want: Tensor) -> tuple[Error | None, Tolerance]:
        args, kwargs = call.arguments.before()
        tensors = [*tensors_of(args), *tensors_of(kwargs)]
        tolerance = self.tolerances(call.func, tensors, want)
        scale: Any = None
        if tolerance.kind == "sum":
            scale = self._magnitudes(call, args, kwargs, what, want)
        if tolerance.kind == "chain" or tolerance.kind == "sum" and scale is None:
            scale = largest([*tensors, want])
        return measure(got, want, tolerance.ulps, scale), tolerance

    def _of_number(self, call: ComparedCall, what: str, got: Any, want: Any) -> tuple[Error, Tolerance]:
        """The error of a Python number, in ulps of the narrowest dtype among the tensors that it comes from."""
        kinds = [t.dtype for t in (*tensors_of(call.arguments.args), *tensors_of(call.arguments.kwargs))]
        eps = [torch.finfo(dtype).eps for dtype in kinds if dtype.is_floating_point or dtype.is_complex]
        if isinstance(got, (float, complex)) and isinstance(want, (float, complex)):
            wide = torch.complex128 if complex in (type(got), type(want)) else torch.float64
            error, tolerance = self._measure(call, what, *(torch.tensor(number, dtype=wide) for number in (got, want)))
            if error is not None:
                ulps = error.ulps * 2**-52 / max(eps, default=2**-52)
                return dataclasses.replace(error, ulps=ulps, count=int(ulps > tolerance.ulps)), tolerance
        return Error(math.inf, (), got, want, math.inf, 1), Tolerance("exact", 0.0)

    def _magnitudes(self, call: ComparedCall, args: list, kwargs: dict, what: str, want: Tensor) -> Tensor | None:
        """The sums of the terms' absolute values; None if the operator does not give them."""

        def positive(value: Any) -> Any:
            if isinstance(value, Tensor):
                floats = value.is_floating_point() or value.is_complex()
                return torch.where(value.isfinite(), value.abs(), 0).to(value.dtype) if floats else value.clone()
            if isinstance(value, (list, tuple)):
                return [positive(item) for item in value]
            return abs(value) if isinstance(value, float) else value

        if call.of.collective or call.of.base not in SUM:
            return None
        with contextlib.suppress(Exception):
            given, named = [positive(v) for v in args], {k: positive(v) for k, v in kwargs.items()}
            again = Arguments(call.of, tuple(given), named, self.reference, self.reference.type)
            out = call.func(*again.args, **again.kwargs)
            found = _pairs(dataclasses.replace(call, arguments=again), out, out)
            scale = next((want for name, _, want in found if name == what), None)
            if isinstance(scale, Tensor) and scale.shape == want.shape:
                return scale
        return None

    def _means(self, call: ComparedCall, what: str, got: Tensor, want: Tensor) -> None:
        """Compare the means of random numbers that the reference cannot draw: within 8 deviations."""
        if got.numel() < 256 or got.is_complex():
            return
        a, b = got.to(torch.float64), want.to(torch.float64)
        deviation = math.sqrt((float(a.var()) + float(b.var())) / a.numel())
        if not abs(float(a.mean() - b.mean())) <= 8 * deviation + 1e-12:
            found = f"has mean {float(a.mean()):.4g}, and {float(b.mean()):.4g} on {self.reference}"
            self._differs(call, what, found)

    # ---- what is found ----

    def _differs(
        self, call: ComparedCall, what: str, found: str, error: Error | None = None, tolerance: Tolerance | None = None,
        result: str = "",
    ) -> None:  # fmt: skip
        self.result.add(
            Difference(
                call.index, call.of.name, what, call.place, call.inputs(), error, tolerance, found, self.type,
                str(self.reference), result, [] if self.result.differences else stack(),
            )
        )  # fmt: skip

    def _skip(self, of: Facts, why: str) -> None:
        self.result.skipped.setdefault(of.name, why)

    # ---- the context ----

    def __enter__(self) -> Lockstep:
        self.places.__enter__()
        self.active = True
        super().__enter__()
        self._threads.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._threads.__exit__()
        super().__exit__(*exception)
        self.active = False
        self.places.__exit__()
        self.progress.end()


def _is_traced(types: Any) -> bool:
    """Returns true if some of the tensors stand for others while a program is traced."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return any(issubclass(kind, (FakeTensor, FunctionalTensor)) for kind in types)


def _pairs(call: ComparedCall, out: Any, expected: Any) -> list[tuple[str, Any, Any]]:
    """What the call wrote and returned on the device, each with the reference's; lists only where their lengths differ."""
    pairs: list[tuple[str, Any, Any]] = [*call.arguments.written]
    if call.of.collective:
        return pairs
    several = isinstance(out, (tuple, list)) and len(call.func._schema.returns) != 1
    for i, (got, want) in enumerate(zip(out, expected, strict=False) if several else [(out, expected)]):
        if i < len(call.of.aliased) and call.of.aliased[i] or i == call.of.scratch:
            continue
        what = f"result {i}" if several else "result"
        if isinstance(got, (list, tuple)):
            if len(got) != len(want):
                pairs.append((what, got, want))
            pairs += [(f"{what}[{j}]", *both) for j, both in enumerate(zip(got, want, strict=False))]
        else:
            pairs.append((what, got, want))
    return pairs


def _attention(call: ComparedCall) -> tuple[Tensor, ...]:
    """The first result of fused attention, by its formula."""
    given = dict(zip(call.of.names, call.arguments.args, strict=False)) | call.arguments.kwargs
    if given.get("dropout_p"):
        raise NotImplementedError
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(
        given["query"], given["key"], given["value"], given.get("attn_bias"), 0.0, given.get("is_causal", False),
        scale=given.get("scale"),
    )  # fmt: skip
    return (out,)


def _wait(out: Any) -> None:
    """Wait for a collective, whose result is the Work, possibly with tensors."""
    for result in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(result, torch.ScriptObject) and hasattr(result, "wait"):
            result.wait()


def _wait_for_tensors(of: Facts, out: Any) -> None:
    """Wait for a functional collective, whose results are tensors."""
    if of.name.startswith("_c10d_functional::") and "wait" not in of.name:
        for tensor in tensors_of((out,)):
            torch.ops._c10d_functional.wait_tensor(tensor)
