"""Calls that OpInfo's samples reach, each with one wrong tensor, in child processes.

Shapes: each tensor smaller in one dimension, at the end of memory that may be used, on the CPU. A call that reads or
writes beyond it must raise on the device. Prints those that do not.

Integers: each integer of a tensor far out of range, on the device. Prints the operators that end the process.

Last, it prints two numbers: of the operators whose CPU kernel leaves the memory of a tensor, and of those that take
integers in one.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cuda_calls import Call, run_samples
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from openreg_tools.conformance.guarded import fenced
from openreg_tools.core.move import Move

BEFORE = 8  # operators that may have broken the heap that aborts in a later one


def is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and bool(x.numel())


def is_integral(x: Any) -> bool:
    return is_dense(x) and x.dtype in (torch.int64, torch.int32)


class Record(TorchDispatchMode):
    """At most three calls of each operator that has several tensors, or integers in one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, dict[str, Call]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        # For a polynomial, an integer is the degree, and so the number of steps.
        if (any(map(is_integral, tensors)) or 1 < len(tensors) < 12) and "polynomial" not in str(op):
            known = self.calls.setdefault(op, {})
            if len(known) < 3:
                copied = tree_map(
                    lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs or {})
                )
                known.setdefault(str([(x.shape, x.dtype) for x in tensors]), copied)
        return op(*args, **kwargs or {})


def recorded() -> dict[Any, list[Call]]:
    """The calls of the samples, and of their gradients."""
    record = Record()
    torch.manual_seed(0)
    for info in op_db:
        run_samples(info, record, 4)
    return {op: [*known.values()] for op, known in record.calls.items()}


def child(run: Callable[[], Any]) -> int:
    """The signal that ended a child process, or 0."""
    if not (pid := os.fork()):
        signal.alarm(60)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        run()
        sys.stdout.flush()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def endings(count: int, run: Callable[[int], Any]) -> Iterator[tuple[int, int, int]]:
    """Calls `run` with each number below `count` in a child process; where one ends, another goes on behind it.

    Yields the first number of such a process, its last one, and the signal.
    """
    start = 0
    with tempfile.TemporaryFile() as progress:

        def work() -> None:
            for number in range(start, count):
                os.pwrite(progress.fileno(), b"%8d" % number, 0)
                signal.alarm(60)
                run(number)

        while ended := child(work):
            number = int(os.pread(progress.fileno(), 8, 0))
            yield start, number, ended
            start = number + 1


def suspects(calls: dict[Any, list[Call]], run: Callable[[Any, list[Call]], None]) -> list[Any]:
    """The operators that end a process, and some before one that aborts, which the heap's own check does late."""
    every, found = [*calls], []
    for first, last, ended in endings(len(every), lambda number: run(every[number], calls[every[number]])):
        found += every[max(first, last + 1 - BEFORE) if ended == signal.SIGABRT else last : last + 1]
    return found


def on_device(leaves: list[Any]) -> list[Any]:
    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to("openreg")
        return torch.device("openreg") if isinstance(x, torch.device) else x

    return [move(x) for x in leaves]


def raises(op: Any, call: Call) -> bool:
    """Returns true if a call raises, or returns no elements."""
    try:
        results = [x.cpu() for x in tree_leaves(op(*call[0], **call[1])) if isinstance(x, torch.Tensor)]
    except Exception:
        return True
    return not any(x.numel() for x in results)


# ---- integers ----


