"""Compares compiled graphs at their boundaries: what each returns and writes, forward and backward.

AOTAutograd gives each graph to a compiler, such as Inductor. The graph itself runs on the reference device, operator by
operator, from copies of what the compiled code gets.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from openreg_tools.compare.arguments import move_to
from openreg_tools.compare.generators import default_generator, drawing
from openreg_tools.compare.lockstep import DEVICE_ERRORS, Lockstep, is_traced
from openreg_tools.compare.result import Difference
from openreg_tools.compare.tolerance import Tolerance
from openreg_tools.core.blocks import first_line
from openreg_tools.core.compare import equal, largest, measure, ulp
from openreg_tools.core.move import tensors_of
from openreg_tools.core.place import Place, stack
from openreg_tools.core.samples import shown

__all__ = ["Graphs"]

# The ulps, times the root of the number of operators, that every graph may be off, and the times that a result may be off
# what it changes by if the last bits of its inputs and of each operator's results change.
MARGIN = 32


class Graphs:
    """While active, graphs that `torch.compile` compiles are compared. Functions that were compiled before compile again."""

    def __init__(self, mode: Lockstep) -> None:
        self.mode, self.count, self.active = mode, 0, False

    def __enter__(self) -> None:
        import torch._functorch.aot_autograd as aot
        from torch._dynamo import eval_frame

        stance = eval_frame._stance.stance
        if stance == "default":
            torch._dynamo.reset()
        else:  # the program does not permit to compile again
            self.mode.result.note(
                f'graphs that were compiled before are not compared, because of set_stance("{stance}")'
            )
        before = aot.aot_stage2_compile

        @functools.wraps(before)
        def aot_stage2_compile(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return before(*args, **kwargs)
            given = inspect.signature(before).bind(*args, **kwargs)
            self._watch(given.arguments)
            return before(*given.args, **given.kwargs)

        self._patched = before
        self._configured = _configured()
        self._configured.__enter__()
        aot.aot_stage2_compile = aot_stage2_compile
        self.active = True

    def __exit__(self) -> None:
        import torch._functorch.aot_autograd as aot

        self.active = False
        aot.aot_stage2_compile = self._patched
        self._configured.__exit__(None, None, None)
        if self.count:
            torch._dynamo.reset()  # the program compiles again, with its own settings

    def _watch(self, given: dict[str, Any]) -> None:
        """Let compilers return code that is compared."""
        name = f"compiled graph {self.count}"
        self.count += 1
        if torch._functorch.config.bundled_autograd_cache:
            self.mode.result.skipped.setdefault(name, "it is compiled ahead of time, into a file")
            return
        forward = given["fw_compiler"]
        for which in ("fw_compiler", "bw_compiler", "inference_compiler"):
            backward = which == "bw_compiler"
            compiler = given.get(which) or forward
            given[which] = functools.partial(self._compiled, compiler, f"backward of {name}" if backward else name)

    def _compiled(self, compiler: Any, name: str, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Compile a graph; returns code that is compared."""
        graph = None
        try:
            graph = _Graph(self, gm, name)
        except Exception as error:  # such as a dtype without numbers
            self.mode.result.skipped.setdefault(name, f"it cannot be copied: {type(error).__name__}: {error}")
        with _configured():  # this may be another thread, with settings of its own
            compiled = compiler(gm, *args, **kwargs)
        if graph is None:
            return compiled
        boxed = getattr(compiled, "_boxed_call", False)

        @torch._dynamo.disable  # the program may call backward() in a function that it compiles
        def run(args: list[Any]) -> Any:
            return graph.both([*args], lambda: compiled(args) if boxed else compiled(*args))

        run._boxed_call = True
        return run


