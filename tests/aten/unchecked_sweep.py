"""Calls that OpInfo's samples reach, each with one wrong tensor, in child processes.

``python unchecked_sweep.py integers``: each integer of a tensor far out of range, on the device. Prints the operators
that end the process.

``python unchecked_sweep.py shapes``: each tensor smaller in one dimension, at the end of memory that may be used, on
the CPU. A call that reads or writes beyond it must raise on the device. Prints those that do not.
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
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from openreg_tools.conformance.calls import Move, fenced

Call = tuple[tuple, dict]


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
        for dtype in {torch.float32, torch.int64} & {*info.dtypes}:
            gradient = info.supports_autograd and dtype == torch.float32
            try:
                for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=gradient), 12):
                    with record:
                        out = info(sample.input, *sample.args, **sample.kwargs)
                        wanted = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
                        if wanted:
                            torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
            except Exception:
                pass  # a sample that this machine cannot run
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


def on_device(leaves: list[Any]) -> list[Any]:
    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to("openreg")
        return torch.device("openreg") if isinstance(x, torch.device) else x

    return [move(x) for x in leaves]


def raises(op: Any, call: Call) -> bool:
    """Whether a call raises, or returns no elements."""
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


def sweep_integers(calls: dict[Any, list[Call]]) -> None:
    tried = 0
    for op, known in calls.items():
        if not any(map(is_integral, tree_leaves(known))):
            continue
        tried += 1
        found = child(lambda op=op, known=known: [raises(op, wrong) for call in known for wrong in far_out(call)])
        if found:
            print("signal", found, op, flush=True)
    print("operators", tried)


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


def leaves_memory(op: Any, known: list[Call]) -> list[tuple[Call, int, tuple[int, ...]]]:
    """At most six calls, with the tensor and its shape, that use memory beyond it on the CPU."""
    cases = [(call, i, shape) for call in known for i, shape in smaller(call)]
    found, start = [], 0
    with tempfile.TemporaryFile() as progress:

        def run() -> None:
            for number in range(start, len(cases)):
                os.pwrite(progress.fileno(), b"%8d" % number, 0)
                run_one(cases[number])

        def run_one(case: tuple[Call, int, tuple[int, ...]]) -> None:
            call, i, shape = case
            leaves, spec = tree_flatten(call)
            leaves[i] = cut(leaves[i], shape)

            def fence(move: Move) -> None:
                fenced_leaves = [move(x) if isinstance(x, torch.Tensor) else x for x in leaves]
                args, kwargs = tree_unflatten(fenced_leaves, spec)
                op(*args, **kwargs)

            fenced(fence)

        while len(found) < 6 and (ended := child(run)):
            number = int(os.pread(progress.fileno(), 8, 0))
            # The heap's own check aborts some calls after the one that wrote beyond a result.
            suspects = cases[start : number + 1] if ended == signal.SIGABRT else []
            found += [each for each in suspects if child(lambda each=each: [run_one(each) for _ in range(50)])]
            found += [] if suspects else [cases[number]]
            start = number + 1
    return found


def sweep_shapes(calls: dict[Any, list[Call]]) -> None:
    beyond = {op: found for op, known in calls.items() if (found := leaves_memory(op, known))}
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
    print("operators", len(beyond))


if __name__ == "__main__":
    torch.set_num_threads(1)
    of_samples = recorded()
    if sys.argv[1] == "integers":
        import openreg_ops  # noqa: F401 -- after the samples, which use the CPU's threads

        sweep_integers(of_samples)
    else:
        sweep_shapes(of_samples)
