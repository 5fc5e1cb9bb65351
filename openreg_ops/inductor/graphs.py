"""torch.compile(mode="reduce-overhead"): compiled graphs are captured into device graphs and replayed.

Note [Compiled graphs in device graphs]
Inductor asks a policy how to wrap each compiled graph, forward and backward. Here the first call with some shapes
runs as usual. The second is captured, and it and those after it are replays. So no call runs twice: mutations and
random numbers are those of the default mode. Parameters and buffers keep their addresses; other inputs are copied
into buffers of the graph. Inductor says that all saved tensors of a backward graph keep their addresses; here only
parameters do. If an input that should keep its address moves, it is copied from then on, or, if the graph writes to
it, the graph is captured again. Results are copied out of the graph, so each stays valid, where PyTorch's graph trees
raise for a result that a later call has overwritten. A result that is an input, or a view of one, is one of the
caller's input. What cannot be captured runs as in the default mode, and one line of the log "cudagraphs" says why.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.cudagraph_utils import CUDAGraphPolicy, log_cudagraph_skip_and_bump_counter

# How many sets of shapes a compiled graph is captured for, and how often again because an input moved.
LIMIT = 16


def _is_ours(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "openreg"


class _Captured:
    """A captured call: its buffers, its graph, and where its results come from."""

    def __init__(self, model: Callable[..., Any], inputs: list[Any], static: frozenset[int]) -> None:
        from torch._inductor import compile_fx  # which imports this module

        self.copy = compile_fx.index_expanded_dims_and_copy_
        copied = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and i not in static]
        self.copied = [(i, compile_fx.get_expanded_dims(inputs[i])) for i in copied]
        self.static = [(i, inputs[i].data_ptr()) for i in static if isinstance(inputs[i], torch.Tensor)]
        self.inputs = [compile_fx.static_input(x) if i in copied else x for i, x in enumerate(inputs)]
        self.graph = torch.openreg.Graph()
        current, side = torch.openreg.current_stream(), torch.openreg.Stream()
        side.wait_stream(current)
        with side:
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = model(list(self.inputs))
            except BaseException:
                try:
                    self.graph.capture_end()
                except torch.AcceleratorError:
                    pass  # the first error says why
                raise
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The graph is empty")  # as one is of empty tensors
                self.graph.capture_end()
        current.wait_stream(side)
        self.results = list(results)
        storages = {x.untyped_storage()._cdata: i for i, x in enumerate(self.inputs) if _is_ours(x)}
        # The input whose memory each result is in; None for memory of the graph.
        self.of_input = [storages.get(x.untyped_storage()._cdata) if _is_ours(x) else None for x in self.results]
        self.done = torch.openreg.Event()

    def moved(self, inputs: list[Any]) -> set[int]:
        """Which inputs have another address than in the capture, and should not."""
        return {i for i, address in self.static if inputs[i].data_ptr() != address}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        stream = torch.openreg.current_stream()
        stream.wait_event(self.done)  # of the last call, which may have been on another stream
        for i, expanded in self.copied:
            self.copy(self.inputs[i], inputs[i], expanded)
        self.graph.replay()
        copies: dict[int, torch.UntypedStorage] = {}
        results = [self._result(x, i, inputs, copies) for x, i in zip(self.results, self.of_input, strict=True)]
        self.done.record(stream)
        inputs.clear()
        return results

    def _result(self, x: Any, of_input: int | None, inputs: list[Any], copies: dict[int, Any]) -> Any:
        if not _is_ours(x):
            return x
        if of_input is not None:
            given, ours = inputs[of_input], self.inputs[of_input]
            if x is ours:
                return given
            moved = (given.storage_offset() - ours.storage_offset()) * given.itemsize // x.itemsize
            place = x.storage_offset() + moved, x.size(), x.stride()
            if x.dtype == given.dtype:
                return torch.as_strided(given, *place[1:], place[0])
            return torch.empty(0, dtype=x.dtype, device=x.device).set_(given.untyped_storage(), *place)
        storage = x.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = storage.clone()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(
            copies[storage._cdata], x.storage_offset(), x.size(), x.stride()
        )


class _Graphed:
    """A compiled graph whose calls are replays. See Note [Compiled graphs in device graphs]."""

    def __init__(
        self, model: Callable[..., Any], static: Sequence[int], mutated: Sequence[int], device: int, backward: bool
    ) -> None:
        self.model, self.static, self.mutated, self.device = model, frozenset(static), frozenset(mutated), device
        self.backward = backward
        self.moves = 0
        self.captured: dict[Any, _Captured | None] = {}  # by `key`; None: called once
        self.lock = threading.RLock()
        self.refused = False
        self.check_mutation()

    def key(self, inputs: list[Any]) -> Any:
        """The shapes, strides and dtypes of the inputs, and the numbers among them."""
        return tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in inputs)

    def check_mutation(self) -> None:
        """What is copied into the graph must not be written to."""
        if others := self.mutated - self.static:
            self.refuse(f"mutated inputs ({len(others)} instances)")

    def refuse(self, why: str) -> None:
        self.refused = True
        self.captured.clear()
        log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {why}")

    def __call__(self, inputs: list[Any]) -> Any:
        if self.refused or torch.openreg.is_current_stream_capturing():
            return self.model(inputs)
        with self.lock, torch.openreg.device(self.device):
            key = self.key(inputs)
            if key not in self.captured:
                if len(self.captured) >= LIMIT:
                    self.refuse(f"more than {LIMIT} sets of shapes")
                else:
                    self.captured[key] = None
                return self.model(inputs)
            one = self.captured[key]
            moved = one.moved(inputs) if one is not None else set()
            if moved:
                self.moves += 1
                if self.moves > LIMIT:
                    self.refuse(f"inputs that moved more than {LIMIT} times")
                    return self.model(inputs)
                if not moved & self.mutated:
                    self.static -= moved
            if one is None or moved:
                one = self.captured[key] = None  # which frees the memory of the other
                if self.backward:
                    self.static = frozenset(i for i in self.static if isinstance(inputs[i], torch.nn.Parameter))
                    self.check_mutation()
                    if self.refused:
                        return self.model(inputs)
                try:
                    one = self.captured[key] = _Captured(self.model, inputs, self.static)
                except Exception as error:  # of the capture; the call below raises what is wrong with the call itself
                    self.refuse(str(error).strip().partition("\n")[0])
                    return self.model(inputs)
            return one(inputs)


class Policy(CUDAGraphPolicy):
    """Graphs of this device for compiled graphs on it; those on CUDA are PyTorch's."""

    def should_wrap(self, compiled_graph: Any) -> bool:
        if "openreg" not in getattr(compiled_graph, "device_types", ()):
            return super().should_wrap(compiled_graph)
        info = compiled_graph.cudagraph_info
        reasons = [compiled_graph.disabled_cudagraphs_reason, *(info.cudagraph_fail_reasons if info else ())]
        reason = next(filter(None, reasons), None)
        if reason:
            log_cudagraph_skip_and_bump_counter(
                reason if "skipping" in reason else f"skipping cudagraphs due to {reason}"
            )
        return not reason

    def cudagraphify(self, model: Any, example_inputs: Any, static_input_idxs: Any, **options: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.device.type not in ("openreg", "cpu", "meta") for x in example_inputs):
            return super().cudagraphify(model, example_inputs, static_input_idxs, **options)
        return _Graphed(
            model, static_input_idxs, options["mutated_input_idxs"], options["device_index"], options["is_backward"]
        )
