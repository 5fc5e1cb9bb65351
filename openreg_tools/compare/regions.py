"""Compares compiled graphs: what each returns and writes, forward and backward.

A graph that AOTAutograd gives to a compiler runs on the reference device too, operator by operator, from copies of what the
compiled code gets. For a backend without AOTAutograd, that is Dynamo's graph, and only the forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from openreg_tools.compare.copies import copied, tensors_of
from openreg_tools.compare.lockstep import DEVICE_ERRORS, Lockstep, tracing
from openreg_tools.compare.result import Difference
from openreg_tools.compare.tolerance import Tolerance, largest, measure, ulp
from openreg_tools.places import Place, stack
from openreg_tools.samples import shown

__all__ = ["Regions"]

_TORCH = os.path.dirname(torch.__file__) + os.sep


class Regions:
    """While active, graphs that `torch.compile` compiles are compared. Functions that were already compiled compile
    again."""

    def __init__(self, mode: Lockstep) -> None:
        self.mode, self.count, self.active = mode, 0, False
        self._local = threading.local()

    @property
    def lowered(self) -> int:
        """How many graphs AOTAutograd gave to a compiler in this thread."""
        return getattr(self._local, "lowered", 0)

    def __enter__(self) -> None:
        import torch._functorch.aot_autograd as aot
        from torch._dynamo.output_graph import OutputGraph

        torch._dynamo.reset()
        self._replaced = [(OutputGraph, "call_user_compiler", OutputGraph.call_user_compiler),
                          (aot, "aot_stage2_compile", aot.aot_stage2_compile)]  # fmt: skip
        regions, (compile_graph, lower) = self, [each[2] for each in self._replaced]

        @functools.wraps(compile_graph)
        def call_user_compiler(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            if not regions.active:
                return compile_graph(self, gm, *args, **kwargs)
            name = regions._name(getattr(getattr(self, "root_tx", None), "f_code", None))
            region = _Region(regions, gm, name)
            before = regions.lowered
            try:
                with _configured():
                    region.compiled = compile_graph(self, gm, *args, **kwargs)
            finally:
                regions._local.name = ""
            return region.compiled if regions.lowered > before else region

        @functools.wraps(lower)
        def aot_stage2_compile(*args: Any, **kwargs: Any) -> Any:
            if not regions.active:
                return lower(*args, **kwargs)
            name = getattr(regions._local, "name", "") or regions._name(None)
            if torch._functorch.config.bundled_autograd_cache:
                regions.mode.result.skipped.setdefault(name, "it is compiled ahead of time, into a file")
                return lower(*args, **kwargs)
            given = inspect.signature(lower).bind(*args, **kwargs)
            regions._local.lowered, regions._local.part = regions.lowered + 1, regions._local.part + 1
            if regions._local.part > 1:  # DistributedDataParallel makes one for each of its buckets
                name = f"{name}, part {regions._local.part}"
            forward = given.arguments["fw_compiler"]
            for which, backward in (("fw_compiler", False), ("bw_compiler", True), ("inference_compiler", False)):
                compiler = given.arguments.get(which) or forward
                given.arguments[which] = functools.partial(regions._lowered, compiler, name, backward)
            return lower(*given.args, **given.kwargs)

        for (owner, name, _), function in zip(self._replaced, (call_user_compiler, aot_stage2_compile), strict=True):
            setattr(owner, name, function)
        self.active = True

    def __exit__(self) -> None:
        self.active = False
        if self.count:
            torch._dynamo.reset()  # the program compiles again, with its own settings
        for owner, name, function in self._replaced:
            setattr(owner, name, function)

    def _name(self, code: Any) -> str:
        """The name of the next graph that Dynamo compiles."""
        ours = code is None or code.co_filename.startswith(_TORCH)
        of = (self.mode.places.module() or "a module") if ours else code.co_name
        self._local.name, self._local.part = f"compiled graph {self.count} of {of}", 0
        self.count += 1
        return self._local.name

    def _lowered(self, compiler: Any, name: str, backward: bool, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Compile a graph of AOTAutograd's."""
        region = _Region(self, gm, name, backward)
        with _configured():
            region.compiled = compiler(gm, *args, **kwargs)
        boxed = getattr(region.compiled, "_boxed_call", False)

        def run(args: list[Any]) -> Any:
            return region.both(args, lambda: region.compiled(args) if boxed else region.compiled(*args))

        run._boxed_call = True
        return run


