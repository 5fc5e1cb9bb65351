"""Checks of backward as programs call it: gradients in any layout, frozen and broadcast arguments, saved tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.check.case import Case, Cotangents, cotangents, pull, refuse, skip, unlike_gradients
from openreg_tools.check.checks.common import needs_derivative, needs_order, only_verdicts, refused
from openreg_tools.check.checks.fakes import faking, unlike_fake
from openreg_tools.check.checks.writes import storage_of
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import differs, has_numbers
from openreg_tools.core.samples import dtype_name
from openreg_tools.core.variations import channels_last, padded, permuted, reversed_in, stepped, unaligned


class _FakesCompared(TorchDispatchMode):
    """Compares each custom operator that is called with its fake kernel."""

    wrong = ""  # the first difference

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wrong or func.namespace in ("aten", "prim", "prims"):
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with faking() as mode:  # before the kernel, which may write to them
            fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs))
        out = func(*args, **kwargs)
        with contextlib.suppress(Exception), faking(mode):  # `compile` reports what the fake kernel raises
            outs, said = tree_leaves(out), tree_leaves(func(*fakes[0], **fakes[1]))
            outs, said = ([x for x in values if isinstance(x, Tensor)] for values in (outs, said))
            if wrong := unlike_fake(outs, said, memory=True, name=func.name().removesuffix(".default")):
                self.wrong = f"{wrong} (given {', '.join(f'{list(x.shape)} of strides {x.stride()}' for x in tensors)})"
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
    given: Cotangents = cotangents,
    between: Callable[[Sequence[Tensor]], None] = lambda outs: None,
    fakes: _FakesCompared | None = None,
) -> list[Tensor | None]:
    """The gradients of the wanted tensors.

    Args:
        between: called with the outputs before backward.
        fakes: a mode for the backward.
    """
    tensors = [x.detach().requires_grad_(flag) for x, flag in zip(tensors, wanted, strict=True)]
    outs = case.run(*tensors)
    between(outs)
    with fakes or contextlib.nullcontext():
        return pull(outs, tensors, given)


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


# The gradients that programs send, and how many dimensions each needs.
_ARRIVALS: list[tuple[str, int, Callable[[Tensor], Tensor]]] = [
    ("a slice of a wider one, as after cat or split", 0, padded),
    ("transposed", 2, permuted),
    ("a slice along dimension 1", 3, lambda x: torch.cat([-x, x], 1)[:, x.shape[1] :]),
    ("every other element of a longer one", 0, stepped),
    ("a slice with an offset, as after cat along dimension 0", 1, lambda x: torch.cat([-x, x])[len(x) :]),
    ("contiguous, one element into its memory, which is not aligned to 16 bytes", 1, unaligned),
    ("expanded with strides of 0, as after sum()", 1, lambda x: _spread(x, range(x.dim()))),
    ("expanded along dimension 0, as after sum(0)", 2, lambda x: _spread(x, [0])),
    ("expanded along the last dimension, as after sum(-1)", 2, lambda x: _spread(x, [x.dim() - 1])),
    ("channels-last", 4, channels_last),
]


def _arrivals(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gradient x as programs send it."""
    for how, dims, change in _ARRIVALS if x.layout == torch.strided and x.numel() else ():
        if x.dim() >= dims:
            yield how, change(x)


