"""``openreg-tools explain OP``: the path of one call through the dispatcher, key by key.

It shows in a release build of torch what TORCH_SHOW_DISPATCH_TRACE prints in a debug build, and explains it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from openreg_tools import dispatch
from openreg_tools.backends import Has
from openreg_tools.core.blocks import WIDTH, Block, Cell, Lines, Section, Table, Text, cut, hanging, wrapped
from openreg_tools.core.device import Target, Unusable, add_device, load, target_of
from openreg_tools.core.options import Wrong, unknown
from openreg_tools.core.report import Report, add_output, write
from openreg_tools.core.samples import dtype_of, parse, shown
from openreg_tools.recorder import Call, DispatchStep, Recorder, about, keyset, listed, path, step

__all__ = ["Explanation", "explain"]

# Shown for every operator, reached or not.
ALWAYS = ("Autocast{}", "Autograd{}", "ADInplaceOrView", "Functionalize", "BackendSelect", "{}")


@dataclasses.dataclass
class Explanation(Report):
    """One call: its keys in the dispatcher's order, and where it ends."""

    operator: str
    schema: str
    called: str  # with what, or that it was not
    target: Target
    has: Has
    end: tuple[str, Has]  # the out variant that a structured operator runs, or itself, and its kernel
    steps: list[DispatchStep]  # the kernels that run, in order
    others: list[DispatchStep]  # keys that the call does not have, or falls through
    calls: list[Call]  # made by running it
    outcome: str  # what running it gave
    overloads: list[str]  # the operator's other overloads, if the call does not say which

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"explain {self.operator}"

    @property
    def passed(self) -> bool:
        """True if the operator has a kernel or decomposes, and the call did not raise."""
        return self.end[1].kind not in ("fallback", "refused") and not self.outcome.startswith("raised")

    def opening(self) -> str:
        """The conclusion, and what a call gave."""
        return f"{self.conclusion()} {f'It {self.outcome}.' if self.outcome else ''}".rstrip()

    def blocks(self, page: bool = False) -> Iterator[Block]:
        """The path key by key, the conclusion and the trace."""
        yield Text(self.schema)
        if self.overloads:
            yield Text(f"other overloads: {', '.join(self.overloads)}")
        yield Text(f"{self.called}; torch {torch.__version__}")
        if page:
            yield Section("Dispatch keys, in the dispatcher's order", [self._keys()])
            if self.calls or self.outcome:
                yield Section("The call and the calls inside it", [Lines(self.trace())])
            return
        yield Section("", [Lines(self._path())])
        yield Section("", [Text(self.conclusion())])
        if self.calls or self.outcome:
            yield Section("", [Lines(self.trace()), Text(f"It {self.outcome}.")])

    def _ordered(self) -> list[tuple[str, DispatchStep]]:
        """Every key in the dispatcher's order, with the number of the ones that run."""
        order = {key: i for i, key in enumerate(reversed([*dispatch.kernels(self.operator)]))}
        numbers = {id(s): str(i) for i, s in enumerate(self.steps, 1)}
        shown = sorted([*self.steps, *self.others], key=lambda s: order.get(s.key, len(order)))
        return [(numbers.get(id(s), ""), s) for s in shown]

    def _keys(self) -> Table:
        rows = [
            [s.key, Cell(number, "pass" if number and self.passed else "fail" if number else ""),
             Cell(s.does, "words"), s.where if number else ""]
            for number, s in self._ordered()
        ]  # fmt: skip
        return Table([["dispatch key", "step", "what happens there", "registered at"], *rows])

    def _path(self) -> list[str]:
        """A line for each key, with the number of the ones that run and what each does."""
        shown = self._ordered()
        width = max(len(s.key) for _, s in shown)
        lines = []
        for number, passed in shown:
            first = f"{number:>2} {passed.key:{width}}  "
            lines += hanging(passed.does, first) or [first.rstrip()]
            if number and passed.where:
                margin = width + 5 if width + 5 + len(passed.where) <= WIDTH else 4
                lines.append(" " * margin + cut(passed.where, WIDTH - margin))
        return lines

    def conclusion(self) -> str:
        """Says that the operator runs, decomposes, falls back or raises, and what to write to change it."""
        name, key = self.operator, self.target.key
        if self.steps[-1].does.startswith("decomposes"):
            return f"{name} decomposes at {self.steps[-1].key}: its parts are dispatched again."
        end, has = self.end
        if has.kind == "composite" or end != name and has.kind in ("own", "shared"):
            return f"{name} has no kernel for {key}: it {self.has.why.replace('structured: ', '')}."
        if has.kind in ("own", "shared"):
            return f"{name} runs on {self.target.device}: {self.has.why}."
        what = "falls back" if has.kind == "fallback" else "raises NotImplementedError"
        namespace, _, short = end.partition("::")
        runs, operator = ("", "it") if end == name else (f"it runs {end}; ", end)
        return (
            f"{name} {what}: {runs}{has.why}. Register a kernel for {operator}: "
            f'TORCH_LIBRARY_IMPL({namespace}, {key}, m) {{ m.impl("{short}", kernel); }}'
        )

    def trace(self) -> list[str]:
        """The calls, in the form of TORCH_SHOW_DISPATCH_TRACE."""
        top = Call(self.operator, self.has.kind, [], 0)
        if not self.steps[0].key.startswith("Autocast"):
            return trace_lines(_around(top, self.steps, self.calls), self.target.key)
        # The autocast kernel casts and calls the operator again, or the parts of a CompositeImplicitAutograd operator.
        deeper = [(dataclasses.replace(call, depth=call.depth + 1), None) for call in self.calls]
        return trace_lines([(dataclasses.replace(top, has=""), self.steps[:1]), *deeper], self.target.key)

    def dict(self) -> dict[str, Any]:
        steps = [dataclasses.asdict(s) for s in self.steps]
        return {
            "operator": self.operator, "schema": self.schema, "called": self.called, "torch": torch.__version__,
            "device": self.target.device, "key": self.target.key, "has": self.has.kind, "why": self.has.why,
            "steps": steps, "conclusion": self.conclusion(), "outcome": self.outcome,
            "overloads": self.overloads,
            "calls": [{"operator": c.name, "has": c.has, "depth": c.depth} for c in self.calls],
        }  # fmt: skip


