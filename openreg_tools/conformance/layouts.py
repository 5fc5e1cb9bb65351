"""Checks what operators write to memory that is not contiguous: `out=` and in-place forms on views of guarded memory.

The CPU computes into contiguous memory, because some of its kernels ignore the strides of their results and write
outside them. The device writes to a view with a guard on both sides. The elements must equal the CPU's, and every other
byte must keep its value. `check` does this for `op(..., out=)` of an OpInfo, and for the `out=` and in-place form
of each ATen operator that the forward and the backward pass call.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.conformance.close_enough import OVERLAP
from openreg_tools.conformance.one_sample import OneSample
from openreg_tools.conformance.outcomes import UNINITIALIZED, Comparison, Draws, Outcome, draws_as_cpu, run
from openreg_tools.core.move import Move, is_written
from openreg_tools.core.variations import strides_of

# Calls of one ATen operator that are checked in a sample.
CALLS = 2

# Operators that write only part of a result, and the part that they leave.
WRITTEN_IN_PART = {"_ctc_loss": "log_alpha beyond the lengths of inputs and targets"}


# ---- views of guarded memory ----


# The layouts of `core.variations` that a result may have.
LAYOUTS = ("permuted", "batch-swapped", "stepped", "expanded")


@dataclasses.dataclass
class GuardedTensor:
    """A tensor of some layout in the middle of larger memory."""

    view: torch.Tensor
    memory: torch.Tensor  # bytes, with the guards
    before: torch.Tensor  # their original values, on the CPU
    owned: torch.Tensor  # which bytes belong to the view
    address: int = 0  # of the view's first element

    def __post_init__(self) -> None:
        self.address = self.view.data_ptr()

    @classmethod
    def like(cls, tensor: torch.Tensor, layout: str, device: torch.device | str) -> GuardedTensor | None:
        """A view with the shape and dtype of `tensor` and this layout, filled with it; None where there is none."""
        strides = strides_of(layout, tensor.shape) if tensor.numel() else None
        if strides is None:
            return None
        item = tensor.element_size()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
        guard = max(tensor.numel(), span) + 17
        owned = torch.zeros(2 * guard + span, item, dtype=torch.bool)
        owned[:, 0].as_strided(tensor.shape, [stride * item for stride in strides], guard * item).fill_(True)
        owned[:, 1:] = owned[:, :1]
        before = (torch.arange(owned.numel()) % 251).to(torch.uint8)
        memory = before.clone().to(device)
        view = memory.view(tensor.dtype).as_strided(tensor.shape, strides, guard).detach()
        whole = [x if layout != "expanded" else x.select(strides.index(0), 0) for x in (view, tensor)]
        whole[0].copy_(whole[1])
        return cls(view, memory, before, owned.flatten())

    def overrun(self) -> str | None:
        """Describe what was written outside the view."""
        changed = (self.memory.cpu() != self.before) & ~self.owned
        if not changed.any():
            return None
        where = changed.nonzero().flatten()
        inside = self.owned.nonzero().flatten()
        past = int(((where < inside[0]) | (where > inside[-1])).sum())
        return f"{len(where)} bytes outside the result were written, {past} of them before its start or past its end"


# ---- one call ----


@dataclasses.dataclass
class WritingCall:
    """A call that writes to `results`: `function(move, results)` makes it and returns what it returned."""

    name: str
    function: Callable[[Move, list[torch.Tensor]], Any]
    templates: list[torch.Tensor]  # the expected metadata of `results`, and their values before the call
    draws: bool = False  # random numbers, in the order of the memory

    def on(self, device: str, results: list[torch.Tensor]) -> Outcome:
        def call(move: Move) -> Any:
            with torch.no_grad():
                return self.function(move, results)

        return run(call, device)

    def compare(self, comparison: Comparison) -> None:
        """Compare the device in every layout with the CPU in contiguous memory."""
        expected = [t.detach().clone(memory_format=torch.contiguous_format) for t in self.templates]
        before = [(x.data_ptr(), x.shape) for x in expected]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            error = self.on("cpu", expected).error
        # The call does not write to this memory in any layout: it refuses it, or replaces or resizes it for a while.
        resized = any("was resized since it had shape" in str(warning.message) for warning in said)
        if error or resized or before != [(x.data_ptr(), x.shape) for x in expected]:
            return
        for layout in LAYOUTS:
            if self.draws and layout != "expanded":
                self.on("cpu", expected := self.memory(layout, "cpu")[1])
            self.compare_layout(comparison, layout, expected)

    def compare_layout(self, comparison: Comparison, layout: str, expected: list[torch.Tensor]) -> None:
        guards, views = self.memory(layout, str(comparison.device))
        if not any(guards):
            return
        comparison.tally.ran[comparison.check] += 1
        comparison.where = f"{self.name}, {layout}: "
        outcome = self.on(str(comparison.device), views)
        for overrun in filter(None, (guard.overrun() for guard in guards if guard)):
            return comparison.fail("guard", overrun)
        if layout == "expanded" or outcome.error is not None:
            # The elements of an expanded result share memory, so only the refusal can be compared.
            if layout != "expanded" or outcome.error is None or not OVERLAP.search(str(outcome.error)):
                comparison.returned(self.on("cpu", self.memory(layout, "cpu")[1]), outcome)
            return
        for view, guard, wanted in zip(views, guards, expected, strict=True):
            if view.shape != wanted.shape:
                comparison.fail("shape", f"expected {list(wanted.shape)}, but got {list(view.shape)}")
            elif guard and guard.address != view.data_ptr():
                comparison.fail("layout", "expected the result in the memory that was passed")
            elif comparison.values:
                comparison.close(wanted, view.cpu(), "value")

    def memory(self, layout: str, device: str) -> tuple[list[GuardedTensor | None], list[torch.Tensor]]:
        """The memory of the results in a layout, with guards where it can have them; and the results in it."""
        guards = [GuardedTensor.like(t, layout, device) for t in self.templates]
        plain = (t.detach().clone().to(device) for t in self.templates)
        return guards, [guard.view if guard else x for guard, x in zip(guards, plain, strict=True)]


# ---- forms of an ATen operator ----


def _plain(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


@functools.cache
def forms(op: Any) -> tuple[Any, Any]:
    """The `out=` form and the in-place form of a functional operator that returns new tensors; None where it has none."""
    schema = op._schema
    out = inplace = None
    names = [(a.name, str(a.type)) for a in schema.arguments]
    if schema.is_mutable or any(r.alias_info for r in schema.returns) or not schema.returns:
        return None, None
    if not all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns):
        return None, None
    space, name = schema.name.split("::")
    packets = getattr(torch.ops, space)
    packet = getattr(packets, name)
    for other in (getattr(packet, overload) for overload in packet.overloads()):
        theirs = other._schema.arguments
        written = theirs[len(names) :]
        if len(written) == len(schema.returns) and all(map(is_written, written)):
            if [(a.name, str(a.type)) for a in theirs[: len(names)]] == names:
                out = other
    packet = getattr(packets, f"{name}_", None)
    for other in (getattr(packet, overload) for overload in packet.overloads()) if packet else ():
        theirs = other._schema.arguments
        if [(a.name, str(a.type)) for a in theirs] == names and [is_written(a) for a in theirs] == [True] + [False] * (
            len(names) - 1
        ):
            inplace = other
    return out, inplace


class _Forms(TorchDispatchMode):
    """Compares the `out=` and in-place form of each operator that is called on the CPU."""

    def __init__(self, one: OneSample, comparison: Callable[[], Comparison]) -> None:
        super().__init__()
        self.one, self.comparison, self.calls = one, comparison, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or self.calls[func] == CALLS:
            return func(*args, **kwargs)
        out, inplace = forms(func)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        value = func(*args, **kwargs)
        results = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
        if (out is None and inplace is None) or not all(map(_plain, results)):
            return value
        if not all(t.layout == torch.strided for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            return value
        if func.overloadpacket.__name__ in (UNINITIALIZED | WRITTEN_IN_PART.keys()):
            return value
        self.calls[func] += 1
        for call in _calls(func, out, inplace, args, kwargs, value):
            comparison = self.comparison()
            comparison.values &= not seeded or draws_as_cpu(comparison.device.type)
            call.draws = seeded
            call.compare(comparison)
        return value

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import dynamo


def _calls(func: Any, out: Any, inplace: Any, args: tuple, kwargs: dict, value: Any) -> Iterator[WritingCall]:
    if out is not None:
        wants = out._schema.arguments[len(func._schema.arguments) :]
        lists = [str(a.type) == "List[Tensor]" for a in wants]

        def into(move: Move, results: list[torch.Tensor]) -> Any:
            rest = iter(results)
            values = [value] if len(wants) == 1 else list(value)
            outs = {
                a.name: [next(rest) for _ in wanted] if is_list else next(rest)
                for a, is_list, wanted in zip(wants, lists, values, strict=True)
            }
            return out(*move(args), **move(kwargs), **outs)

        yield WritingCall(str(out), into, [torch.ones_like(t) for t in tree_leaves(value)])
    if inplace is not None and args:
        changed, results = tree_leaves(args[0]), tree_leaves(value)
        same = len(changed) == len(results) and all(
            _plain(a) and a.shape == b.shape and a.dtype == b.dtype for a, b in zip(changed, results, strict=True)
        )
        if same:

            def over(move: Move, results: list[torch.Tensor]) -> Any:
                rest = iter(results)
                first = tree_map(lambda _: next(rest), args[0])
                return inplace(first, *move(args[1:]), **move(kwargs))

            yield WritingCall(str(inplace), over, changed)


# ---- the check ----


def check(one: OneSample) -> None:
    """Check every layout of the results of one sample."""

    def comparison() -> Comparison:
        return one.comparison("layouts")

    with torch.no_grad(), Draws() as draws:
        expected = run(lambda move: one.call(one.op, move), "cpu")
    single = isinstance(expected.value, torch.Tensor)
    flat = [expected.value] if single else expected.value
    if expected.error or not isinstance(flat, (list, tuple)) or not all(map(_plain, flat)):
        return
    if one.op.supports_out and "out" not in one.sample.kwargs and one.op.name not in UNINITIALIZED:

        def into(move: Move, results: list[torch.Tensor]) -> Any:
            return one.call(one.op, move, out=results[0] if single else tuple(results))

        templates = [torch.ones_like(t) for t in flat]
        WritingCall(f"{one.op.full_name}(out=)", into, templates, draws=draws.drew).compare(comparison())

    def forward_and_backward(move: Move) -> None:
        outcome = Outcome(one.call(one.op, move), mover=move)
        one.gradient(outcome)

    with _Forms(one, comparison):
        run(forward_and_backward, "cpu", requires_grad=True)