def gradient_layouts(case: Case) -> str | None:
    """The backward reads a gradient that is sliced, transposed, expanded or undefined, and its fake kernels do."""
    whole = _steady(case)
    fakes = _FakesCompared()
    remedy = (
        "gradients arrive with any strides: the backward, or the operator that it calls, must read them by their strides or "
        "start from grad.contiguous()"
    )
    outs = case.run(*case.fresh(grad=True))
    differentiated = [k for k, out in enumerate(outs) if out.requires_grad and has_numbers(out)]
    count = len(differentiated)

    def gradients(k: int, g: Tensor | None, others: bool, fakes: _FakesCompared | None = None) -> list[Tensor | None]:
        """The gradients if output k gets this gradient, and the others theirs, or none."""

        def given(outs: list[Tensor]) -> list[Tensor | None]:
            made = cotangents(outs)
            return [(c if g is None else g) if i == k else c if others else None for i, c in enumerate(made)]

        return _pull(case, case.fresh(), case.wanted, given, fakes=fakes)

    parts = [gradients(k, None, False, fakes) for k in range(count)]
    fakes.report(case, "in its backward")
    if count > 1:
        sums = [sum((g for g in part if g is not None), torch.zeros(())) for part in zip(*parts, strict=True)]
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
        expected = gradients(k, arriving.clone(memory_format=torch.contiguous_format), True)
        which = "the gradient" if count == 1 else f"the gradient of output {differentiated[k]}"
        where = f"{which} is {how} (shape {list(arriving.shape)}, strides {arriving.stride()})"
        try:
            got = gradients(k, arriving, True, fakes)
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


def _attributes(outs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors among the attributes of a graph's nodes, such as those of ctx; what was saved is not among them."""
    nodes, seen, found = [out.grad_fn for out in outs], set(), []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            found += [x for x in tree_leaves(getattr(node, "__dict__", {})) if isinstance(x, Tensor)]
    return found


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
    tensors, others = case.fresh(grad=True), case.leaf(_other(x) if has_numbers(x) else x for x in case.fresh())
    outs = case.run(*tensors)
    names = {storage_of(out): f"output {k}" for k, out in enumerate(outs)}
    names |= {storage_of(x): name for name, x in zip(case.names, tensors, strict=True)}
    names.pop(None, None)  # of tensors without memory
    held, again, kept = _attributes(outs), [], ""
    if any(storage_of(x) not in names for x in held):
        with contextlib.suppress(Exception):  # it may refuse the values
            again = _attributes(case.run(*others))
    for x, other in itertools.zip_longest(held, again[: len(held)]):
        name = names.get(storage_of(x), "")
        if name.startswith("output "):
            case.fail(
                f"it keeps {name} for backward without save_for_backward: the output and its graph refer to each other, so their "
                f"memory leaks, and {unseen}",
                remedy,
            )
        # A table, which depends on no input, may stay, and so may a seed or a scale.
        changed = other is not None and other.shape == x.shape and differs([other], [x], exact=True)
        if not name and changed and x.numel() > 2:
            what = f"a {dtype_name(x.dtype)} tensor of shape {list(x.shape)}"
            case.fail(f"it keeps {what} for backward without save_for_backward, so {unseen}", remedy)
        kept = kept or name
    _changed_between(case, expected, remedy)
    if kept:
        case.warn(
            f"it keeps {kept} for backward without save_for_backward, which holds its memory; {unseen}",
            "keep only what backward needs, such as x.shape; " + remedy,
        )
    return None


def _changed_between(case: Case, expected: list[Tensor | None], remedy: str) -> None:
    """What is changed in place between forward and backward gives PyTorch's error, or the same gradients."""

    def gradients(which: str, at: int = 0) -> list[Tensor | None]:
        tensors = case.fresh()

        def between(outs: Sequence[Tensor]) -> None:
            if which == "call":
                case.run(*case.leaf(map(_other, tensors)))
                return
            with torch.no_grad():
                x = (tensors if which == "input" else outs)[at]
                x.copy_(_other(x))

        return _pull(case, tensors, case.wanted, between=between)

    changes = [(f"changing {name} in place", "input", i) for i, name in enumerate(case.names)]
    changes += [(f"changing output {k} in place", "output", k) for k in range(len(case.expected))]
    for what, which, at in [*changes, ("another call, of other values,", "call", 0)]:
        with only_verdicts():  # no error, such as PyTorch's for a saved tensor that was modified
            got = gradients(which, at)
            if wrong := unlike_gradients(case.asked, got, expected):
                case.fail(f"after {what} between forward and backward, without an error, {wrong}", remedy)