@contextlib.contextmanager
def _configured() -> Iterator[None]:
    """Random numbers are those of eager operators, and no graph comes from a cache, which would skip its compiler."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with inductor.patch(fallback_random=True), functorch.patch(
        enable_autograd_cache=False, enable_remote_autograd_cache=False
    ):  # fmt: skip
        yield


class _Region:
    """One compiled graph."""

    def __init__(self, regions: Regions, gm: fx.GraphModule, name: str, backward: bool = False) -> None:
        self.regions, self.mode, self.backward = regions, regions.mode, backward
        self.graph, self.held = _on_reference(gm, self.mode.type, self.mode.reference)
        self.compiled: Callable[..., Any] = gm
        self.whole = True
        nodes = [n for each in self.graph.modules() if isinstance(each, fx.GraphModule) for n in each.graph.nodes]
        values = [(n, t) for n in nodes for t in _values(n)]
        self.ops = sum(node.op.startswith("call") for node in self.graph.graph.nodes)
        self.name = f"{'backward of ' if backward else ''}{name} ({self.ops} operators)"
        self.device = next((t.device for _, t in values if t.device.type == self.mode.type), None)
        # Numbers that the reference does not draw, or draws from the state of the other device's generator.
        self.random = any(_draws(n) and (not self.mode._draws or t.device.type != self.mode.type) for n, t in values)
        self.undefined = any("empty" in str(n.target) for n in nodes)
        self.collective = any("c10d" in str(n.target) for n in nodes)
        self.coarsest = max((torch.finfo(t.dtype).eps for _, t in values if t.is_floating_point()), default=0.0)

    def __call__(self, *args: Any) -> Any:
        """In place of what a backend without AOTAutograd returned."""
        if not self.whole:
            return self.compiled(*args)
        before = self.regions.lowered
        out = self.both([*args], lambda: self.compiled(*args))
        self.whole = self.regions.lowered == before  # else AOTAutograd compiled in the call: its graphs are compared
        return out

    def both(self, args: list[Any], call: Callable[[], Any]) -> Any:
        """Call the compiled code and compare; it may empty the list of arguments."""
        tensors = [*tensors_of(args), *self.held]
        device = next((t.device for t in tensors if t.device.type == self.mode.type), self.device)
        if not self.regions.active or device is None or tracing(map(type, tensors)):
            return call()
        with self.mode.turn:
            return self._both([*args, *self.held], call, device)

    def _both(self, args: list[Any], call: Callable[[], Any], device: torch.device) -> Any:
        mode = self.mode
        index, place = mode.result.count(), mode.places.now()
        about = Given([shown(value) for value in args], _terms(args), _autocast(mode.type))
        copies: list[Any] | None = None
        try:
            with mode.quiet(), torch.inference_mode(False):  # inference tensors do not count what is written to them
                copies = copied(args, mode.reference)
                kept = [_kept(copy) for copy in copies]
                about.state = mode.state_of(device)
        except (NotImplementedError, RuntimeError) as error:  # a subclass without memory of its own
            mode.result.skipped.setdefault(self.name, f"its arguments cannot be copied: {error}")
        try:
            with mode.inside_region():
                out = call()
            with mode.quiet():
                mode._synchronize()
        except Exception as error:
            if copies is None or not self._raises_too(copies, about, error):
                self._failed(index, place, about, error)
            raise
        for tensor in tensors_of(args):
            if torch._C._has_storage(tensor):
                mode.copies.forget(tensor.untyped_storage())
        if copies is None:
            return out
        versions = [_version(copy) for copy in copies]
        try:
            expected = self._run(copies, about)
        except Exception as error:
            mode.result.skipped.setdefault(self.name, f"{mode.reference} raised {type(error).__name__}: {error}")
            return out
        written = [_version(copy) > version for copy, version in zip(copies, versions, strict=True)]
        whole = zip(copies, kept, written, strict=True)
        kept = [copy if each is None and not writes else each for copy, each, writes in whole]
        self._compare(index, place, about, args, copies, written, kept, out, expected)
        return out

    def _run(self, inputs: list[Any], about: Given, fill: float = 0.0) -> list[Any]:
        """What the graph returns on the reference. Memory that it does not initialize holds `fill`."""
        mode = self.mode
        with (
            _disable_current_modes(), mode.own_work(), mode.drawing(about.state), about.casts(mode.reference),
            torch.no_grad(), torch.inference_mode(False),
        ):  # fmt: skip
            return _listed((_Filled(self.graph, fill).run if self.undefined else self.graph)(*inputs))

    def _raises_too(self, copies: list[Any], about: Given, error: Exception) -> bool:
        """Whether the reference raises as well, because the call itself is wrong."""
        if isinstance(error, DEVICE_ERRORS) or self.collective:
            return False
        try:
            self._run(copies, about)
        except Exception:
            return True
        return False

    def _compare(
        self, index: int, place: Place, about: Given, args: list[Any], copies: list[Any], written: list[bool],
        kept: list[Any], out: Any, expected: list[Any],
    ) -> None:  # fmt: skip
        row = self.mode.result.row(self.name)
        row.calls += 1
        row.compared += 1
        name, outs = "gradient" if self.backward else "result", _listed(out)
        if len(outs) != len(expected):
            found = f"are {len(outs)}, and {len(expected)} on {self.mode.reference}"
            self._add(index, place, about, f"{name}s", None, None, found)
            return
        # Compiled code may use the memory of what the forward saved for the backward again, but not of weights.
        matter = [writes or not self.backward or isinstance(arg, Tensor) and arg.requires_grad
                  for writes, arg in zip(written, args, strict=True)]  # fmt: skip
        pairs = [(f"{name} {i}", True, *both) for i, both in enumerate(zip(outs, expected, strict=True))]
        pairs += [(f"argument {i}", *each) for i, each in enumerate(zip(matter, args, copies, strict=True))]
        for k, (what, matters, got, want) in enumerate(pairs):
            if matters and isinstance(got, Tensor) and isinstance(want, Tensor):
                self._judge(index, place, about, what, got, want, kept, k)
            elif k < len(outs) and _unlike(got, want):
                found = f"is {shown(got)}, and {shown(want)} on {self.mode.reference}"
                self._add(index, place, about, what, None, None, found)

    def _judge(
        self, index: int, place: Place, about: Given, what: str, tensor: Tensor, want: Tensor, kept: list[Any],
        k: int,
    ) -> None:  # fmt: skip
        mode = self.mode
        with mode.lock, mode.quiet():
            want = want.detach()
            if about.cast and tensor.is_floating_point() and want.is_floating_point():
                want = want.to(tensor.dtype)  # autocast has other lists of operators on each device
            if tensor.shape != want.shape or tensor.dtype != want.dtype:
                found = f"is {shown(tensor)}, and {shown(want)} on {mode.reference}"
                self._add(index, place, about, what, None, None, found)
                return
            if tensor.layout != torch.strided or want.layout != torch.strided:
                return
            got = tensor.detach().to(mode.reference, copy=True)
            if torch.equal(got, want):
                return
            if self.undefined and (undefined := self._changes(about, kept, k, fill=1.0)) is not None:
                got = torch.where(undefined[0] != undefined[1], want, got)
            exact = not (want.is_floating_point() or want.is_complex())
            ulps = (32 * math.sqrt(max(1, self.ops)) + math.sqrt(about.terms) / 2) * mode.tolerances.factor
            if not exact:
                eps = max(self.coarsest, torch.finfo(about.cast).eps if about.cast else 0.0)
                if eps > torch.finfo(want.dtype).eps:
                    ulps += 4 * math.sqrt(max(1, self.ops)) * mode.tolerances.factor * eps / torch.finfo(want.dtype).eps
            error = measure(got, want, "exact" if exact else "chain", largest([want]), 0.0 if exact else ulps)
            if error is None:
                return
        if exact:
            ulps = 0.0
            changes = self._changes(about, kept, k, last_bit=1.0)
            if changes is not None and int((got != want).sum()) <= 4 * int((changes[0] != changes[1]).sum()):
                return  # such as the mask of a relu whose input is rounding alone
        elif error.ulps > ulps and not self.random:
            ulps *= max(1.0, self._moves(about, kept, k))
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
                    self._add(index, place, about, what, error, tolerance, "", shown(got))

    def _changes(
        self, about: Given, kept: list[Any], k: int, last_bit: float = 0.0, fill: float = 0.0
    ) -> tuple[Tensor, Tensor] | None:
        """Result k of the reference, or an argument that it writes, and the same with the last bit of each input changed or
        with other uninitialized memory; None if the graph cannot run again."""
        if self.collective or any(each is None for each in kept):  # the other ranks do not join in
            return None
        found = []
        with contextlib.suppress(Exception):
            for how in ((0.0, 0.0), (last_bit, fill)):
                inputs = [_nearby(value, how[0]) for value in kept]
                found.append([*self._run(inputs, about, how[1]), *inputs][k].detach())
            return found[0], found[1]
        return None

    def _moves(self, about: Given, kept: list[Any], k: int) -> float:
        """By how many ulps a result moves if each input changes in its last bit: a difference of two equal numbers, such as
        the gradient of a bias before a batch norm, is rounding alone. Most of the elements that move do so by more: some may
        jump, as floor() does, and some may be exact."""
        if (changes := self._changes(about, kept, k, last_bit=1.0)) is None or not changes[0].numel():
            return 0.0
        base = changes[0].abs().max().to(torch.float64)
        moved = (changes[1].to(torch.float64) - changes[0].to(torch.float64)).abs()
        moved = moved[moved > 0].sort().values
        if len(moved) and bool(moved.isfinite().all()):
            return float(moved[len(moved) * 2 // 5] / ulp(base, changes[0].dtype))
        return 0.0

    def _failed(self, index: int, place: Place, about: Given, error: BaseException) -> None:
        if not getattr(error, "_compared", False):
            line = (str(error).splitlines() or [""])[0]
            self.mode.result.row(self.name).calls += 1
            self._add(index, place, about, "the call", None, None, f"raised {type(error).__name__}: {line}")
            error._compared = True

    def _add(
        self, index: int, place: Place, about: Given, what: str, error: Any, tolerance: Any, found: str, result: str = ""
    ) -> None:  # fmt: skip
        mode = self.mode
        difference = Difference(
            index, self.name, what, place, about.inputs, error, tolerance, found, mode.type, str(mode.reference), result,
            stack() if place.phase == "forward" else [],
        )  # fmt: skip
        mode.result.row(self.name).beyond += 1
        mode.result.add(difference)


@dataclasses.dataclass
class Given:
    """What a report says of a graph's arguments, without holding them."""

    inputs: list[str]
    terms: int  # of the longest sum
    cast: torch.dtype | None  # of autocast on the device, where the graph runs in it
    state: Tensor | None = None  # of the device's generator before the call, where the reference can draw from it

    def casts(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, self.cast) if self.cast else contextlib.nullcontext()