def _around(top: Call, steps: list[DispatchStep], calls: list[Call]) -> list[tuple[Call, list[DispatchStep] | None]]:
    """The recorded calls, with `steps` for the first if it is `top`; otherwise inside `top`, which was not recorded."""
    if calls and calls[0].name == top.name:
        return [(calls[0], steps), *((call, None) for call in calls[1:])]
    return [(top, steps), *((dataclasses.replace(call, depth=call.depth + 1), None) for call in calls)]


def trace_lines(calls: list[tuple[Call, list[DispatchStep] | None]], backend: str) -> list[str]:
    """Calls in the form of the dispatch trace; the steps of a call are computed if not given."""
    lines, margins = [], [0]  # of the calls at each depth
    for call, steps in calls:
        steps = path(call.name, call.keys, backend) if steps is None else steps
        del margins[call.depth + 1 :]
        for i, passed in enumerate(steps):
            tail = "" if i < len(steps) - 1 else f"  {call.has}"
            margin = " " * (margins[-1] + i)
            lines.append(
                f"{margin}[{'redispatch' if i else 'call'}] op=[{call.name}], key=[{passed.key}]{tail}".rstrip()
            )
        if call.error:
            lines += wrapped(f"raised {call.error}", margins[-1] + 1)
        margins.append(margins[-1] + len(steps))
    return lines


def explain(op: str, *args: Any, target: Target | None = None, run: bool = False, **kwargs: Any) -> Explanation:
    """The path of ``op(*args, **kwargs)`` under the current modes (autocast, inference); without arguments, on
    `target`.

    Args:
        op: ``"aten::add.Tensor"``; ``"aten::add"`` or ``"add"`` takes the overload of the arguments, or one of tensors.
        run: also call it, and report the calls inside; writes to `args` if the operator does.
    Raises:
        Wrong: no such operator, or no overload of it takes these arguments; for a named overload, only when run.
    """
    name = _resolve(op, args, kwargs)
    overloads = _overloads(name, dispatch.names()) if "." not in op and not (args or kwargs) else []
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    if target is None:
        places = [t.device for t in tensors if t.device.type != "cpu"] or [t.device for t in tensors]
        target = target_of(str(places[0]) if places else None)
    given = bool(args or kwargs)
    keys = listed(keyset((args, kwargs)))
    if not given and any("Tensor" in str(a.type) for a in dispatch.schema(name).arguments):
        keys = [f"Autograd{target.key}", "ADInplaceOrView", target.key]  # as a plain tensor's
    steps = path(name, keys, target.key)
    if steps and steps[0].key.startswith("Autocast"):
        does = f"{steps[0].does}; the next steps are in the call that it makes"
        steps[0] = dataclasses.replace(steps[0], does=does)
    table = dispatch.kernels(name)
    others = []
    for form in ALWAYS:
        key = form.format(target.key)
        if any(s.key == key for s in steps) or key not in table and about(key):
            continue
        if key in keys or table.get(key) and table[key].fallthrough:
            others.append(
                DispatchStep(key, "falls through" if table[key].fallthrough else "not reached", table[key].where)
            )
        elif about(key):
            others.append(DispatchStep(key, f"not in this call; {step(name, key, table[key]).does}", table[key].where))
    last = steps[-1].key if steps and not about(steps[-1].key) else target.key
    has = dispatch.has(name, last)
    delegate = dispatch.delegate_of(name) if has.kind == "composite" else ""
    end = (delegate, dispatch.has(delegate, last)) if delegate else (name, has)
    explanation = Explanation(
        name, str(dispatch.schema(name)), _called(args, kwargs, target.device),
        Target(target.device, last), has, end, steps, others, [], "",
        [other.partition(".")[2] or "default" for other in overloads if other != name],
    )  # fmt: skip
    if run:
        _run(explanation, args, kwargs)
    return explanation


