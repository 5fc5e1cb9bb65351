"""Graphs: work captured once and replayed without the host, with ``torch.cuda``'s names. See docs/graphs.md."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from openreg_ops import _C
from openreg_ops.device import devices, memory, streams
from openreg_ops.device.liveness import InputLiveness
from openreg_ops.identity import identity

__all__ = [
    "Graph",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "make_graphed_callables",
]


def is_current_stream_capturing() -> bool:
    """Returns true if the calling thread's current stream is being captured into a graph."""
    return _C.is_current_stream_capturing()


def graph_pool_handle() -> tuple[int, int]:
    """A new memory pool for several graphs to share: ``graph(g, pool=handle)``."""
    return _C.graph_pool_handle()


def _check_capturable(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A capture would keep the step count of an optimizer that is not capturable as a constant. CUDA refuses it too."""
    if torch.compiler.is_compiling():
        return
    if any(group.get("capturable") is False for group in optimizer.param_groups) and is_current_stream_capturing():
        raise RuntimeError(
            f"{type(optimizer).__name__}: expected capturable=True in all param_groups for a step() in a capture, but got "
            "False; create the optimizer with capturable=True"
        )


register_optimizer_step_pre_hook(_check_capturable)


class Graph(_C.Graph):
    """A graph of captured work: ``torch.cuda.CUDAGraph``.

    Capture with `graph`, or with `capture_begin` and `capture_end` on a stream other than the default one. A replay runs
    the work again, at the same addresses: write new inputs into the tensors that the capture read, and read the results
    from the tensors that it created.

    Args:
        keep_graph: keep the captured graph for `debug_dump`. `instantiate` or the first `replay` makes it executable.

    Example:
        >>> x = torch.ones(3, device="openreg")
        >>> g = torch.openreg.Graph()
        >>> with torch.openreg.graph(g):
        ...     y = x * 2
        >>> _ = x.fill_(5)
        >>> g.replay()
        >>> y.tolist()
        [10.0, 10.0, 10.0]
    """

    _liveness: InputLiveness | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)

    def __del__(self) -> None:
        self._forget_inputs()

    def _forget_inputs(self) -> None:
        if self._liveness and self._liveness.end():
            self._liveness = None

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Start capturing the work of the current stream.

        Args:
            pool: the memory pool of the graph, from `graph_pool_handle`, another graph's `pool` or ``MemPool.id``; a new
                pool by default.
            capture_error_mode: "global" forbids calls that can break the capture in every thread: waiting for the device,
                querying events, and, in other threads, launching work on other streams. "thread_local" forbids them only
                in the calling thread, and "relaxed" in none. No mode permits waiting for the work of the captured streams.
            check_input_liveness: whether `replay` raises RuntimeError if an input has been freed or moved since the
                capture. Inputs are tensors that existed before the capture and that operators of the calling thread take.
                The capture must end on that thread. The sanitizer reports more.
        Raises:
            ValueError: an unknown mode.
            TypeError: pool is not the number of a memory pool.
            torch.AcceleratorError: the current stream is the default one, or is already being captured.
        """
        super().capture_begin(None if pool is None else memory.pool_id("capture_begin", pool), capture_error_mode)
        self._forget_inputs()
        self._liveness = InputLiveness() if check_input_liveness else None
        if self._liveness:
            self._liveness.begin()

    def capture_end(self) -> None:
        """End the capture, on its stream.

        Raises:
            torch.AcceleratorError: something was not permitted during the capture, or a stream that joined it was not
                joined back. RuntimeError: a capture with ``check_input_liveness=True`` ends on another thread. The
                capture has then ended, its memory is freed, and the graph can capture again.
        """
        if self._liveness and not self._liveness.end():
            super().reset()
            raise RuntimeError(
                "capture_end: expected the thread that called capture_begin(check_input_liveness=True), whose operators "
                "it has watched, but got another one. Call it on that thread, or capture without check_input_liveness. "
                "The capture is over, and its memory is free."
            )
        super().capture_end()
        if self._liveness:
            self._liveness.keep_inputs(self)

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Let the next capture draw from `generator`. The device's default generator does not need this."""
        super().register_generator_state(generator)

    def instantiate(self) -> None:
        """Make a graph with ``keep_graph=True`` executable. Otherwise the first `replay` does it."""
        super().instantiate()

    def replay(self) -> None:
        """Launch the graph on the current stream of its device. Random operators draw new numbers."""
        liveness = self._liveness  # another thread may reset the graph
        if liveness:
            liveness.check()
        super().replay()

    def reset(self) -> None:
        """Delete the captured work and release the memory pool. The object can capture again."""
        self._forget_inputs()
        super().reset()

    def pool(self) -> tuple[int, int]:
        """The number of the memory pool, for other graphs to share."""
        return super().pool()

    def enable_debug_mode(self) -> None:
        """Keep what `debug_dump` needs. Call it before the capture."""
        super().enable_debug_mode()

    def debug_dump(self, debug_path: str) -> None:
        """Write the nodes, the lines that launched them, and their order to a file in Graphviz's DOT language.

        Requires `enable_debug_mode` or a graph created with ``keep_graph=True``; otherwise it only warns.
        """
        super().debug_dump(debug_path)


def _refuse_annotations(function: str, enable_annotations: bool) -> None:
    if enable_annotations:
        raise NotImplementedError(
            f"{function}: expected enable_annotations=False, but got True; this device does not support kernel annotations "
            "in graphs"
        )


class graph:
    """``with torch.openreg.graph(g):`` captures the body's work on the current device into `g`.

    Args:
        cuda_graph: a `Graph`. The argument has the same name as in ``torch.cuda.graph``.
        pool, capture_error_mode, check_input_liveness: as in `Graph.capture_begin`.
        stream: the stream to capture; by default, a stream that all captures on the device share.
        enable_annotations: must be False; only CUDA has kernel annotations.
    """

    _streams: dict[int, torch.Stream] = {}

    def __init__(
        self,
        cuda_graph: Graph,
        pool: tuple[int, int] | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        check_input_liveness: bool = False,
    ) -> None:
        _refuse_annotations("graph", enable_annotations)
        if stream is None:
            index = _C.current_device()
            stream = self._streams.get(index)
            if stream is None:
                stream = self._streams[index] = streams.Stream(index)
        self.cuda_graph = cuda_graph
        self.pool = pool
        self.capture_stream = stream
        self.capture_error_mode = capture_error_mode
        self.check_input_liveness = check_input_liveness

    def __enter__(self) -> None:
        devices.synchronize()
        if torch.compiler.config.force_cudagraph_gc:
            gc.collect()
        memory.empty_cache()
        self.capture_stream.__enter__()
        try:
            self.cuda_graph.capture_begin(self.pool, self.capture_error_mode, self.check_input_liveness)
        except BaseException:
            self.capture_stream.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        try:
            self.cuda_graph.capture_end()
        except RuntimeError:  # also in a child process, which inherits the capture
            if kind is None:
                raise
            # Otherwise the exception of the body propagates; it may have invalidated the capture.
        finally:
            self.capture_stream.__exit__(kind, *rest)


_of_cuda = torch.cuda.graphs.make_graphed_callables


class _Torch(types.SimpleNamespace):
    """``torch`` with this device instead of CUDA, for the code of torch.cuda.graphs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def make_graphed_callables(
    callables: Callable[..., Any] | tuple[Callable[..., Any], ...],
    sample_args: tuple[torch.Tensor, ...] | tuple[tuple[torch.Tensor, ...], ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: tuple[int, int] | None = None,
    capture_error_mode: str = "global",
    enable_annotations: bool = False,
) -> Any:
    """Return versions of functions or modules whose forward and backward replay graphs.

    This is ``torch.cuda.make_graphed_callables`` for this device.

    Args:
        callables: a function or module, or a tuple of them.
        sample_args: the tensors to capture each one with: a tuple, or a tuple of tuples for several callables.
        num_warmup_iters: how often each runs before the capture.
        allow_unused_input: whether an input may have no gradient.
        pool: the memory pool to share, from `graph_pool_handle()`; a new pool by default.
        capture_error_mode: as in `Graph.capture_begin`.
        enable_annotations: must be False; only CUDA has kernel annotations.
    """
    _refuse_annotations("make_graphed_callables", enable_annotations)

    def capture(captured: Graph, enable_annotations: bool = False, **options: Any) -> graph:
        return graph(captured, **{"capture_error_mode": capture_error_mode, **options})

    cuda = types.SimpleNamespace(
        CUDAGraph=Graph, Stream=streams.Stream, graph=capture, stream=streams.stream, synchronize=devices.synchronize
    )
    names = {
        **_of_cuda.__globals__,
        "torch": _Torch(cuda=cuda, is_autocast_enabled=lambda: torch.is_autocast_enabled(identity.name)),
        "graph_pool_handle": graph_pool_handle,
    }
    code = types.FunctionType(_of_cuda.__code__, names, argdefs=_of_cuda.__defaults__, closure=_of_cuda.__closure__)
    return code(callables, sample_args, num_warmup_iters, allow_unused_input, pool)