# ---- a graph on the reference ----


def _on_reference(gm: fx.GraphModule, kind: str, reference: torch.device) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a graph that names the reference device where the graph names the other, and the tensors that the graph
    holds, which the copy takes as further arguments."""

    def here(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == kind:
            return reference
        if isinstance(value, str) and value.partition(":")[0] == kind:
            return reference.type
        return value

    def copy(module: fx.GraphModule, held: list[Tensor] | None) -> fx.GraphModule:
        graph, attributes = fx.Graph(), {}
        graph.output(graph.graph_copy(module.graph, {}))
        last = next(node for node in graph.nodes if node.op != "placeholder").prev
        for node in graph.nodes:
            node.args, node.kwargs = (map_aggregate(each, here) for each in (node.args, node.kwargs))
            if node.op == "call_module":
                attributes[node.target] = module.get_submodule(node.target)
            if node.op != "get_attr":
                continue
            value = functools.reduce(getattr, node.target.split("."), module)
            if isinstance(value, fx.GraphModule):  # a branch of torch.cond, for example
                attributes[node.target] = copy(value, None)
            elif isinstance(value, Tensor) and held is not None:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"held_{len(held)}")
                node.replace_all_uses_with(last)
                graph.erase_node(node)
                held.append(value)
            else:
                attributes[node.target] = value.detach().to(reference) if isinstance(value, Tensor) else value
        return fx.GraphModule(attributes, graph)

    held: list[Tensor] = []
    with _disable_current_modes():
        return copy(gm, held), held


class _Filled(fx.Interpreter):
    """Runs a graph and fills what it leaves uninitialized."""

    def __init__(self, module: fx.GraphModule, fill: float) -> None:
        super().__init__(module)
        self.fill = fill

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        return out.fill_(self.fill) if "empty" in str(n.target) and isinstance(out, Tensor) else out


_RANDOM = ("dropout", "rand", "bernoulli", "normal_", "multinomial", "uniform", "exponential", "poisson", "cauchy",
           "geometric", "rrelu", "binomial", "rng", "gumbel", "attention")  # fmt: skip


def _draws(node: fx.Node) -> bool:
    """Whether a node may draw random numbers: a tag says so of operators, and the name of other functions."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return node.op.startswith("call") and any(each in str(node.target) for each in _RANDOM)


def _unlike(got: Any, want: Any) -> bool:
    """Whether results are numbers that are not equal, or one alone is a tensor."""
    if isinstance(got, Tensor) or isinstance(want, Tensor):
        return not (isinstance(got, Tensor) and isinstance(want, Tensor))
    numbers = (bool, int, float, complex)
    return isinstance(got, numbers) and isinstance(want, numbers) and got != want and not (got != got and want != want)


def _values(node: fx.Node) -> Iterator[Tensor]:
    """The fake tensors that a node stands for."""
    return tensors_of((node.meta.get("val", node.meta.get("example_value")),))


def _terms(args: Any) -> int:
    return max((t.numel() // max(1, min(t.shape, default=1)) for t in tensors_of(args)), default=1)


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _version(copy: Any) -> int:
    return copy._version if isinstance(copy, Tensor) else 0


def _kept(copy: Any) -> Any:
    """A copy of what the graph may write, if it is small; None if it is large, and so only there if nothing writes it."""
    if not isinstance(copy, Tensor):
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
    return copy


def _listed(out: Any) -> list[Any]:
    return [*out] if isinstance(out, (list, tuple)) else [out]