def _resolve(op: str, args: tuple, kwargs: dict) -> str:
    op = op if "::" in op else f"aten::{op}"
    known = set(dispatch.names())
    if "." in op or not (args or kwargs):
        overloads = _overloads(op, known)
        if "." in op and op.removesuffix(".default") in known:
            return op.removesuffix(".default")
        if overloads and "." not in op:
            return overloads[0]
        overloads.sort()
        if overloads:
            raise Wrong(f"unknown operator {op!r}; available: {', '.join(overloads)}")
    names = {name.partition(".")[0] for name in known}
    if op.partition(".")[0] not in names:
        raise Wrong(unknown("operator", op, names, "if another library defines it, name that with --import"))
    try:
        overload = torch._C._jit_resolve_packet(op, *args, **kwargs)
    except RuntimeError as error:
        raise Wrong(f"no overload of {op} takes {_described(args, kwargs)}: {str(error).splitlines()[0]}") from None
    return op if overload in ("", "default") else f"{op}.{overload}"


def _overloads(op: str, known: Iterable[str]) -> list[str]:
    """Every overload of an operator: first the default, or else the one with the most tensors; out variants last."""

    def order(name: str) -> tuple:
        arguments, overload = dispatch.schema(name).arguments, name.partition(".")[2]
        tensors = sum(str(a.type) == "Tensor" for a in arguments)
        return any(a.is_out for a in arguments), overload != "", -tensors, name

    return sorted((name for name in known if name.partition(".")[0] == op.partition(".")[0]), key=order)


def _called(args: tuple, kwargs: dict, device: str) -> str:
    if args or kwargs:
        return f"called with {_described(args, kwargs)}"
    return f"not called (no --input); showing the path of a plain {device} tensor"


def _described(args: tuple, kwargs: dict) -> str:
    def described(value: Any) -> str:
        return f"{shown(value)}@{value.device}" if isinstance(value, torch.Tensor) else shown(value)

    return ", ".join([*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items())])


def _run(explanation: Explanation, args: tuple, kwargs: dict) -> None:
    namespace, _, name = explanation.operator.partition("::")
    name, _, overload = name.partition(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    with Recorder(explanation.target) as recorder:
        try:
            out = function(*args, **kwargs)
            explanation.outcome = f"returned {_described((out,), {})}"
        except Exception as error:
            first = re.split(" (?:Declaration|Schema): |\n", str(error))[0]
            if explanation.schema in str(error):  # the arguments do not bind, so nothing was called
                raise Wrong(f"{explanation.operator} does not take these arguments: {first} Its schema is "
                            f"{explanation.schema}") from None  # fmt: skip
            explanation.outcome = f"raised {type(error).__name__}: {first}".rstrip(".")
    explanation.calls = recorder.calls


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help="aten::add.Tensor, aten::add or add")
    parser.add_argument("--input", metavar="ARGUMENTS",
                        help="call it, with for example 'f32[3,4]@openreg, f32[4], alpha=2'; a tensor that names no "
                        "device is on --device")  # fmt: skip
    parser.add_argument("--grad", action="store_true", help="floating-point tensors require gradients")
    parser.add_argument(
        "--autocast", metavar="DTYPE", help="make the call under torch.autocast, for example to bfloat16"
    )
    add_device(parser)
    add_output(parser)


def main(arguments: argparse.Namespace) -> int:
    """0 if the operator has a kernel or decomposes, 1 if it falls back or raises, 2 if the request is wrong."""
    load(arguments.modules, arguments.device)
    target = target_of(arguments.device, arguments.key)
    args, kwargs = (), {}
    if arguments.input:
        try:
            sample = parse(arguments.input, target.device)
        except Unusable as error:
            raise Wrong(f"{error}; `operators` and `explain` without --input need no device") from None
        args, kwargs = sample.args, sample.kwargs
        if arguments.grad:
            args, kwargs = tree_map(_require_grad, (args, kwargs))
    autocast = contextlib.nullcontext()
    if arguments.autocast:
        autocast = torch.autocast(torch.device(target.device).type, dtype_of(arguments.autocast))
    with autocast:
        given = None if arguments.input else target
        explanation = explain(arguments.op, *args, target=given, run=bool(arguments.input), **kwargs)
    return write(explanation, arguments)


def _require_grad(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.requires_grad_()
    return value
