"""Runs each operator of a program on a reference device too, with the same inputs, and compares what it wrote.

The reference starts each operator from the device's own inputs, so each error belongs to one operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools import backends, dispatch, forms
from openreg_tools.compare.copies import (
    Arguments,
    Copies,
    Facts,
    Quiet,
    copied,
    dense,
    equal,
    facts,
    same_bits,
    tensors_of,
    tied,
)
from openreg_tools.compare.draws import Draws
from openreg_tools.compare.result import Difference, Result
from openreg_tools.compare.tolerance import SUM, Error, Tolerance, Tolerances, largest, measure
from openreg_tools.core.place import Place, Places, site, stack
from openreg_tools.samples import shown
from openreg_tools.threads import InThreads, Turn

__all__ = ["Lockstep"]

# Fused attention that only some devices have, and the formula for its first result.
ATTENTION = ("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")  # fmt: skip

DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


class Lockstep(TorchDispatchMode):
    """Compares operators on `device` with `reference`, in a program that runs inside it."""

    supports_higher_order_operators = True

    def __init__(self, device: str, reference: str, tolerances: Tolerances, result: Result, progress: bool) -> None:
        super().__init__()
        self.type, self.reference = torch.device(device).type, torch.device(reference)
        self.tolerances, self.result, self.progress = tolerances, result, progress
        self.copies = Copies(self.type, self.reference)
        self.places = Places()
        self.active = False  # a thread that the program started may outlive the context
        self._threads = InThreads(self)
        self.lock = threading.RLock()
        self.turn = Turn()
        current = torch.accelerator.current_accelerator()
        of_torch = current is not None and current.type == self.type
        self._module = torch.accelerator if of_torch else getattr(torch, self.type, None)
        self._draws = _shares_numbers(self.type, self.reference)
        self._generators = Draws(self.type)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled graphs are compared at their boundaries: see regions.py

    def quiet(self) -> Quiet:
        return Quiet(self.type)

    # ---- one call ----

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if subclasses(types):  # their component operators arrive here separately
            return func(*args, **kwargs) if tracing(types) else NotImplemented
        of = facts(func)
        if not self._touches(args, kwargs):
            return self._drew(of, args, kwargs, func(*args, **kwargs))
        place = self.places.now()  # of a view too, for its backward
        if of.view:
            return func(*args, **kwargs)
        if place.site is None:  # of a function with a backward in Python
            place = dataclasses.replace(place, site=site())
        index = self.result.count()
        if self.progress:
            self._say()
        with self.turn:
            return self._drew(of, args, kwargs, self._both(func, of, index, place, args, kwargs))

    def _drew(self, of: Facts, args: tuple, kwargs: dict, out: Any) -> Any:
        """Take note of the generator that a call drew from; returns `out`."""
        if of.random and self.reference.type == "cpu":
            with self.lock, self.quiet():
                if self._generators.drew(of, args, kwargs, out):
                    self.result.note(
                        f"The program draws random numbers from two generators: {self._generators.sentence()}. On the CPU, "
                        "both come from one generator, so a run there gives other numbers after the same seed. That is "
                        f"no fault of {self.type}."
                    )
        return out

    def _both(self, func: OpOverload, of: Facts, index: int, place: Place, args: tuple, kwargs: dict) -> Any:
        """The call on the device, and then on the reference."""
        if of.skipped:
            return self._run(func, of, index, place, args, kwargs, None)
        # Random numbers: no other thread draws between the state and the call.
        with self.lock if of.random and self._draws else contextlib.nullcontext():
            with self.lock, self.quiet():
                if not self.copies.keeping:
                    self._synchronize()  # an error in a compiled kernel does not belong to this operator
                arguments = self._take(of, index, place, args, kwargs)
                state = self._numbers(args, kwargs) if of.random else None
            out = self._run(func, of, index, place, args, kwargs, arguments, state)
        if arguments is None:
            return out
        if threading.active_count() > 1:  # another thread may write beside the view
            arguments.parts = []
        _wait_for_tensors(of, out)
        with self.quiet():  # without the lock: the kernel may wait for another thread
            expected, there = self._expected(func, of, arguments, state, index)
        with self.lock, self.quiet():
            self._compare(func, of, index, place, args, kwargs, arguments, state, out, expected, there)
        return out

    def _touches(self, args: tuple, kwargs: dict) -> bool:
        kind = self.type
        for value in args:
            if isinstance(value, Tensor):
                if value.device.type == kind:
                    return True
            elif isinstance(value, (list, tuple)):
                for each in value:
                    if isinstance(each, Tensor) and each.device.type == kind:
                        return True
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == kind:
            return True
        return bool(kwargs) and any(t.device.type == kind for t in tensors_of(kwargs))

    def _take(self, of: Facts, index: int, place: Place, args: tuple, kwargs: dict) -> Arguments | None:
        try:
            return self.copies.take(of, args, kwargs)
        except DEVICE_ERRORS:
            raise
        except (NotImplementedError, RuntimeError) as error:
            self._skip(of, f"its arguments cannot be copied: {_line(error)}")
            return None

    def _run(
        self, func: OpOverload, of: Facts, index: int, place: Place, args: tuple, kwargs: dict,
        arguments: Arguments | None, state: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Make the call and wait for the device; otherwise a later failure would be blamed on another operator."""
        try:
            out = func(*args, **kwargs)
            if of.collective:
                wait(out)
            with self.own_work():
                self._synchronize()
        except Exception as error:
            with self.quiet():
                both = getattr(error, "_compared", False) or self._raises_too(func, of, arguments, state, error)
            with self.lock, self.quiet():
                if not both:
                    error._compared = True
                    self._failed(func, of, index, place, args, kwargs, arguments, error)
            raise
        if of.skipped and any(of.written):
            for tensor in tensors_of(args[:1]):
                self.copies.forget(tensor.untyped_storage())
        return out

    def _synchronize(self) -> None:
        if self.type in ("cpu", "meta") or self._module is None:
            return
        try:
            self._module.synchronize()
        except dispatch.LACKS as error:
            if not dispatch.is_lacking(error):
                raise
            self._module = None
            self.result.note(
                f"{self.type} has no synchronize(): an error in its queued work may be blamed on a later operator."
            )

    def _raises_too(
        self, func: OpOverload, of: Facts, arguments: Arguments | None, state: Tensor | None, error: Exception
    ) -> bool:
        """Whether the reference raises as well, because the call itself is wrong."""
        if arguments is None or isinstance(error, DEVICE_ERRORS) or "c10d" in of.name:  # the other ranks do not join in
            return False
        try:
            self._on_reference(func, of, arguments, state)
        except Exception:
            return True
        return False

    # ---- the reference ----

    def _on_reference(self, func: OpOverload, of: Facts, arguments: Arguments, state: Tensor | None) -> Any:
        if state is None:
            return func(*arguments.args, **arguments.kwargs)
        args, kwargs = list(arguments.args), dict(arguments.kwargs)
        generator = torch.Generator(self.reference)
        for where, key in [*((args, i) for i in range(len(args))), *((kwargs, name) for name in kwargs)]:
            if isinstance(where[key], torch.Generator):
                generator.set_state(state)
                where[key] = generator
                return func(*args, **kwargs)
        with self.lock, self.drawing(state):
            return func(*args, **kwargs)

    def state_of(self, device: torch.device) -> Tensor | None:
        """The state of a device's generator, where the reference can draw the same numbers."""
        return _generator(device).get_state() if self._draws else None

    @contextlib.contextmanager
    def drawing(self, state: Tensor | None) -> Iterator[None]:
        """The reference's generator draws from this state, and gets its own back afterwards."""
        default = _generator(self.reference)
        before = default.get_state()
        if state is not None:
            default.set_state(state)
        try:
            yield
        finally:
            default.set_state(before)

    def own_work(self) -> contextlib.AbstractContextManager[None]:
        return backends.of_device(self.type).own_work()

    def _numbers(self, args: tuple, kwargs: dict) -> Tensor | None:
        """The state of the generator that the call draws from, for the reference; None if the reference cannot use
        it."""
        if not self._draws:
            return None
        given = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        if given is None:
            device = kwargs.get("device") or next((t.device for t in tensors_of((*args, *kwargs.values()))), self.type)
            given = _generator(torch.device(device))
        return given.get_state()

    def _expected(
        self, func: OpOverload, of: Facts, arguments: Arguments, state: Tensor | None, index: int
    ) -> tuple[Any, bool]:
        """The reference's result, and whether there is one."""
        try:
            expected = self._on_reference(func, of, arguments, state)
            if of.collective:
                wait(expected)
            _wait_for_tensors(of, expected)
            return expected, True
        except Exception as error:
            plain = func._schema.name.partition("::")[2]
            if plain in ATTENTION:
                with contextlib.suppress(Exception):
                    return self._attention(func, arguments), True
            self._skip(of, f"{self.reference} raised {type(error).__name__}: {_line(error)}")
            return None, False

    def _attention(self, func: OpOverload, arguments: Arguments) -> tuple[Tensor, ...]:
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, arguments.args, strict=False)) | arguments.kwargs
        if given.get("dropout_p"):
            raise NotImplementedError
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            given["query"], given["key"], given["value"], given.get("attn_bias"), 0.0, given.get("is_causal", False),
            scale=given.get("scale"),
        )  # fmt: skip
        return (out,)

    # ---- comparing ----

    def _compare(
        self, func: OpOverload, of: Facts, index: int, place: Place, args: tuple, kwargs: dict,
        arguments: Arguments, state: Tensor | None, out: Any, expected: Any, there: bool,
    ) -> None:  # fmt: skip
        row = self.result.row(of.name)
        row.calls += 1
        commits = []
        if there:
            row.compared += 1
            if of.random and state is None:
                self._statistics(func, of, index, place, args, kwargs, arguments, expected, out)
            else:
                pairs = self._pairs(func, of, arguments, expected, out)
                for what, count, wanted in self._counts(of, expected, out):
                    found = f"has {count}, and {wanted} on {self.reference}"
                    self._differs(func, of, index, place, args, kwargs, arguments, what, None, None, None, None, found)
                for what, tensor, want in pairs:
                    commits.append(
                        self._one(func, of, index, place, args, kwargs, arguments, state, what, tensor, want)
                    )
            if name := self.copies.strayed(arguments):
                found = f"is a view, and memory beside it changed, which it did not on {self.reference}"
                self._differs(
                    func, of, index, place, args, kwargs, arguments, name, None, None, None, None, found, beside=True
                )
        for _, tensor, _ in arguments.written:
            if not there or (of.random and state is None):
                self.copies.forget(tensor.untyped_storage())
        for commit in commits:
            commit()

    def _pairs(
        self, func: OpOverload, of: Facts, arguments: Arguments, expected: Any, out: Any
    ) -> list[tuple[str, Any, Any]]:
        """Each result on the device, with the reference's."""
        pairs = [(name, tensor, copy) for name, tensor, copy in arguments.written]
        if of.collective:
            return pairs
        several = isinstance(out, (tuple, list)) and len(func._schema.returns) != 1
        for i, (got, want) in enumerate(zip(out, expected, strict=False) if several else [(out, expected)]):
            if i < len(of.aliased) and of.aliased[i] or i == of.scratch:
                continue
            if isinstance(got, (list, tuple)):
                pairs += [(f"result[{j}]", g, w) for j, (g, w) in enumerate(zip(got, want, strict=False))]
            elif got is not None:
                pairs.append((f"result {i}" if several else "result", got, want))
        return pairs

    def _counts(self, of: Facts, expected: Any, out: Any) -> list[tuple[str, str, str]]:
        """Lists among the results that have another length than the reference's, and results that are missing."""
        lists = [("result", out, expected)]
        if isinstance(out, tuple) and isinstance(expected, tuple):
            # The formula of attention has the first result only.
            lists = [(f"result {i}", *both) for i, both in enumerate(zip(out, expected, strict=False))]
        found = []
        for what, got, want in lists:
            if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)) and len(got) != len(want):
                found.append((what, f"{len(got)} tensors", f"{len(want)}"))
            elif got is None and isinstance(want, Tensor) and want.numel() and not of.collective:
                found.append((what, "no tensor", shown(want)))
        return found

    def _one(
        self, func: OpOverload, of: Facts, index: int, place: Place, args: tuple, kwargs: dict, arguments: Arguments,
        state: Tensor | None, what: str, tensor: Any, want: Any,
    ) -> Any:  # fmt: skip
        """Compare one result; returns a function that caches its copy."""
        nothing = lambda: None  # noqa: E731
        call = (func, of, index, place, args, kwargs, arguments)
        if isinstance(tensor, (bool, int, float, complex)):
            if tensor != want and not (tensor != tensor and want != want):
                error, tolerance = self._of_number(func, of, arguments, state, what, tensor, want)
                self._judge(call, what, error, tolerance, None, None)
            return nothing
        if not isinstance(tensor, Tensor):
            return nothing
        if not isinstance(want, Tensor):
            return nothing
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            found = f"is {shown(tensor)}, and {shown(want)} on {self.reference}"
            self._differs(*call, what, None, None, None, None, found)
            return nothing
        try:
            got, keep = self.copies.read(tensor, index)
        except DEVICE_ERRORS:
            raise
        except (NotImplementedError, RuntimeError) as error:  # a subclass without memory of its own
            self._skip(of, f"its results cannot be copied: {_line(error)}")
            return nothing
        if tensor.layout != torch.strided or want.layout != torch.strided or tensor.is_quantized:
            got, want = dense(got), dense(want)
        if not got.numel() or equal(got, want) or tied(func, arguments, got, want):
            return keep
        error, tolerance = self._measure(func, of, arguments, state, what, got, want)
        if error is not None and error.ulps > tolerance.ulps:
            again, keep = self.copies.read(tensor, index)
            if not same_bits(dense(again), got):
                self.result.note(f"{of.name}: reading {what} twice gave different bytes; the second counts")
                got = dense(again)
            if changed := self.copies.refresh(arguments):
                writer = f"call {max(changed)} wrote it" if max(changed) >= 0 else "`compare` first copied it"
                self.result.note(
                    f"{of.name} at {place.line()}: the memory of an input had changed outside operators since "
                    f"{writer}: by host code, by a kernel that was launched directly, or by an operator whose "
                    "schema does not say that it writes there"
                )
                if not arguments.written:
                    expected, there = self._expected(func, of, arguments, state, index)
                    if there:
                        want = dict((w, x) for w, _, x in self._pairs(func, of, arguments, expected, expected))[what]
            error, tolerance = self._measure(func, of, arguments, state, what, got, dense(want))
        if error is not None:
            self._judge(call, what, error, tolerance, got, want)
        return keep

    def _judge(
        self, call: tuple, what: str, error: Error, tolerance: Tolerance, got: Tensor | None, want: Tensor | None
    ) -> None:
        _, of, index, *_ = call
        self.result.row(of.name).add(error, tolerance)
        self.result.point(index, error.ulps, tolerance.ulps, of.name)
        if error.ulps > tolerance.ulps:
            self._differs(*call, what, error, tolerance, got, want)

    def _measure(
        self,
        func: OpOverload,
        of: Facts,
        arguments: Arguments,
        state: Tensor | None,
        what: str,
        got: Tensor,
        want: Tensor,
    ) -> tuple[Error | None, Tolerance]:
        before, words = arguments.before()
        tolerance = self.tolerances(func, (*before, *words.values()), want)
        scale: Any = None
        if tolerance.kind == "chain":
            scale = largest([*tensors_of((*before, *words.values())), want])
        elif tolerance.kind == "sum":
            scale = self._magnitudes(func, of, before, words, what, want)
        return measure(got, want, tolerance.kind, scale, tolerance.ulps), tolerance

    def _of_number(
        self, func: OpOverload, of: Facts, arguments: Arguments, state: Tensor | None, what: str, got: Any, want: Any
    ) -> tuple[Error, Tolerance]:
        """The error of a Python number, in ulps of the narrowest dtype among the tensors that it comes from."""
        kinds = [t.dtype for t in tensors_of((*arguments.args, *arguments.kwargs.values()))]
        eps = max(
            [torch.finfo(each).eps for each in kinds if each.is_floating_point or each.is_complex], default=2**-52
        )
        if isinstance(got, (float, complex)) and isinstance(want, (float, complex)):
            wide = torch.complex128 if complex in (type(got), type(want)) else torch.float64
            both = (torch.tensor(each, dtype=wide) for each in (got, want))
            error, tolerance = self._measure(func, of, arguments, state, what, *both)
            if error is not None:
                ulps = error.ulps * 2**-52 / eps
                return dataclasses.replace(error, ulps=ulps, count=int(ulps > tolerance.ulps)), tolerance
        return Error(math.inf, (), got, want, math.inf, 1), Tolerance("exact", 0.0)

    def _magnitudes(self, func: OpOverload, of: Facts, args: list, kwargs: dict, what: str, want: Tensor) -> Any:
        """The sums of the terms' absolute values, or the largest value if the operator does not give them."""

        def positive(value: Any) -> Any:
            if isinstance(value, Tensor):
                floats = value.is_floating_point() or value.is_complex()
                return torch.where(value.isfinite(), value.abs(), 0).to(value.dtype) if floats else value.clone()
            if isinstance(value, (list, tuple)):
                return [positive(each) for each in value]
            return abs(value) if isinstance(value, float) else value

        fallback = largest([*tensors_of((*args, *kwargs.values())), want])
        if of.collective or of.base not in SUM:
            return fallback
        with contextlib.suppress(Exception):
            again = Arguments(
                [positive(v) for v in args], {k: positive(v) for k, v in kwargs.items()}, [], lambda: ([], {}), []
            )
            names = of.names
            again.written = [
                (name, value, value)
                for name, value in [*zip(names, again.args, strict=False), *again.kwargs.items()]
                if isinstance(value, Tensor) and of.writes(name)
            ]
            out = func(*again.args, **again.kwargs)
            scale = dict((w, x) for w, _, x in self._pairs(func, of, again, out, out)).get(what)
            if isinstance(scale, Tensor) and scale.shape == want.shape:
                return scale
        return fallback

    def _statistics(
        self, func: OpOverload, of: Facts, index: int, place: Place, args: tuple, kwargs: dict, arguments: Arguments,
        expected: Any, out: Any,
    ) -> None:  # fmt: skip
        """For random numbers that the reference cannot draw: compare shapes, dtypes, and the mean within 8
        deviations."""
        self.result.note(
            f"{of.name}: {self.reference} draws different random numbers; only shape, dtype and mean are compared"
        )
        for what, tensor, want in self._pairs(func, of, arguments, expected, out):
            if not (isinstance(tensor, Tensor) and isinstance(want, Tensor)):
                continue
            call = (func, of, index, place, args, kwargs, arguments, what)
            if tensor.shape != want.shape or tensor.dtype != want.dtype:
                self._differs(
                    *call, None, None, None, None, f"is {shown(tensor)}, and {shown(want)} on {self.reference}"
                )
                continue
            got, keep = self.copies.read(tensor, index)
            keep()
            if got.numel() < 256 or got.is_complex():
                continue
            a, b = got.to(torch.float64), want.to(torch.float64)
            deviation = math.sqrt((float(a.var()) + float(b.var())) / a.numel())
            if not abs(float(a.mean() - b.mean())) <= 8 * deviation + 1e-12:
                found = f"has mean {float(a.mean()):.4g}, and {float(b.mean()):.4g} on {self.reference}"
                self._differs(*call, None, None, None, None, found)

    # ---- what is found ----

    def _differs(
        self, func: OpOverload, of: Facts, index: int, place: Place, args: tuple, kwargs: dict, arguments: Arguments | None,
        what: str, error: Error | None, tolerance: Tolerance | None, got: Tensor | None, want: Tensor | None,
        found: str = "", beside: bool = False,
    ) -> None:  # fmt: skip
        before, words = (args, kwargs) if arguments is None else arguments.before()  # the call may have resized `args`
        given = [v if isinstance(v, torch.device) else b for v, b in zip(args, before, strict=True)]
        named = {name: v if isinstance(v, torch.device) else words[name] for name, v in kwargs.items()}
        inputs = [shown(value) for value in given] + [f"{name}={shown(value)}" for name, value in named.items()]
        difference = Difference(
            index, of.name, what, place, inputs, error, tolerance, found, str(self.type), str(self.reference),
            result=shown(got) if got is not None else "",
        )  # fmt: skip
        self.result.row(of.name).beyond += 1
        if self.result.first is None:
            difference.stack = stack()
            if arguments is not None:
                given, values = copied([given, [*named.values()]], self.reference, beside)
                difference.call = (func, given, dict(zip(named, values, strict=True)))
        self.result.add(difference)

    def _failed(
        self, func: OpOverload, of: Facts, index: int, place: Place, args: tuple, kwargs: dict,
        arguments: Arguments | None, error: Exception,
    ) -> None:  # fmt: skip
        row = self.result.row(of.name)
        row.calls += 1
        found = f"raised {type(error).__name__}: {_line(error)}"
        self._differs(func, of, index, place, args, kwargs, arguments, "the call", None, None, None, None, found)

    def _skip(self, of: Facts, why: str) -> None:
        self.result.skipped.setdefault(of.name, why)

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._said > 5:
            self._said = now
            count, beyond = self.result.operators, len(self.result.differences)
            forms.say(f"compare: {count:,} operators in {now - self._started:.0f} s, {beyond} differ")

    # ---- the context ----

    def __enter__(self) -> Lockstep:
        self._said = self._started = time.monotonic()
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
        self.copies.kept.clear()

    @contextlib.contextmanager
    def inside_region(self) -> Iterator[None]:
        """Active while compiled kernels run, which write memory outside operators."""
        before, self.copies.keeping = self.copies.keeping, False
        try:
            yield
        finally:
            self.copies.keeping = before


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def subclasses(types: Any) -> bool:
    """Whether some types handle operators themselves; a Parameter does not."""
    return any(each.__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in types)


def tracing(types: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return any(issubclass(each, (FakeTensor, FunctionalTensor)) for each in types)


def wait(out: Any) -> None:
    """Wait for a collective, whose result is the Work, possibly with tensors."""
    for each in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(each, torch.ScriptObject) and hasattr(each, "wait"):
            each.wait()


def _wait_for_tensors(of: Facts, out: Any) -> None:
    """Wait for a functional collective, whose results are tensors."""
    if of.name.startswith("_c10d_functional::") and "wait" not in of.name:
        for each in tensors_of((out,)):
            torch.ops._c10d_functional.wait_tensor(each)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]


def _shares_numbers(device: str, reference: torch.device) -> bool:
    """Whether the reference's generator draws the same numbers from the state of the device's generator."""
    cpu_like = lambda kind: kind == "cpu" or backends.of_device(kind).draws_as_cpu  # noqa: E731
    return device == reference.type or (cpu_like(device) and cpu_like(reference.type))
