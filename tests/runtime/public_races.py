"""Data races from public reports, each as a small program: `python tests/runtime/public_races.py` shows what finds them.

A program keeps the pattern of its report. `right` puts in the wait, or whatever else the report's fix puts in. The comment
`# race` marks the line that the sanitizer reports without it.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.openreg._sanitizer as sanitizer
from torch import nn

from openreg_ops.schedules.results import difference_of, values_of

DEVICE = "openreg"
N = 64
current = torch.accelerator.current_stream


@dataclass
class PublicRace:
    url: str
    pattern: str
    program: Callable[[bool], Any]
    wrong: str  # the result without the fix: "some orders", "always" or "never" different from the right one

    @property
    def name(self) -> str:
        """For example vllm#36942."""
        _, project, _, number = self.url.rsplit("/", 3)
        return f"{project}#{number}"

    @property
    def race(self) -> int | None:
        """The line with the comment `# race`. None if the sanitizer does not see the race."""
        lines, first = inspect.getsourcelines(self.program)
        return next((first + i for i, line in enumerate(lines) if line.endswith("# race\n")), None)

    def run(self, right: bool) -> Any:
        """The program's result, on the host."""
        try:
            return values_of(self.program(right))
        finally:  # also without the wait that the program lacks
            torch.accelerator.synchronize()

    def sanitized(self, right: bool) -> int | None:
        """The line that the sanitizer reports, if it reports one."""
        try:
            with sanitizer.sanitize():
                self.run(right)
        except sanitizer.OpenregSanitizerErrors as found:
            (error, *_) = found.errors
            trace = error.now[1] if isinstance(error, sanitizer.GraphError) else error.current_access.stack_trace
            return int(re.findall(rf'File "{re.escape(__file__)}", line (\d+)', "".join(trace.format()))[-1])
        return None

    def result(self) -> str:
        """When the result without the fix differs from the right one, as `wrong` says it."""
        if not torch.openreg.schedules(self.run, False, seeds=20).passed:
            return "some orders"
        return "always" if difference_of(self.run(True), self.run(False), 0, 0) else "never"


REPORTS: list[PublicRace] = []


def report(path: str, pattern: str, wrong: str = "some orders") -> Callable[[Callable], Callable]:
    def add(program: Callable[[bool], Any]) -> Callable[[bool], Any]:
        REPORTS.append(PublicRace(f"https://github.com/{path}", pattern, program, wrong))
        return program

    return add


def stream() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def full(value: float) -> torch.Tensor:
    return torch.full((N,), float(value), device=DEVICE)


# ---- the host and pinned memory ----


@report("vllm-project/vllm/issues/36942", "results of a copy are used before its event is synchronized")
def pooler_output(right=True):
    pooled, copies = full(3).view(4, -1), stream()
    copies.wait_stream(current())
    with copies:
        host = pooled.to("cpu", non_blocking=True)
        copied = copies.record_event()
    if right:
        copied.synchronize()
    rows = [row.tolist() for row in host.unbind()]  # race
    copied.synchronize()
    return rows


@report("vllm-project/vllm/pull/36013", "a NumPy view of pinned memory is read before the copy has arrived")
def accepted_tokens(right=True):
    host = torch.zeros(N, pin_memory=True)
    view = host.numpy()
    host.copy_(full(3), non_blocking=True)
    copied = current().record_event()
    if right:
        copied.synchronize()
    return float(view.sum())


@report(
    "vllm-project/vllm/pull/25279", "a pinned input buffer is filled for the next step while the last copy reads it"
)
def reused_input_buffer(right=True):
    buffer, copied, inputs = torch.zeros(N, pin_memory=True), torch.Event(DEVICE), []
    for step in range(2):
        if right:
            copied.synchronize()
        buffer.fill_(step)  # race
        inputs.append(buffer.to(DEVICE, non_blocking=True))
        copied.record()
    return inputs


# ---- between streams ----


@report("pytorch/pytorch/pull/192141", "a side stream does not wait for the inputs that the default stream fills")
def matmul_on_a_side_stream(right=True):
    x, w, side = full(2).view(8, -1), full(3).view(8, -1), stream()
    if right:
        side.wait_stream(current())
    with side:
        y = x @ w  # race
    side.synchronize()
    return y


@report("huggingface/diffusers/pull/13502", "the forward pass does not wait for the stream that loads its weights")
def weights_loaded_on_a_stream(right=True):
    host, x, transfer = torch.ones(8, 8).pin_memory(), full(2).view(8, -1), stream()
    with transfer:
        weight = host.to(DEVICE, non_blocking=True)
    weight.record_stream(current())
    if right:
        current().wait_stream(transfer)
    y = nn.functional.linear(x, weight)  # race
    torch.accelerator.synchronize()
    return y


@report(
    "huggingface/trl/pull/7195",
    "a transfer stream waits for the stream that was current earlier, not for the one that computes",
)
def stream_cached_at_construction(right=True):
    cached, transfer, compute = current(), stream(), stream()
    with compute:
        activation = full(3) * 2
        transfer.wait_stream(current() if right else cached)
        with transfer:
            host = activation.to("cpu", non_blocking=True)  # race
        done = transfer.record_event()
        current().wait_event(done)
    done.synchronize()
    return host


@report(
    "deepspeedai/DeepSpeed/issues/8061",
    "a bucket is filled on several streams, and its reduction waits for one of them",
)
def bucket_of_several_streams(right=True):
    bucket, producers, reduction = torch.zeros(2 * N, device=DEVICE), [stream(), stream()], stream()
    for i, producer in enumerate(producers):
        producer.wait_stream(current())
        with producer:
            bucket.narrow(0, i * N, N).copy_(full(i + 1))
    for producer in producers if right else producers[-1:]:
        reduction.wait_stream(producer)
    with reduction:
        bucket.div_(2)  # race
    torch.accelerator.synchronize()
    return bucket


