"""torch.compile(mode="reduce-overhead"): compiled graphs are captured into device graphs and replayed.

Note [Compiled graphs in device graphs]
Inductor asks a policy how to wrap each compiled graph, forward and backward. Here the first call with some shapes
runs as usual. The second is captured, and it and those after it are replays. So no call runs twice: mutations and
random numbers match the default mode. A replay, in csrc/bindings/compiled_graphs.cpp, is one launch. It copies the inputs
into buffers of the graph, except those that keep their addresses, and copies the results out of the graph. So each
result stays valid. PyTorch's graph trees raise for a result that a later call has overwritten. A result of forward
that is an input, or a view of one, refers to the caller's input. Backward may write its results to the memory of
inputs, so they are copied.
What only the backward pass gets is not copied: the backward graph reads it in the memory of the forward graph. If any
of it is still alive at the next forward call, as with two forward passes before a backward pass, that call runs the
compiled code. After 16 such calls, these results are copied too.
Parameters, buffers and what a forward graph saved keep their addresses. If another input should keep its address but
moves, it is copied from then on, or, if the graph writes to it, the graph is captured again. A graph that cannot be
captured runs as in the default mode, and one line of the log "cudagraphs" says why. A call inside a capture or under a
TorchDispatchMode, such as the sanitizer's, also runs as in the default mode.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.cudagraph_utils import CUDAGraphPolicy, log_cudagraph_skip_and_bump_counter

from openreg_ops import _C

# How many sets of shapes a compiled graph is captured for, and how often again because an input moved.
LIMIT = 16


def _capture(
    model: Callable[..., Any], inputs: list[Any], fixed: frozenset[int], saved: int, backward: bool
) -> _C.CompiledGraph:
    """The graph of a call. Inputs that are not `fixed` get buffers; results from `saved` on are for backward only."""
    from torch._inductor import compile_fx  # which imports this module

    buffers = [
        compile_fx.static_input(x) if isinstance(x, torch.Tensor) and i not in fixed else x
        for i, x in enumerate(inputs)
    ]
    graph = torch.openreg.Graph()
    current, side = torch.openreg.current_stream(), torch.openreg.Stream()
    side.wait_stream(current)
    with side:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            results = model(list(buffers))
        except BaseException:
            try:
                graph.capture_end()
            except torch.AcceleratorError:
                pass  # the first error says why
            raise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The graph is empty")  # a graph of empty tensors is
            graph.capture_end()
    current.wait_stream(side)
    return _C.CompiledGraph(graph, buffers, fixed, list(results), saved, backward)


class _Graphed:
    """A compiled graph whose calls are replays. See Note [Compiled graphs in device graphs]."""

    def __init__(
        self,
        model: Callable[..., Any],
        fixed: Sequence[int],
        mutated: Sequence[int],
        device: int,
        backward: bool,
        saved: int,
    ) -> None:
        self.model, self.fixed, self.mutated, self.device = model, frozenset(fixed), frozenset(mutated), device
        self.backward, self.saved = backward, saved
        self.moves = 0
        self.called: set[Any] = set()  # the `key` of the calls so far
        self.graphs = _C.CompiledGraphs(device)
        self.lock = threading.RLock()
        self.refused = False
        self.check_mutation()

    def key(self, inputs: list[Any]) -> Any:
        """The shapes, strides and dtypes of the inputs, and the numbers among them."""
        return tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in inputs)

    def check_mutation(self) -> None:
        """What is copied into the graph must not be written to."""
        if others := self.mutated - self.fixed:
            self.refuse(f"mutated inputs ({len(others)} instances)")

    def refuse(self, why: str) -> None:
        self.refused = True
        self.graphs.clear()
        log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {why}")

    def __call__(self, inputs: list[Any]) -> Any:
        if self.refused:
            return self.model(inputs)
        results = self.graphs(inputs)
        if results is False:
            self.is_first(inputs)
        elif results is None and self.prepare(inputs):
            results = self.graphs(inputs)
        return results if isinstance(results, list) else self.model(inputs)

    def is_first(self, inputs: list[Any]) -> bool:
        """Returns true if no other call had inputs of this kind."""
        key = self.key(inputs)
        if key in self.called:
            return False
        if len(self.called) < LIMIT:
            self.called.add(key)
        else:
            self.refuse(f"more than {LIMIT} sets of shapes")
        return True

    def prepare(self, inputs: list[Any]) -> bool:
        """Capture a call with these inputs, unless it is the first of its kind. Returns true if there is a graph."""
        with self.lock, torch.openreg.device(self.device):
            if self.refused or self.is_first(inputs):
                return False
            if any(isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()) for x in inputs):
                self.refuse("a lazy conjugate or negation among the inputs")
                return False
            moved = self.graphs.drop(inputs)  # frees the memory of the old graph
            if moved == []:  # another thread captured it in the meantime
                return True
            if moved is not None:
                self.moves += 1
                if self.moves > LIMIT:
                    self.refuse(f"inputs that moved more than {LIMIT} times")
                    return False
                if self.mutated.isdisjoint(moved):
                    self.fixed -= set(moved)
            elif self.backward:
                self.fixed = frozenset(
                    i for i in self.fixed if isinstance(inputs[i], torch.nn.Parameter) or _C.is_lent(inputs[i])
                )
                self.check_mutation()
                if self.refused:
                    return False
            try:
                self.graphs.add(_capture(self.model, inputs, self.fixed, self.saved, self.backward))
            except Exception as error:  # of the capture; the call below raises what is wrong with the call itself
                self.refuse(str(error).strip().partition("\n")[0])
                return False
            return True


def _first_saved() -> int:
    """The first result of the forward graph that is compiled now that only backward gets."""
    context = torch._guards.TracingContext.try_get()
    meta = context.fw_metadata if context else None
    return sys.maxsize if meta is None or meta.tokens else meta.num_forward


class Policy(CUDAGraphPolicy):
    """Graphs of this device for compiled graphs on it. adapt.py makes it the policy of those graphs only."""

    def should_wrap(self, compiled_graph: Any) -> bool:
        info = compiled_graph.cudagraph_info
        reasons = [compiled_graph.disabled_cudagraphs_reason, *(info.cudagraph_fail_reasons if info else ())]
        reason = next(filter(None, reasons), None)
        if reason:
            log_cudagraph_skip_and_bump_counter(
                reason if "skipping" in reason else f"skipping cudagraphs due to {reason}"
            )
        return not reason

    def cudagraphify(self, model: Any, example_inputs: Any, static_input_idxs: Any, **options: Any) -> Any:
        forward = not options["is_backward"] and not options["is_inference"]
        return _Graphed(
            model,
            static_input_idxs,
            options["mutated_input_idxs"],
            options["device_index"],
            options["is_backward"],
            _first_saved() if forward else sys.maxsize,
        )