def far_out(call: Call) -> Iterator[Call]:
    """The call on the device, with each tensor of integers wrong in one place and in all."""
    leaves, spec = tree_flatten(call)
    leaves = on_device(leaves)
    for i in filter(lambda i: is_integral(leaves[i]), range(len(leaves))):
        for value, everywhere in itertools.product((2**40, -(2**40), 10**6), (False, True)):
            wrong = leaves[i].clone(memory_format=torch.contiguous_format)
            value = value if wrong.dtype == torch.int64 else value % 2**30
            wrong.view(-1)[slice(None) if everywhere else wrong.numel() // 2] = value
            yield tree_unflatten([*leaves[:i], wrong, *leaves[i + 1 :]], spec)


def sweep_integers(calls: dict[Any, list[Call]]) -> int:
    """Returns the number of operators that take integers in a tensor."""
    calls = {op: known for op, known in calls.items() if any(map(is_integral, tree_leaves(known)))}

    def run(op: Any, known: list[Call]) -> None:
        for call in known:
            for wrong in far_out(call):
                raises(op, wrong)

    for op in suspects(calls, run):
        print("signal", child(lambda op=op: run(op, calls[op])) or "only after others", op, flush=True)
    return len(calls)


# ---- shapes ----


def smaller(call: Call) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each tensor of a call, and shapes for it that are smaller in one dimension or in all."""
    for i, x in enumerate(tree_leaves(call)):
        if not is_dense(x):
            continue
        shapes = [
            (*x.shape[:d], m, *x.shape[d + 1 :]) for d, n in enumerate(x.shape) for m in sorted({0, 1, n - 1}) if m < n
        ]
        yield from ((i, shape) for shape in dict.fromkeys([*shapes, (1,) * x.dim()]) if shape != x.shape)


def cut(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return x[tuple(map(slice, shape))].clone(memory_format=torch.contiguous_format)


Case = tuple[Call, int, tuple[int, ...]]  # a call, the number of a tensor in it, and its shape


def cases_of(known: list[Call]) -> list[Case]:
    return [(call, i, shape) for call in known for i, shape in smaller(call)]


def run_cut(op: Any, case: Case) -> None:
    """On the CPU, with every tensor at the end of memory that may be used."""
    call, i, shape = case
    leaves, spec = tree_flatten(call)
    leaves[i] = cut(leaves[i], shape)

    def fence(move: Move) -> None:
        args, kwargs = tree_unflatten([move(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        op(*args, **kwargs)

    fenced(fence)


def leaves_memory(op: Any, known: list[Call]) -> list[Case]:
    """About six cases that use memory beyond a tensor on the CPU."""
    cases, found = cases_of(known), []
    for first, last, ended in endings(len(cases), lambda number: run_cut(op, cases[number])):
        # The heap's own check aborts some calls after the one that wrote beyond a result.
        earlier = cases[first : last + 1] if ended == signal.SIGABRT else []
        found += [case for case in earlier if child(lambda case=case: [run_cut(op, case) for _ in range(50)])]
        found += [] if earlier else [cases[last]]
        if len(found) >= 6:
            break
    return found


def sweep_shapes(calls: dict[Any, list[Call]]) -> int:
    """Returns the number of operators whose CPU kernel leaves the memory of a tensor. Registers the device."""
    suspected = suspects(calls, lambda op, known: [run_cut(op, case) for case in cases_of(known)])
    beyond = {op: found for op in suspected if (found := leaves_memory(op, calls[op]))}
    import openreg_ops  # noqa: F401 -- the children above must not have the device's threads

    def run(op: Any, call: Call, i: int, shape: tuple[int, ...]) -> None:
        leaves, spec = tree_flatten(call)
        leaves = on_device([*leaves[:i], cut(leaves[i], shape), *leaves[i + 1 :]])
        if not raises(op, tree_unflatten(leaves, spec)):
            print(
                f"does not raise: {op}, argument {i} of shape {shape} in place of {tuple(tree_leaves(call)[i].shape)}"
            )

    for op, found in beyond.items():
        for case in found:
            if ended := child(lambda op=op, case=case: run(op, *case)):
                print("signal", ended, op, *case[1:], flush=True)
    return len(beyond)


if __name__ == "__main__":
    torch.set_num_threads(1)
    of_samples = recorded()
    print(sweep_shapes(of_samples), sweep_integers(of_samples))
