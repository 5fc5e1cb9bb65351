"""Checks of backward as programs call it: gradients in any layout, frozen and broadcast arguments, saved tensors."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.check.case import Case, cotangents, refuse, skip, unlike_gradients
from openreg_tools.check.checks.common import needs_derivative, needs_order, refused
from openreg_tools.check.checks.fakes import difference, faking
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import differs, has_numbers
from openreg_tools.core.samples import dtype_name
from openreg_tools.core.variations import channels_last, padded, permuted, reversed_in, stepped, unaligned

Given = Callable[[list[Tensor]], list[Tensor | None]]


class _FakesCompared(TorchDispatchMode):
    """Compares each custom operator that is called with its fake kernel."""

    wrong = ""  # the first difference
    raised = False  # whether a fake kernel raised an error
    raising = False  # whether that is a difference

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wrong or func.namespace in ("aten", "prim", "prims"):
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with faking() as mode:  # before the kernel, which may write to them
            fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs))
        out = func(*args, **kwargs)
        name = func.name().removesuffix(".default")
        given = f"(given {', '.join(f'{list(x.shape)} of strides {x.stride()}' for x in tensors)})"
        try:
            with faking(mode):
                said = func(*fakes[0], **fakes[1])
        except Exception as error:
            if self.raising:
                self.wrong = f"{name} runs, but its fake kernel raised {all_lines(error)} {given}"
            self.raised = True
            return out
        pairs = zip(tree_leaves(out), tree_leaves(said), strict=False)
        for i, (real, fake) in enumerate(pairs):
            if isinstance(real, Tensor) and isinstance(fake, Tensor) and (found := difference(real, fake)):
                self.wrong = (
                    f"output {i} of {name} has {found[0]} {found[1]}, but its fake kernel says {found[2]} {given}"
                )
                break
        return out

    def report(self, case: Case, where: str) -> None:
        """Fail if a fake kernel differs."""
        if self.wrong:
            case.fail(
                f"{where} {self.wrong}; a compiled program trusts the fake kernel",
                "allocate in that fake kernel what its kernel allocates: torch.empty_like(grad) follows the strides of grad, "
                "x.new_empty(x.shape) is contiguous",
            )


def _pull(
    case: Case,
    tensors: list[Tensor],
    wanted: Sequence[bool],
    given: Given = cotangents,
    between: Callable[[Sequence[Tensor]], None] = lambda outs: None,
    fakes: _FakesCompared | None = None,
) -> list[Tensor | None]:
    """The gradients under the cotangents that `given` makes, of which None is an undefined one.

    Args:
        between: called with the outputs before backward.
        fakes: a mode for the backward.
    """
    tensors = [x.detach().requires_grad_(flag) for x, flag in zip(tensors, wanted, strict=True)]
    leaves = [x for x in tensors if x.requires_grad]
    every = case.run(*tensors)
    between(every)
    outs = [out for out in every if out.requires_grad]
    pairs = [(out, g) for out, g in zip(outs, given(outs), strict=True) if g is not None]
    if not pairs:
        return [None] * len(leaves)
    with fakes or _FakesCompared():
        return list(torch.autograd.grad([p[0] for p in pairs], leaves, [p[1] for p in pairs], allow_unused=True))


def _steady(case: Case) -> list[Tensor | None]:
    """The gradients under contiguous cotangents."""
    needs_derivative(case)
    first, again = (_pull(case, case.fresh(), case.wanted) for _ in range(2))
    if differs(again, first):
        skip("its gradient changes from call to call: see determinism")
    return first


# ---- layouts of the incoming gradient ----


def _roomy(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A contiguous copy of x before memory for the rest of `shape`, so that a kernel may read that much."""
    count = max(torch.Size(shape).numel(), x.numel())
    memory = torch.full((count,), float("nan"), dtype=torch.float64).to(x.dtype).to(x.device)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