@contextlib.contextmanager
def _configured() -> Any:
    """Random numbers are those of eager operators, and no graph comes from a cache, which would skip its compiler."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    caches = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    with inductor.patch(fallback_random=True), functorch.patch(**caches):
        yield


class _Graph:
    """One compiled graph."""

    def __init__(self, graphs: Graphs, gm: fx.GraphModule, name: str) -> None:
        self.graphs, self.mode, self.backward = graphs, graphs.mode, name.startswith("backward")
        self.graph = _on_reference(gm, self.mode.type, self.mode.reference)
        nodes = [n for each in self.graph.modules() if isinstance(each, fx.GraphModule) for n in each.graph.nodes]
        self.ops = sum(node.op.startswith("call") for node in self.graph.graph.nodes)
        self.name = f"{name} ({self.ops} operators)"
        values = [(node, tensor) for node in nodes for tensor in tensors_of((node.meta.get("val"),))]
        self.device = next((t.device for _, t in values if t.device.type == self.mode.type), None)
        self.drawn = {t.device for node, t in values if _has_tag(node, torch.Tag.nondeterministic_seeded)}
        # The reference draws the same numbers from the state of one generator only.
        self.random = len(self.drawn) > 1 or bool(self.drawn) and not self.mode.draws
        self.undefined = any(map(_is_undefined, nodes))
        self.collective = any("c10d" in str(node.target) for node in nodes)
        self.eps = max((torch.finfo(t.dtype).eps for _, t in values if t.is_floating_point()), default=0.0)

    def both(self, args: list[Any], call: Callable[[], Any]) -> Any:
        """Call the compiled code and compare; it may empty its list of arguments."""
        tensors = [*tensors_of(args)]
        here = self.device is not None or any(t.device.type == self.mode.type for t in tensors)
        if not self.graphs.active or not here or is_traced(map(type, tensors)):
            return call()
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            self._skip("a transform of torch.func calls it")
            return call()
        with self.mode.turn:
            return self._both(args, call)

    def _both(self, args: list[Any], call: Callable[[], Any]) -> Any:
        mode = self.mode
        step = _Call(self, mode.result.count(), mode.places.now(), [shown(value) for value in args])
        try:
            with mode.quiet(), torch.inference_mode(False):
                mode.synchronize()  # an error of what was launched before does not belong to this graph
                step.given = [*map(move_to(mode.reference, mode.type, args), args)]
                if self.drawn and not self.random:
                    step.state = default_generator(next(iter(self.drawn))).get_state()
        except DEVICE_ERRORS:
            raise
        except (NotImplementedError, RuntimeError) as error:  # a subclass without memory of its own
            self._skip(f"its arguments cannot be copied: {first_line(error)}")
        try:
            out = call()
            with mode.quiet():
                mode.synchronize()
        except Exception as error:
            if not getattr(error, "_compared", False) and not step.raises_too(error):
                error._compared = True
                mode.result.row(self.name).calls += 1
                step.differs("the call", f"raised {first_line(error)}")
            raise
        mode.result.row(self.name).calls += 1
        if step.given is None:
            return out
        try:
            expected, written = step.run()
        except Exception as error:
            self._skip(f"{mode.reference} raised {first_line(error)}")
            return out
        try:
            step.compare(args, _listed(out), expected, written)
        except DEVICE_ERRORS:
            raise
        except Exception as error:  # such as a dtype that the reference cannot compare
            self._skip(f"its results cannot be compared: {first_line(error)}")
        return out

    def _skip(self, why: str) -> None:
        self.mode.result.skipped.setdefault(self.name, why)


class _Call:
    """One call of a compiled graph."""

    def __init__(self, graph: _Graph, index: int, place: Place, inputs: list[str]) -> None:
        self.graph, self.mode, self.index, self.place, self.inputs = graph, graph.mode, index, place, inputs
        self.given: list[Any] | None = None  # the arguments on the reference; None if they cannot be copied
        self.state: Tensor | None = None  # of the device's generator, where the reference can draw from it

    def run(self, fill: float = 0.0, change: bool = False) -> tuple[list[Any], list[Any]]:
        """What the graph returns on the reference, and the arguments, to which it may have written.

        Args:
            fill: what memory that the graph does not initialize holds.
            change: change the last bits of the arguments, and of the results of each operator.
        """
        mode = self.mode
        with (
            _disable_current_modes(), mode.own_work(), drawing(mode.reference, self.state), torch.no_grad(),
            torch.inference_mode(False), torch.autocast(mode.reference.type, enabled=False),
        ):  # fmt: skip
            args = [value.clone() if isinstance(value, Tensor) else value for value in self.given]
            if change:
                _change_last_bits(args, 0)
            return _listed(_Interpreter(self.graph.graph, fill, change).run(*args)), args

    def raises_too(self, error: Exception) -> bool:
        """Returns true if the reference raises as well, because the call itself is wrong."""
        if self.given is None or isinstance(error, DEVICE_ERRORS) or self.graph.collective:
            return False
        try:
            self.run()
        except Exception:
            return True
        return False

    @functools.cached_property
    def changed(self) -> list[Any]:
        """Results and arguments with other last bits; empty if the graph cannot run again."""
        with contextlib.suppress(Exception):
            if not self.graph.collective:  # the other ranks do not join in
                return [value for values in self.run(change=True) for value in values]
        return []

    @functools.cached_property
    def filled(self) -> list[Any]:
        """Results and arguments with other uninitialized memory; empty if the graph has none, or cannot run again."""
        with contextlib.suppress(Exception):
            if self.graph.undefined and not self.graph.collective:
                return [value for values in self.run(fill=1.0) for value in values]
        return []

    # ---- comparing ----

    def compare(self, args: list[Any], outs: list[Any], expected: list[Any], written: list[Any]) -> None:
        """Compare results and arguments on the device with those of the reference."""
        self.mode.result.row(self.graph.name).compared += 1
        name = "gradient" if self.graph.backward else "result"
        if len(outs) != len(expected):
            self.differs(f"{name}s", f"are {len(outs)}, and {len(expected)} on {self.mode.reference}")
            return
        for i, (got, want) in enumerate(zip(outs, expected, strict=True)):
            if isinstance(got, Tensor) and isinstance(want, Tensor):
                self._tensors(f"{name} {i}", got, want, i)
            elif _is_unlike(got, want):
                self.differs(f"{name} {i}", f"is {shown(got)}, and {shown(want)} on {self.mode.reference}")
        for i, (got, before, want) in enumerate(zip(args, self.given, written, strict=True)):
            # Compiled code may use the memory of what the forward saved for the backward again, but not of weights.
            if isinstance(got, Tensor) and (not self.graph.backward or got.requires_grad or not equal(before, want)):
                self._tensors(f"argument {i}", got, want, len(outs) + i)

    def _tensors(self, what: str, tensor: Tensor, want: Tensor, i: int) -> None:
        """Compare result or argument `i`."""
        mode, ulps = self.mode, 0.0
        with mode.quiet():
            if (tensor.dtype, *tensor.shape) != (want.dtype, *want.shape):
                self.differs(what, f"is {shown(tensor)}, and {shown(want)} on {mode.reference}")
                return
            got, want = tensor.detach().to(mode.reference), want.detach()
            if tensor.layout != torch.strided or equal(got, want):
                return
            if self.filled:
                got = torch.where(want == self.filled[i], got, want)  # leaves out what is not initialized
            if want.is_floating_point() or want.is_complex():
                eps = max(1.0, self.graph.eps / torch.finfo(want.dtype).eps)  # of a smaller type that it computes in
                ulps = mode.tolerances.factor * MARGIN * math.sqrt(max(1, self.graph.ops)) * eps
            error = measure(got, want, ulps, largest([want]))
            if error is None:
                return
            if error.ulps > ulps and self._is_rounding(i, got, want, error.ulps):
                ulps = error.ulps
        mode.result.measured(self.graph.name, self.index, error, tolerance := Tolerance("chain", ulps, self.graph.ops))
        if error.ulps <= ulps:
            return
        if self.graph.random:
            mode.result.note(
                f"{self.graph.name} draws random numbers and its results differ, which does not count as a difference"
            )
        else:
            self.differs(what, "", error, tolerance, shown(got))

    def _is_rounding(self, i: int, got: Tensor, want: Tensor, ulps: float) -> bool:
        """Returns true if a result depends on the last bits so much: a difference of two equal numbers, such as the gradient
        of a bias before a batch norm, is rounding alone, and so is a mask of its signs."""
        if not self.changed or self.changed[i].shape != want.shape:
            return False
        other = self.changed[i]
        if not (want.is_floating_point() or want.is_complex()):
            return int((got != want).sum()) <= 4 * int((other != want).sum())
        moved = (other - want).abs().to(torch.float64)
        moved = moved[moved > 0].sort().values
        if not len(moved) or not bool(moved.isfinite().all()):
            return False
        # Some elements jump, as those of floor() do, and some are exact, so this takes one of the others.
        scale = torch.tensor(largest([want]), dtype=torch.float64)
        real = want.dtype.to_real() if want.is_complex() else want.dtype
        typical = float(moved[len(moved) * 2 // 5] / ulp(scale, real))
        return ulps <= self.mode.tolerances.factor * MARGIN * typical

    def differs(self, what: str, found: str, error: Any = None, tolerance: Any = None, result: str = "") -> None:
        """Add a difference to the report."""
        frames = stack() if self.place.phase == "forward" and not self.mode.result.differences else []
        self.mode.result.add(
            Difference(
                self.index, self.graph.name, what, self.place, self.inputs, error, tolerance, found, self.mode.type,
                str(self.mode.reference), result, frames,
            )
        )  # fmt: skip


# ---- a graph on the reference ----


def _on_reference(gm: fx.GraphModule, kind: str, reference: torch.device) -> fx.GraphModule:
    """A copy of a graph that names the reference where the graph names the device, with copies of the tensors it holds."""

    def here(value: Any) -> Any:
        return reference if isinstance(value, torch.device) and value.type == kind else value

    graph, attributes = fx.Graph(), {}
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.args, node.kwargs = (map_aggregate(each, here) for each in (node.args, node.kwargs))
        if node.op == "get_attr":
            value = functools.reduce(getattr, node.target.split("."), gm)
            if isinstance(value, fx.GraphModule):  # a branch of torch.cond, for example
                value = _on_reference(value, kind, reference)
            attributes[node.target] = value.detach().to(reference) if isinstance(value, Tensor) else value
    with _disable_current_modes():
        return fx.GraphModule(attributes, graph)


class _Interpreter(fx.Interpreter):
    """Runs a graph, fills what it leaves uninitialized, and may change the last bits of what each operator returns."""

    def __init__(self, module: fx.GraphModule, fill: float, change: bool) -> None:
        super().__init__(module)
        self.fill, self.change, self.count = fill, change, 0

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if _is_undefined(n) and isinstance(out, Tensor):
            return out.fill_(self.fill)
        if self.change and n.op.startswith("call"):
            self.count += 1
            _change_last_bits([out], self.count)
        return out


def _has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def _is_undefined(node: fx.Node) -> bool:
    """Returns true if a node allocates memory and does not write to it."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and "empty" in target._schema.name


def _change_last_bits(values: list[Any], seed: int) -> None:
    """Change the last bits of the elements of tensors in place, some up and some down."""
    for x in tensors_of(values):
        if x.layout != torch.strided or x.itemsize == 1 or not (x.is_floating_point() or x.is_complex()):
            continue  # float8 has no arithmetic
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            continue  # its elements share memory, with those of a tensor that has changed
        numbers = torch.arange(seed, seed + x.numel(), device=x.device).mul_(2654435761).bitwise_right_shift_(13)
        signs = 2 * numbers.remainder_(2).reshape(x.shape).to(x.dtype) - 1
        x.mul_(1 + torch.finfo(x.dtype).eps * signs)


def _is_unlike(got: Any, want: Any) -> bool:
    """Returns true if results are numbers that are not equal, or one alone is a tensor."""
    if isinstance(got, Tensor) or isinstance(want, Tensor):
        return True
    numbers = (bool, int, float, complex)
    return isinstance(got, numbers) and isinstance(want, numbers) and got != want and not (got != got and want != want)


def _listed(out: Any) -> list[Any]:
    return [*out] if isinstance(out, (list, tuple)) else [out]