@report("NVIDIA/Megatron-LM/issues/3670", "a gradient's hook runs on the stream where its accumulator was created")
def hook_on_a_side_stream(right=True):
    weight, setup, communication, compute = full(1).requires_grad_(), stream(), stream(), current()
    main_grad = torch.zeros(N, device=DEVICE)
    setup.wait_stream(compute)
    with setup:  # DistributedDataParallel is constructed here
        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]

    def hook(*_):
        main_grad.add_(weight.grad)
        communication.wait_stream(current() if right else compute)
        with communication:
            main_grad.div_(2)  # race

    accumulator.register_hook(hook)
    (weight * 3).sum().backward()
    torch.accelerator.synchronize()
    return main_grad


# ---- memory that is used again ----


@report(
    "meta-pytorch/torchrec/pull/4218",
    "memory is freed with resize_(0) while a copy on another stream reads it, without record_stream",
)
def stashed_weights(right=True):
    weights, copies = full(3), stream()
    copies.wait_stream(current())
    with copies:
        host = torch.empty(N, pin_memory=True)
        host.copy_(weights, non_blocking=True)
    if right:
        weights.record_stream(copies)
    weights.untyped_storage().resize_(0)
    intermediate = torch.full((N,), 7.0, device=DEVICE)  # race
    copies.synchronize()
    return host, intermediate


@report(
    "huggingface/diffusers/pull/12721",
    "the transfer stream is recorded, because it is current, instead of the stream that computes",
)
def record_stream_of_the_wrong_stream(right=True):
    x, transfer, compute = full(1), stream(), current()
    for value in range(2):
        host = torch.full((N,), float(value)).pin_memory()
        with transfer:
            weight = host.to(DEVICE, non_blocking=True)  # race
            weight.record_stream(compute if right else current())
        compute.wait_stream(transfer)
        x = x + weight
        del weight
    return x


@report(
    "pytorch/pytorch/pull/180665",
    "a reduced gradient is freed on its stream while another stream copies it to the host",
)
def reduced_gradient_offloaded(right=True):
    reduction, offload, grads = stream(), stream(), []
    for value in range(2):
        with reduction:
            reduced = torch.full((N,), float(value), device=DEVICE)  # race
        offload.wait_stream(reduction)
        with offload:
            grads.append(reduced.to("cpu", non_blocking=True))
        if right:
            reduction.wait_stream(offload)
        del reduced
    torch.accelerator.synchronize()
    return grads


# ---- collectives ----


def group() -> str:
    """The name of a group of one process."""
    if not dist.is_initialized():
        dist.init_process_group("occl", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name


@report("OpenNMT/OpenNMT-py/issues/2295", "the buffer of an asynchronous all_reduce is divided before wait()", "never")
def rescaled_gradients(right=True):
    group()
    buffer = full(4)  # whose sum over one process is the same
    work = dist.all_reduce(buffer, async_op=True)
    if right:
        work.wait()
    buffer.div_(2)  # race
    work.wait()
    return buffer


@report("pytorch/pytorch/pull/197823", "the results of a functional all_gather are compared without wait_tensor()")
def functional_collective(right=True):
    ops, name = torch.ops._c10d_functional, group()
    outputs = ops.all_gather_into_tensor_coalesced([full(1), full(2)], 1, name)
    if right:
        outputs = [ops.wait_tensor(output) for output in outputs]
    try:
        return outputs[0] + outputs[1]  # race
    finally:
        for output in outputs:
            ops.wait_tensor(output)


# ---- graphs ----


@report(
    "sgl-project/sglang/pull/27664",
    "an input of a graph is replaced by a new tensor instead of being written",
    "always",
)
def metadata_of_a_graph(right=True):
    metadata, graph = {"lengths": full(1)}, torch.accelerator.Graph()
    with stream(), graph:
        y = metadata["lengths"] * 2
    if right:
        metadata["lengths"].copy_(full(5))
    else:
        metadata["lengths"] = full(5)
    graph.replay()  # race
    return y


@report(
    "pytorch/pytorch/issues/181723",
    "gradients of a graphed callable are its static buffers, which the next backward overwrites",
    "always",
)
def gradients_of_a_graphed_callable(right=True):
    layer, xs = nn.Linear(4, 4, bias=False, device=DEVICE), [full(i).view(-1, 4) for i in (1, 10)]
    layer = torch.openreg.make_graphed_callables(layer, (torch.zeros_like(xs[0]),))
    if right:
        layer.weight.register_hook(torch.clone)
    for x in xs:
        layer(x).sum().backward()  # race
    return layer.weight.grad


def main() -> int:
    """Print what finds each race. Returns 1 if nothing finds one of them."""
    warnings.simplefilter("ignore")
    print(f"{'Report':<60}{'Sanitizer':<11}{'Differs':<13}{'Right form':<12}Pattern")
    exposed = 0
    for item in REPORTS:
        line, result = item.sanitized(False), item.result()
        silent = item.sanitized(True) is None and torch.openreg.schedules(item.run, True, seeds=20).passed
        exposed += silent and (result == "some orders" or (line is not None and line == item.race))
        found = f"line {line}" if line else "no"
        print(
            f"{item.url:<60}{found:<11}{result:<13}{'silent' if silent else 'reported':<12}{item.pattern}", flush=True
        )
    dist.destroy_process_group()
    print(f"exposed {exposed} of {len(REPORTS)}")
    return exposed < len(REPORTS)


if __name__ == "__main__":
    sys.exit(main())