def _spread(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Expanded along these dimensions: their first element everywhere, with stride 0."""
    return _roomy(x[tuple(slice(0, 1) if d in dims else slice(None) for d in range(x.dim()))], x.shape).expand(x.shape)


def _arrivals(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gradient x as programs send it."""
    if x.layout != torch.strided or not x.numel():
        return
    yield "a slice of a wider one, as after cat or split", padded(x)
    if x.dim() > 1:
        yield "transposed", permuted(x)
    if x.dim() > 2:
        yield "a slice along dimension 1", torch.cat([-x, x], 1)[:, x.shape[1] :]
    yield "every other element of a longer one", stepped(x)
    if x.dim():
        yield "a slice with an offset, as after cat along dimension 0", torch.cat([-x, x])[len(x) :]
        yield "contiguous, one element into its memory, which is not aligned to 16 bytes", unaligned(x)
        yield "expanded with strides of 0, as after sum()", _spread(x, range(x.dim()))
    if x.dim() > 1:
        yield "expanded along dimension 0, as after sum(0)", _spread(x, [0])
        yield "expanded along the last dimension, as after sum(-1)", _spread(x, [x.dim() - 1])
    if x.dim() in (4, 5):
        yield "channels-last", channels_last(x)


def gradient_layouts(case: Case) -> str | None:
    """The backward reads a gradient that is sliced, transposed, expanded or undefined, and its fake kernels do."""
    whole = _steady(case)
    fakes = _FakesCompared()
    remedy = (
        "gradients arrive with any strides: the backward, or the operator that it calls, must read them by their strides or "
        "start from grad.contiguous()"
    )
    differentiated = [k for k, out in enumerate(case.run(*case.fresh(grad=True))) if out.requires_grad]

    def pull(k: int, g: Tensor | None, others: bool, fakes: _FakesCompared | None = None) -> list[Tensor | None]:
        """The gradients if output k gets this gradient, and the others theirs, or none."""

        def given(outs: list[Tensor]) -> list[Tensor | None]:
            made = cotangents(outs)
            return [(c if g is None else g) if i == k else c if others else None for i, c in enumerate(made)]

        return _pull(case, case.fresh(), case.wanted, given, fakes=fakes)

    count = len(differentiated)
    parts = [pull(k, None, False, fakes) for k in range(count)]
    fakes.report(case, "in its backward")
    fakes.raising = not fakes.raised
    if count > 1:
        sums = [sum((g for g in each if g is not None), torch.zeros(())) for each in zip(*parts, strict=True)]
        sums = [None if g is None else s.to(g.device) for g, s in zip(whole, sums, strict=True)]
        if wrong := unlike_gradients(case.asked, sums, whole, coarse=1e-4):
            case.fail(
                "backward through one output at a time, so that the gradients of the others are undefined, adds up to other "
                f"numbers than backward through all: {wrong}",
                "take an undefined gradient (None) for zeros, or leave set_materialize_grads on, which fills in zeros",
            )
    rejects = ""
    made = cotangents([case.expected[k] for k in differentiated])
    for k, (how, arriving) in ((k, way) for k, given in enumerate(made) for way in _arrivals(given)):
        expected = pull(k, arriving.clone(memory_format=torch.contiguous_format), True)
        which = "the gradient" if count == 1 else f"the gradient of output {differentiated[k]}"
        where = f"{which} is {how} (shape {list(arriving.shape)}, strides {arriving.stride()})"
        try:
            got = pull(k, arriving, True, fakes)
        except Exception as error:
            if refused(error) or "contiguous" in str(error) and "view size" not in str(error):
                rejects = rejects or f"{where}: backward rejects it: {all_lines(error)}"
                continue
            case.fail(f"{where}: backward raised {all_lines(error)}", remedy)
        if wrong := unlike_gradients(case.asked, got, expected):
            case.fail(f"{where}: {wrong}, which a contiguous gradient of equal values gives", remedy)
        fakes.report(case, f"{where}:")
    if rejects:
        case.warn(rejects, "accept it: start from grad.contiguous()")
    return None


# ---- frozen arguments ----


def frozen_arguments(case: Case) -> str | None:
    """The gradient of an argument is the same whichever other arguments require one."""
    whole = dict(zip(case.of(range(len(case.leaves))), _steady(case), strict=True))
    if len(whole) < 2:
        skip("one argument is differentiable")
    remedy = (
        "needs_input_grad says which gradients may be left out (None); it must not change the others, nor their "
        "number and order"
    )
    chosen = [(i,) for i in whole]
    if 2 < len(whole) <= 5:
        chosen += itertools.combinations(whole, len(whole) - 1)
    refusal = ""
    for some in chosen:
        names = [case.names[i] for i in some]
        where = f"if only {' and '.join(names)} require{'' if len(names) > 1 else 's'} a gradient"
        fakes = _FakesCompared()
        try:
            got = _pull(case, case.fresh(), [i in some for i in range(len(case.leaves))], fakes=fakes)
        except Exception as error:
            if refused(error):
                refusal = refusal or f"{case.name}: {where}: {all_lines(error)}"
                continue
            case.fail(f"{where}, backward raised {all_lines(error)}", remedy)
        if wrong := unlike_gradients(names, got, [whole[i] for i in some]):
            case.fail(f"{where}, {wrong}, which backward gives when every argument requires one", remedy)
        fakes.report(case, f"{where},")
    if refusal:
        refuse(refusal)
    return None


# ---- broadcast arguments ----


def broadcast_gradients(case: Case) -> str | None:
    """The gradient of an argument that is broadcast is summed to the argument's shape."""
    needs_derivative(case)
    needs_order(case)
    remedy = "sum it over the dimensions that were broadcast: grad.sum_to_size(x.shape)"
    found = []
    for at, i in enumerate(case.of(range(len(case.leaves)))):
        shape = tuple(case.leaves[i].shape)
        ones = [(*shape[:d], 1, *shape[d + 1 :]) for d, size in enumerate(shape) if size > 1]
        for small in dict.fromkeys((*ones, (1,) * len(shape), shape[1:], ())) if case.leaves[i].numel() > 1 else ():
            tensors, full = case.fresh(dtype=case.wide), case.fresh(dtype=case.wide)
            start = tuple(slice(0, size) for size in (1,) * (len(shape) - len(small)) + small)
            tensors[i] = _roomy(tensors[i][start].reshape(small), shape)
            full[i] = tensors[i].expand(shape).contiguous()
            case.trying(f"{case.names[i]} of shape {list(small)}")
            what = f"{case.names[i]} of shape {list(small)} is broadcast to {list(shape)}"
            try:
                if differs(case.outputs(tensors), case.outputs(full)):
                    continue  # it does not broadcast
            except Exception:
                continue
            expected = _pull(case, full, case.wanted)
            if expected[at] is not None:
                expected[at] = expected[at].sum_to_size(small)
            try:
                got = _pull(case, tensors, case.wanted)
            except Exception as error:
                if refused(error):
                    continue
                case.fail(f"{what}, and backward raised {all_lines(error)}", remedy)
            if wrong := unlike_gradients(case.asked, got, expected, coarse=0 if case.wide else 1e-3):
                case.fail(f"{what}, and {wrong}, which the sum over the broadcast dimensions gives", remedy)
            found.append(f"{case.names[i]} {list(small)}")
    if not found:
        skip("it does not broadcast")
    return ", ".join(found)


# ---- saved tensors ----


class _Made(TorchDispatchMode):
    """Collects the memory that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[StorageWeakRef, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.layout == torch.strided and x.numel() > 2:  # not a seed or a scale
                self.tensors.append(_memory(x, f"a {dtype_name(x.dtype)} tensor of shape {list(x.shape)}"))
        return out


def _memory(x: Tensor, name: str) -> tuple[StorageWeakRef, str]:
    return StorageWeakRef(x.untyped_storage()), name


def _kept(case: Case, tensors: list[Tensor], grad: bool = True) -> tuple[list[str], dict[str, Tensor]]:
    """What stays alive in the graph of a call besides what saved_tensors_hooks take out of it.

    Returns:
        The names of inputs and outputs, and other tensors that the call computed, as bytes.
    """
    if case.device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(case.device)
    enabled, made = gc.isenabled(), _Made()
    gc.disable()  # a collection would free a reference cycle
    try:
        with made, torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x), torch.set_grad_enabled(grad):
            inputs = [x.requires_grad_().clone() if flag else x for x, flag in zip(tensors, case.wanted, strict=True)]
            named = [_memory(x, name) for x, name in zip(inputs, case.names, strict=True)]
            outs = list(case.run(*inputs))
        named += [_memory(out, f"output {k}") for k, out in enumerate(outs) if out.layout == torch.strided]
        nodes = [out.grad_fn for out in outs]
        tensors.clear()
        del inputs, outs
        known = {memory.cdata for memory, _ in named}
        others = {memory.cdata: (memory, name) for memory, name in made.tensors if memory.cdata not in known}
        names = [name for memory, name in named if not memory.expired()]
        others = {name: memory for memory, name in others.values() if not memory.expired()}
        contents = {name: _bytes(memory, case) for name, memory in others.items()}
        del nodes
        return names, {name: held for name, held in contents.items() if others[name].expired()}
    finally:
        if enabled:
            gc.enable()


def _bytes(memory: StorageWeakRef, case: Case) -> Tensor:
    storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    return torch.empty(0, dtype=torch.uint8, device=case.device).set_(storage).cpu().clone()


def _other(x: Tensor) -> Tensor:
    """Other values; the same integers in another order, because they may be indices."""
    return -3 * x - 1 if has_numbers(x) else reversed_in(x)


def saved_tensors(case: Case) -> str | None:
    """What its backward needs is saved with save_for_backward."""
    expected = _steady(case)
    remedy = (
        "save tensors with ctx.save_for_backward(…) (in C++ ctx->save_for_backward({…})) as they are, without detach() "
        "through .data; not as attributes of ctx, in saved_data, in a closure or in a global"
    )
    unseen = "saved_tensors_hooks, checkpointing and offloading do not see it"
    kept, computed = _kept(case, case.fresh())
    cached, _ = _kept(case, case.fresh(), grad=False)
    kept = [name for name in kept if name not in cached]
    if name := next((name for name in kept if name.startswith("output ")), ""):
        case.fail(
            f"it keeps {name} for backward without save_for_backward: the output and its graph refer to each other, so their "
            f"memory leaks, and {unseen}",
            remedy,
        )
    if computed:
        _, again = _kept(case, [_other(x) if has_numbers(x) else x for x in case.fresh()])
        for name, held in computed.items():
            if name in again and not torch.equal(held, again[name]):
                case.fail(f"it keeps {name} for backward without save_for_backward, so {unseen}", remedy)
    changes: dict[str, Callable[[list[Tensor], Sequence[Tensor]], Any]] = {}
    for i, name in enumerate(case.names):
        changes[f"changing {name} in place"] = lambda tensors, outs, i=i: tensors[i].copy_(_other(tensors[i]))
    for k in range(len(case.expected)):
        changes[f"changing output {k} in place"] = lambda tensors, outs, k=k: outs[k].copy_(_other(outs[k]))
    changes["another call, of other values,"] = lambda tensors, outs: case.run(*case.leaf(map(_other, tensors)))
    for what, change in changes.items():
        tensors = case.fresh()

        def between(outs: Sequence[Tensor], change: Any = change, tensors: list[Tensor] = tensors) -> None:
            with torch.set_grad_enabled("another" in what):  # noqa: B023 -- it is called in this turn of the loop
                change(tensors, outs)

        try:
            got = _pull(case, tensors, case.wanted, between=between)
        except Exception:  # such as PyTorch's error for a saved tensor that was modified
            continue
        if wrong := unlike_gradients(case.asked, got, expected):
            case.fail(f"after {what} between forward and backward, without an error, {wrong}", remedy)
    if kept:
        case.warn(
            f"it keeps {kept[0]} for backward without save_for_backward, which holds its memory; {unseen}",
            "keep only what backward needs, such as x.shape; " + remedy,
        )
    return None
