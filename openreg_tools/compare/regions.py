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
from torch.utils.checkpoint import _StopRecomputationError

from openreg_tools.compare.copies import UNDEFINED, copied, equal, tensors_of
from openreg_tools.compare.lockstep import DEVICE_ERRORS, Lockstep, tracing
from openreg_tools.compare.result import Difference
from openreg_tools.compare.tolerance import Tolerance, largest, measure, ulp
from openreg_tools.core.place import Place, stack
from openreg_tools.samples import shown

__all__ = ["Regions"]

_EMPTY = {name for name in UNDEFINED if "empty" in name}
_SMALL = 1 << 20  # bytes of an argument that is kept from before the call, whether it is written or not
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

        self._reset()
        self._replaced = [(OutputGraph, "call_user_compiler", OutputGraph.call_user_compiler),
                          (aot, "aot_stage2_compile", aot.aot_stage2_compile)]  # fmt: skip
        regions, (compile_graph, lower) = self, [each[2] for each in self._replaced]

        @functools.wraps(compile_graph)
        def call_user_compiler(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            if not regions.active:
                return compile_graph(self, gm, *args, **kwargs)
            name = regions._name(getattr(getattr(self, "root_tx", None), "f_code", None))
            region = regions._region(gm, name)
            before = regions.lowered
            try:
                with _configured():
                    compiled = compile_graph(self, gm, *args, **kwargs)
            finally:
                regions._local.name = ""
            if region is None or regions.lowered > before:
                return compiled
            region.compiled = compiled
            return region

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
            self._reset()  # the program compiles again, with its own settings
        for owner, name, function in self._replaced:
            setattr(owner, name, function)

    def _reset(self) -> None:
        """Let functions compile again, unless the program does not permit it."""
        from torch._dynamo import eval_frame

        if (stance := eval_frame._stance.stance) == "default":
            torch._dynamo.reset()
        else:
            self.mode.result.note(
                f'graphs that were compiled before are not compared, because of set_stance("{stance}")'
            )

    def _region(self, gm: fx.GraphModule, name: str, backward: bool = False) -> _Region | None:
        """None if the reference cannot run the graph."""
        try:
            return _Region(self, gm, name, backward)
        except Exception as error:  # such as a dtype without numbers
            self.mode.result.skipped.setdefault(name, f"it cannot be copied: {type(error).__name__}: {error}")
            return None

    def _name(self, code: Any) -> str:
        """The name of the next graph that Dynamo compiles."""
        ours = code is None or code.co_filename.startswith(_TORCH)
        of = (self.mode.places.module() or "a module") if ours else code.co_name
        self._local.name, self._local.part = f"compiled graph {self.count} of {of}", 0
        self.count += 1
        return self._local.name

    def _lowered(self, compiler: Any, name: str, backward: bool, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Compile a graph of AOTAutograd's."""
        region = self._region(gm, name, backward)
        with _configured():
            compiled = compiler(gm, *args, **kwargs)
        if region is None:
            return compiled
        boxed = getattr(compiled, "_boxed_call", False)

        @torch._dynamo.disable  # the program may call backward() in a function that it compiles
        def run(args: list[Any]) -> Any:
            return region.both(args, lambda: compiled(args) if boxed else compiled(*args))

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
        self.writes: set[int] | None = None  # the arguments that calls have written
        nodes = [n for each in self.graph.modules() if isinstance(each, fx.GraphModule) for n in each.graph.nodes]
        values = [(n, t) for n in nodes for t in _values(n)]
        self.ops = sum(node.op.startswith("call") for node in self.graph.graph.nodes)
        self.name = f"{'backward of ' if backward else ''}{name} ({self.ops} operators)"
        self.device = next((t.device for _, t in values if t.device.type == self.mode.type), None)
        self.drawn = {t.device for n, t in values if _draws(n)}
        # The reference draws the same numbers from the state of one generator only.
        self.random = len(self.drawn) > 1 or bool(self.drawn) and not self.mode._draws
        self.undefined = any(map(_is_undefined, nodes))
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
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            self.mode.result.skipped.setdefault(self.name, "a transform of torch.func calls it")
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
                kept = [self._kept(i, copy) for i, copy in enumerate(copies)]
                about.state = mode.state_of(next(iter(self.drawn), device))
        except (NotImplementedError, RuntimeError) as error:  # a subclass without memory of its own
            mode.result.skipped.setdefault(self.name, f"its arguments cannot be copied: {error}")
        try:
            with mode.inside_region():
                out = call()
            with mode.quiet():
                mode._synchronize()
        except Exception as error:
            expected = isinstance(error, _StopRecomputationError)  # a hook for saved tensors has what it needs
            if not expected and (copies is None or not self._raises_too(copies, about, error)):
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
        self.writes = (self.writes or set()) | {i for i, writes in enumerate(written) if writes}
        whole = zip(copies, kept, written, strict=True)
        kept = [copy if each is None and not writes else each for copy, each, writes in whole]
        again = _Again(self, about, kept, [*expected, *copies])
        try:
            self._compare(index, place, about, args, copies, written, again, out, expected)
        except DEVICE_ERRORS:
            raise
        except Exception as error:  # such as a dtype that the reference cannot compare
            mode.result.skipped.setdefault(
                self.name, f"its results cannot be compared: {type(error).__name__}: {error}"
            )
        return out

    def _kept(self, i: int, copy: Any) -> Any:
        """A copy of an argument that the graph may write; None if it does not, as far as the calls before show."""
        if not isinstance(copy, Tensor):
            return copy
        return copy.clone() if self.writes is None or i in self.writes or copy.nbytes <= _SMALL else None

    def _run(self, inputs: list[Any], about: Given, fill: float = 0.0, each: bool = False) -> list[Any]:
        """What the graph returns on the reference.

        Args:
            fill: what memory that the graph does not initialize holds.
            each: whether the results of each operator change in their last bits.
        """
        mode = self.mode
        with (
            _disable_current_modes(), mode.own_work(), mode.drawing(about.state), about.casts(mode.reference),
            torch.no_grad(), torch.inference_mode(False),
        ):  # fmt: skip
            altered = self.undefined or each
            return _listed((_Altered(self.graph, fill, each).run if altered else self.graph)(*inputs))

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
        again: _Again, out: Any, expected: list[Any],
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
                self._judge(index, place, about, what, got, want, again, k)
            elif k < len(outs) and _unlike(got, want) and not again.differs(k, _unlike):
                found = f"is {shown(got)}, and {shown(want)} on {self.mode.reference}"
                self._add(index, place, about, what, None, None, found)

    def _judge(
        self, index: int, place: Place, about: Given, what: str, tensor: Tensor, want: Tensor, again: _Again, k: int
    ) -> None:  # fmt: skip
        mode = self.mode
        with mode.lock, mode.quiet():
            want = want.detach()
            if about.cast and tensor.is_floating_point() and want.is_floating_point():
                want = want.to(tensor.dtype)  # autocast has other lists of operators on each device
            if tensor.shape != want.shape or tensor.dtype != want.dtype:
                if tensor.dtype == want.dtype and again.differs(k, lambda a, b: a.shape != b.shape):
                    return  # such as nonzero() of what is rounding alone
                found = f"is {shown(tensor)}, and {shown(want)} on {mode.reference}"
                self._add(index, place, about, what, None, None, found)
                return
            if tensor.layout != torch.strided or want.layout != torch.strided:
                return
            got = tensor.detach().to(mode.reference, copy=True)
            if equal(got, want):
                return
            if self.undefined and (filled := again.filled) is not None:
                got = torch.where(again.base[k] != filled[k], want, got)
            exact = not (want.is_floating_point() or want.is_complex())
            fine = ulps = (32 * math.sqrt(max(1, self.ops)) + math.sqrt(about.terms) / 2) * mode.tolerances.factor
            if not exact:
                eps = max(self.coarsest, torch.finfo(about.cast).eps if about.cast else 0.0)
                if eps > torch.finfo(want.dtype).eps:
                    ulps += 4 * math.sqrt(max(1, self.ops)) * mode.tolerances.factor * eps / torch.finfo(want.dtype).eps
            error = measure(got, want, "exact" if exact else "chain", largest([want]), 0.0 if exact else ulps)
            if error is None:
                return
        if exact:
            ulps = 0.0
            changes = [int((again.base[k] != run[k]).sum()) for run in again.moved if run[k].shape == want.shape]
            if int((got != want).sum()) <= 4 * max(changes, default=0):
                return  # such as the mask of a relu whose input is rounding alone
        elif error.ulps > ulps and not self.random:
            ulps = max(ulps, fine * again.moves(k))  # what moves it includes the rounding of a coarser type
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


class _Again:
    """What one call gives on the reference if it runs again, slightly changed: each run is made once, if it is needed.

    All hold the results and then the arguments.
    """

    def __init__(self, region: _Region, about: Given, kept: list[Any], base: list[Any]) -> None:
        self.region, self.about, self.kept, self.base = region, about, kept, base

    def _run(self, fill: float = 0.0, inputs: bool = False, each: bool = False) -> list[Any] | None:
        if self.region.collective or any(value is None for value in self.kept):  # the other ranks do not join in
            return None
        given = [value.detach().clone() if isinstance(value, Tensor) else value for value in self.kept]
        if inputs:
            _change_last_bits(given, 0)
        with contextlib.suppress(Exception):
            found = [*self.region._run(given, self.about, fill, each), *given]
            return found if len(found) == len(self.base) else None
        return None

    @functools.cached_property
    def filled(self) -> list[Any] | None:
        """With other uninitialized memory."""
        return self._run(fill=1.0)

    @functools.cached_property
    def moved(self) -> list[list[Any]]:
        """With other last bits in the inputs; and with other last bits in what each operator returns, too."""
        runs = (self._run(inputs=True), self._run(inputs=True, each=True))
        return [run for run in runs if run is not None]

    def differs(self, k: int, unlike: Callable[[Any, Any], bool]) -> bool:
        """Whether result k depends on rounding."""
        return any(unlike(self.base[k], run[k]) for run in self.moved)

    def moves(self, k: int) -> float:
        """By how many ulps a result moves with the last bits: a difference of two equal numbers, such as the gradient of a
        bias before a batch norm, is rounding alone. Most of the elements that move do so by more: some may jump, as floor()
        does, and some may be exact. The operators' own last bits add up to the root of their number."""
        most, base = 0.0, self.base[k]
        for run, ordinary in zip(self.moved, (1.0, math.sqrt(max(1, self.region.ops))), strict=False):
            if not base.numel() or run[k].shape != base.shape:
                continue
            moved = (run[k].to(torch.float64) - base.to(torch.float64)).abs()
            moved = moved[moved > 0].sort().values
            if len(moved) and bool(moved.isfinite().all()):
                largest = base.abs().max().to(torch.float64)
                most = max(most, float(moved[len(moved) * 2 // 5] / ulp(largest, base.dtype)) / ordinary)
        return most


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
            if node.op == "call_method" and node.target == kind:  # x.cuda()
                node.target = reference.type
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


class _Altered(fx.Interpreter):
    """Runs a graph, fills what it leaves uninitialized, and may change the last bits of what each operator returns."""

    def __init__(self, module: fx.GraphModule, fill: float, each: bool) -> None:
        super().__init__(module)
        self.fill, self.each, self.count = fill, each, 0

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if _is_undefined(n) and isinstance(out, Tensor):
            return out.fill_(self.fill)
        if self.each and n.op.startswith("call"):
            self.count += 1
            _change_last_bits(out, self.count)
        return out


def _is_undefined(node: fx.Node) -> bool:
    """Whether a node allocates memory and does not write to it."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == "aten" and "empty" in node.target._schema.name
    return node.op.startswith("call") and getattr(node.target, "__name__", str(node.target)) in _EMPTY


def _change_last_bits(values: Any, seed: int) -> None:
    """Change the last bits of the elements of tensors in place, some up and some down."""
    for x in tensors_of((values,)):
        if x.layout != torch.strided or x.itemsize == 1 or not (x.is_floating_point() or x.is_complex()):
            continue  # float8 has no arithmetic
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            continue  # its elements share memory, with those of a tensor that has changed
        signs = (
            torch.arange(seed, seed + x.numel(), device=x.device)
            .mul_(2654435761)
            .bitwise_right_shift_(13)
            .remainder_(2)
        )
        x.mul_(1 + torch.finfo(x.dtype).eps * (2 * signs.reshape(x.shape).to(x.dtype) - 1))


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


def _listed(out: Any) -> list[Any]:
    return [*out] if isinstance(out, (list, tuple)) else [out]
