"""Compares compiled graphs at their boundaries: what a graph returns and writes, and the gradients from its backward.

Dynamo's graph runs eagerly on the reference device, from copies of the compiled graph's inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from openreg_tools.compare.copies import tensors_of
from openreg_tools.compare.result import Difference
from openreg_tools.compare.tolerance import Tolerance, largest, measure, ulp
from openreg_tools.places import Place, site, stack
from openreg_tools.samples import shown

if TYPE_CHECKING:
    from openreg_tools.compare.lockstep import Lockstep

__all__ = ["Regions"]

_TORCH = os.path.dirname(torch.__file__) + os.sep


class Regions:
    """While active, graphs that `torch.compile` compiles are compared. Functions that were already compiled compile
    again."""

    def __init__(self, mode: Lockstep) -> None:
        self.mode, self.count, self.active = mode, 0, False
        self.running: _Region | None = None  # whose backward runs

    def __enter__(self) -> None:
        from torch._dynamo.output_graph import OutputGraph

        torch._dynamo.reset()
        self._owner, self._before = OutputGraph, OutputGraph.call_user_compiler
        before, regions = self._before, self

        def call_user_compiler(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            if not regions.active:
                return before(self, gm, *args, **kwargs)
            from torch._inductor import config

            code = getattr(getattr(self, "root_tx", None), "f_code", None)
            region = _Region(regions, _copied(gm), code)
            with config.patch(fallback_random=True):  # draw the same numbers as eager operators
                region.compiled = before(self, gm, *args, **kwargs)
            return region

        OutputGraph.call_user_compiler = call_user_compiler
        self.active = True

    def __exit__(self) -> None:
        self.active = False
        self._owner.call_user_compiler = self._before


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph before a backend changes it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


class _Reference(fx.Interpreter):
    """Runs a graph on the reference device: references to the other device mean this one."""

    def __init__(self, module: fx.GraphModule, kind: str, device: torch.device) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.kind, self.device = kind, device

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return value.detach().to(self.device) if isinstance(value, Tensor) else value

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("call_function", "call_method"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            args = tuple(self._here(value) for value in args)
            return getattr(self, n.op)(n.target, args, {name: self._here(value) for name, value in kwargs.items()})
        return super().run_node(n)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == self.kind:
            return self.device
        if isinstance(value, str) and value.partition(":")[0] == self.kind:
            return self.device.type
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self._here(each) for each in value) if type(value) in (list, tuple) else value
        return value


class _Region:
    """One compiled graph, replacing the backend's result."""

    def __init__(self, regions: Regions, graph: fx.GraphModule, code: Any) -> None:
        self.regions, self.mode, self.graph = regions, regions.mode, graph
        self.compiled: Callable[..., Any] = graph
        self.ops = sum(node.op.startswith("call") for node in graph.graph.nodes)
        name = (
            code.co_name
            if code and not code.co_filename.startswith(_TORCH)
            else self.mode.places.module() or "a module"
        )
        self.name = f"compiled graph {regions.count} of {name} ({self.ops} operators)"
        regions.count += 1
        self.random = any("dropout" in str(n.target) or "rand" in str(n.target) or "bernoulli" in str(n.target)
                          for n in graph.graph.nodes)  # fmt: skip

    def __call__(self, *args: Any) -> Any:
        if not self.regions.active:
            return self.compiled(*args)
        with self.mode.turn:
            return self._both(args)

    def _both(self, args: tuple[Any, ...]) -> Any:
        mode, result = self.mode, self.mode.result
        index, place = result.count(), Place(mode.places.module(), site(), "forward")
        given = Given([shown(value) for value in args], _terms(args), _autocast(mode.type))
        with mode.quiet(), torch.inference_mode(False):  # inference tensors do not count what is written to them
            copies = self._copies(args)
            kept = [_kept(copy) for copy in copies]
            device = next((t.device for t in tensors_of(args) if t.device.type == mode.type), None)
            state = mode.state_of(device) if device is not None else None
        if device is None:
            return self.compiled(*args)
        try:
            with mode.inside_region():
                out = self.compiled(*args)
            with mode.quiet():
                mode._synchronize()
        except Exception as error:
            self.failed(index, place, given, error)
            raise
        for tensor in tensors_of(args):
            mode.copies.forget(tensor.untyped_storage())
        expected = self._run(copies, state, given)
        if expected is None:
            return out
        kept = [copy if each is None and copy._version == 0 else each for copy, each in zip(copies, kept, strict=True)]
        self._compare_all(index, place, given, args, copies, kept, out, expected)
        if torch.is_grad_enabled():
            self._follow(index, given, args, copies, kept, out, expected)
        return out

    def _copies(self, args: Any) -> list[Any]:
        memo: dict[int, Tensor] = {}
        copies = []
        for value in args:
            if not isinstance(value, Tensor):
                copies.append(value)
                continue
            storage = value.untyped_storage()
            flat = memo.get(storage._cdata)
            if flat is None:
                flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
                flat = memo[storage._cdata] = flat.to(self.mode.reference, copy=True)
            x = torch.empty(0, dtype=value.dtype, device=flat.device)
            copies.append(x.set_(flat.untyped_storage(), value.storage_offset(), value.shape, value.stride()))
        for value, copy in zip(args, copies, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                copy.requires_grad_()
        return copies

    def _run(self, copies: list[Any], state: Tensor | None, given: Given) -> Any:
        """The results of the reference, or None."""
        mode = self.mode
        try:
            with torch._C._DisableTorchDispatch(), mode.own_work(), mode.drawing(state), given.casts(mode.reference):
                return _Reference(self.graph, mode.type, mode.reference).run(*copies)
        except Exception as error:
            mode.result.skipped.setdefault(self.name, f"{mode.reference} raised {type(error).__name__}: {error}")
            return None

    def _compare_all(
        self, index: int, place: Place, given: Given, args: Any, copies: list[Any], kept: list[Any], out: Any,
        expected: Any,
    ) -> None:  # fmt: skip
        row = self.mode.result.row(self.name)
        row.calls += 1
        row.compared += 1
        outs = list(zip(tensors_of(_listed(out)), tensors_of(_listed(expected)), strict=False))
        pairs = [(f"result {i}", got, want) for i, (got, want) in enumerate(outs)]
        pairs += [
            (f"argument {i}", value, copy)
            for i, (value, copy) in enumerate(zip(args, copies, strict=True))
            if isinstance(value, Tensor) and copy._version > 0
        ]
        for k, (what, got, want) in enumerate(pairs):
            result = k if k < len(outs) else None
            moves = functools.partial(self._moves, given, copies, kept, result)
            self.judge(index, place, given, what, got, want, moves)

    def judge(
        self,
        index: int,
        place: Place,
        given: Given,
        what: str,
        tensor: Tensor,
        want: Tensor,
        moves: Callable[[], float],
    ) -> None:
        mode = self.mode
        with mode.lock, mode.quiet():
            want = want.detach()
            if given.cast and tensor.is_floating_point() and want.is_floating_point():
                want = want.to(tensor.dtype)  # autocast has other lists of operators on each device
            if tensor.shape != want.shape or tensor.dtype != want.dtype:
                self._add(
                    index, place, given, what, None, None, f"is {shown(tensor)}, and {shown(want)} on {mode.reference}"
                )
                return
            got = tensor.detach().to(mode.reference, copy=True)
            if tensor.layout != torch.strided or torch.equal(got, want):
                return
            exact = not (want.is_floating_point() or want.is_complex())
            ulps = (
                0.0
                if exact
                else (32 * math.sqrt(max(1, self.ops)) + math.sqrt(given.terms) / 2) * mode.tolerances.factor
            )
            if given.cast and not exact:
                ulps *= max(1.0, torch.finfo(given.cast).eps / torch.finfo(want.dtype).eps)
            error = measure(got, want, "exact" if exact else "chain", largest([want]), ulps)
            if error is None:
                return
        if error.ulps > ulps and not (exact or self.random):
            ulps = max(ulps, 32 * moves())
        tolerance = Tolerance("exact" if exact else "chain", ulps, self.ops)
        with mode.lock, mode.quiet():
            row = mode.result.row(self.name)
            row.add(error, tolerance)
            mode.result.point(index, error.ulps, ulps, self.name)
            if error.ulps > ulps:
                if self.random:
                    mode.result.note(
                        f"{self.name} draws random numbers and its results differ, which does not count as a difference"
                    )
                else:
                    self._add(index, place, given, what, error, tolerance, "", shown(got))

    def _moves(
        self, given: Given, copies: list[Any], kept: list[Any], result: int | None, of: Tensor | None = None,
        seeds: dict[int, Tensor] | None = None,
    ) -> float:  # fmt: skip
        """By how many ulps a result of the reference, or with `seeds` the gradient of an input, moves if each input changes
        in its last bit: a difference of two equal numbers, such as the gradient of a bias before a batch norm, is
        rounding alone. Most of the elements that move do so by more: a few may jump, as floor() does."""
        if (result is None and seeds is None) or any(each is None for each in kept):
            return 0.0
        found = []
        with contextlib.suppress(Exception):
            for last_bit in (0.0, 1.0):
                inputs = [_nearby(value, last_bit) for value in kept]
                with (
                    torch._C._DisableTorchDispatch(), self.mode.own_work(), torch.set_grad_enabled(seeds is not None),
                    given.casts(self.mode.reference),
                ):  # fmt: skip
                    out = _Reference(self.graph, self.mode.type, self.mode.reference).run(*inputs)
                    out = [*tensors_of(_listed(out))]
                    if seeds is None:
                        found.append(out[result].detach())
                        continue
                    of_input = inputs[next(i for i, each in enumerate(copies) if each is of)]
                    nearby = [_nearby(grad, last_bit) for grad in seeds.values()]
                    found.append(torch.autograd.grad([out[k] for k in seeds], [of_input], nearby)[0])
            base = found[0].abs().max().to(torch.float64)
            moved = (found[1].to(torch.float64) - found[0].to(torch.float64)).abs()
            moved = moved[moved > 0].sort().values
            if len(moved) and bool(moved.isfinite().all()):
                return float(moved[len(moved) // 4] / ulp(base, found[0].dtype))
        return 0.0

    def failed(self, index: int, place: Place, given: Given, error: BaseException) -> None:
        if not getattr(error, "_compared", False):
            line = (str(error).splitlines() or [""])[0]
            self.mode.result.row(self.name).calls += 1
            self._add(index, place, given, "the call", None, None, f"raised {type(error).__name__}: {line}")
            error._compared = True

    def _add(
        self,
        index: int,
        place: Place,
        given: Given,
        what: str,
        error: Any,
        tolerance: Any,
        found: str,
        result: str = "",
    ) -> None:
        mode = self.mode
        difference = Difference(
            index, self.name, what, place, given.inputs, error, tolerance, found, mode.type, str(mode.reference), result,
            stack() if place.phase == "forward" else [],
        )  # fmt: skip
        mode.result.row(self.name).beyond += 1
        mode.result.add(difference)

    # ---- backward ----

    def _follow(
        self, index: int, given: Given, args: Any, copies: list[Any], kept: list[Any], out: Any, expected: Any
    ) -> None:
        """Compare the gradients of the inputs when the graph's backward has run. What the hooks hold must not lead to the
        node: nobody could free that cycle."""
        both = enumerate(zip(tensors_of(_listed(out)), tensors_of(_listed(expected)), strict=False))
        outs = {k: (t, e) for k, (t, e) in both if t.requires_grad and e.requires_grad}
        node = next((n for t, _ in outs.values() if (n := _compiled_node(t.grad_fn)) is not None), None)
        if node is None:
            return
        wanted_outs = {k: e for k, (_, e) in outs.items()}
        grads: dict[int, Tensor] = {}

        def keep(grad: Tensor | None, k: int) -> None:
            if grad is not None:
                grads[k] = grad.detach()

        for k, (t, _) in outs.items():
            t.register_hook(functools.partial(keep, k=k))
        edges = {}
        for value, copy in zip(args, copies, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(value)
                edges[edge.node, edge.output_nr] = copy
        inputs = [(i, edges[edge]) for i, edge in enumerate(node.next_functions) if edge in edges]
        place = Place(self.mode.places.module(), site(), "backward", "CompiledFunction")

        def begin(_: Any) -> None:
            self.regions.running = self
            self.where = index, place, given
            self.mode.copies.keeping = False

        def end(gradients: Any, _: Any) -> None:
            self.regions.running = None
            self.mode.copies.keeping = True
            try:
                with self.mode.quiet():
                    self.mode._synchronize()
            except Exception as error:
                self.failed(index, place, given, error)
                raise
            wanted = [(i, gradients[i], copy) for i, copy in inputs if isinstance(gradients[i], Tensor)]
            with torch._C._DisableTorchDispatch(), self.mode.own_work(), torch.enable_grad():
                seeds = {k: grad.to(self.mode.reference) for k, grad in grads.items()}
                seeds = {k: grad.to(wanted_outs[k].dtype) for k, grad in seeds.items()}
                expected = torch.autograd.grad(
                    [wanted_outs[k] for k in seeds],
                    [copy for _, _, copy in wanted],
                    list(seeds.values()),
                    allow_unused=True,
                    retain_graph=True,  # the program may go backward again
                )
            grads.clear()
            for (i, gradient, copy), want in zip(wanted, expected, strict=True):
                if want is not None:
                    moves = functools.partial(self._moves, given, copies, kept, None, copy, seeds)
                    self.judge(self.mode.result.count(), place, given, f"gradient {i}", gradient, want, moves)

        node.register_prehook(begin)
        node.register_hook(end)


@dataclasses.dataclass
class Given:
    """What a report says of a graph's arguments, without holding them."""

    inputs: list[str]
    terms: int  # of the longest sum
    cast: torch.dtype | None  # of autocast on the device, where the graph runs in it

    def casts(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, self.cast) if self.cast else contextlib.nullcontext()


def _terms(args: Any) -> int:
    return max((t.numel() // max(1, min(t.shape, default=1)) for t in tensors_of(args)), default=1)


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _kept(copy: Any) -> Any:
    """A copy of what the graph may write, if it is small; None if it is large, and so only there if nothing writes it."""
    if not isinstance(copy, Tensor) or copy.requires_grad:
        return copy
    return copy.clone() if copy.nbytes <= 1 << 20 else None


def _nearby(value: Any, last_bit: float) -> Any:
    """A copy of an input; with `last_bit` 1, of which the last bits have changed."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    if copy.is_floating_point() and last_bit:
        signs = torch.arange(copy.numel(), device=copy.device).mul_(2654435761).bitwise_right_shift_(13).remainder_(2)
        copy = copy * (1 + torch.finfo(copy.dtype).eps * (2 * signs.reshape(copy.shape).to(copy.dtype) - 1))
    return copy.requires_grad_(value.requires_grad)


def _listed(out: Any) -> Any:
    return out if isinstance(out, (list, tuple)) else (out,)


def _compiled_node(node: Any, depth: int = 4) -> Any:
    """The node of AOTAutograd's function, looking through views of its results."""
    while node is not None and depth:
        if "CompiledFunction" in node.name():
            return node
        node = node.next_functions[0][0] if node.next_functions else None
        depth -= 1
    return None
