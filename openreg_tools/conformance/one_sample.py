"""The checks of one sample of an operator: forward, backward, in place and out=."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance.outcomes import (
    HOST_ARGUMENTS,
    UNINITIALIZED,
    Comparison,
    Draws,
    Outcome,
    Tally,
    draws_as_cpu,
    is_simple,
    run,
)
from openreg_tools.core.blocks import first_line
from openreg_tools.core.move import Move
from openreg_tools.core.opinfo import SEED

__all__ = ["OneSample", "empty", "sized"]


def sized(t: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(t)


def empty(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=t.dtype)


def other_dtype(t: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(t, dtype=torch.int64 if t.dtype != torch.int64 else torch.float32)


class OneSample:
    """Each check of one sample compares the device with the CPU.

    Attributes:
        exact: whether random results must be equal to the bit, where the device draws the CPU's numbers.
        outs: what `out` makes of a result. `layouts` checks strides.
    """

    exact = True
    outs: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (sized, empty, other_dtype)

    def __init__(self, op: Any, sample: Any, index: int, device: str, tally: Tally) -> None:
        self.op, self.sample, self.index, self.device, self.tally = op, sample, index, device, tally
        self.values = op.name not in UNINITIALIZED

    def comparison(self, check: str) -> Comparison:
        return Comparison(self.tally, check, self.index, self.device, self.values)

    def host(self, requires_grad: bool) -> Move:
        """How arguments get to the CPU."""
        return Move("cpu", requires_grad)

    def both(self, call: Callable[[Move], Any], requires_grad: bool = False) -> tuple[Outcome, Outcome]:
        if draws_as_cpu(torch.device(self.device).type):
            cpu = run(call, self.host(requires_grad))
            cpu.drew &= self.exact
        else:
            with Draws() as draws:
                cpu = run(call, self.host(requires_grad))
            cpu.drew |= draws.drew
        return cpu, run(call, self.device, requires_grad)

    def call(self, function: Callable, move: Move, **more: Any) -> Any:
        sample = self.sample
        rest = Move("cpu") if self.op.name in HOST_ARGUMENTS else move
        input_, args, kwargs = move(sample.input), rest(tuple(sample.args)), rest(sample.kwargs)
        # A factory without a device argument uses the default device.
        factory = not move.tensors and "device" not in kwargs
        with move.device if factory else contextlib.nullcontext():
            return function(input_, *args, **kwargs, **more)

    def forward(self, check: str = "forward") -> None:
        self.comparison(check).outcomes(*self.both(lambda move: self.call(self.op, move)))

    def refuses(self, expected: type[Exception]) -> None:
        """Call with arguments on the device for which OpInfo names the error. `Exception` names none."""
        sample = self.sample
        error = run(lambda _: self.op(sample.input, *sample.args, **sample.kwargs), self.device).error
        self.tally.ran["errors"] += 1
        if isinstance(error, expected) or (error is None and expected is Exception):
            return
        kind, found = ("error type", first_line(error)) if error else ("no error", "none")
        message = f"OpInfo expects {expected.__name__} for this device, found {found}"
        self.tally.fail("errors", kind, self.index, message)

    def backward(self, check: str = "backward") -> None:
        self.differentiate(lambda move: self.call(self.op, move), check)

    def differentiate(self, call: Callable[[Move], Any], check: str) -> None:
        comparison = self.comparison(check)
        cpu, device = self.both(call, requires_grad=True)
        if comparison.outcomes(cpu, device):
            gradients = (run(lambda _, side=side: self.gradient(side), side.mover) for side in (cpu, device))
            comparison.gradients(*gradients)

    def gradient(self, outcome: Outcome) -> list[torch.Tensor | None]:
        """The gradients of the leaves, of the results weighted by random numbers that do not depend on their dtypes."""
        value, leaves = outcome.value, outcome.mover.leaves
        value = getattr(self.sample, "output_process_fn_grad", lambda result: result)(value)
        outputs = [
            out.to_dense() if out.layout != torch.strided else out
            for out in tree_leaves(value)
            if isinstance(out, torch.Tensor) and out.requires_grad
        ]
        if not outputs or not leaves:
            return [None] * len(leaves)
        host, weights = torch.Generator().manual_seed(SEED), []
        for out in outputs:
            dtype = torch.complex64 if out.is_complex() else torch.float32
            weights.append(torch.randn(out.shape, dtype=dtype, generator=host).to(out.dtype).to(out.device))
        return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))

    def inplace(self, check: str = "inplace") -> None:
        function, input_ = self.op.get_inplace(), self.sample.input
        if function is None or self.sample.broadcasts_input or not isinstance(input_, (torch.Tensor, list)):
            return

        def call(move: Move) -> Any:
            changed = tree_leaves(move(input_))
            out = tree_leaves(self.call(function, move))
            return changed, [a is b for a, b in zip(out, changed, strict=False)]

        self.comparison(check).outcomes(*self.both(call))
        if self.op.supports_inplace_autograd and isinstance(input_, torch.Tensor) and input_.requires_grad:

            def through_a_clone(move: Move) -> Any:
                leaf = move(input_)
                args, kwargs = move(tuple(self.sample.args)), move(self.sample.kwargs)
                return function(leaf.clone(), *args, **kwargs)

            self.differentiate(through_a_clone, check)

    def result(self) -> Any:
        """What the operator returns, on the CPU; None if it raises."""
        return run(lambda move: self.call(self.op, move), "cpu").value

    def out(self, check: str = "out") -> None:
        """Call with each kind of out= tensors in `outs`."""
        if not self.op.supports_out or "out" in self.sample.kwargs:
            return
        result = self.result()
        flat = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(flat, (list, tuple)) or not all(isinstance(t, torch.Tensor) and is_simple(t) for t in flat):
            return

        for make in self.outs:

            def call(move: Move, make: Callable = make) -> Any:
                outs = tuple(move(make(t)) for t in flat)
                kept = [out.data_ptr() for out in outs]
                returned = self.call(self.op, move, out=outs[0] if isinstance(result, torch.Tensor) else outs)
                leaves = [returned] if isinstance(returned, torch.Tensor) else returned
                same = [a is b for a, b in zip(leaves, outs, strict=False)]
                moved = [a != out.data_ptr() for a, out in zip(kept, outs, strict=True)]
                return outs, same, moved

            self.comparison(check).outcomes(*self.both(call))
