"""Adapts Inductor's own code to the device. Each function below is one adaptation: it replaces what its decorator
names, and says what goes wrong without it; tests/graph/test_adapt.py has a test of the same name for each.

Written against torch 2.13 and 2.15. docs/pytorch-internals.md lists what else a new version of torch may break.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch._aot_autograd import aot_autograd_result
from torch._inductor import codecache, config, cpp_builder, cudagraph_utils, ir, lowering, output_code, scheduler, utils
from torch._inductor.codegen import common
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel.flex import flex_cpu
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_ops.identity import identity


@dataclasses.dataclass
class Adaptation:
    """`make` takes the original and returns its replacement for ``owner.name``, or for ``owner[name]`` if owner is a
    dict."""

    owner: Any
    name: Any
    make: Callable[[Any], Any]
    original: Any

    def put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


ADAPTATIONS: dict[str, Adaptation] = {}


def replaces(owner: Any, name: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register the decorated function as the adaptation of ``owner.name``."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        ADAPTATIONS[make.__name__] = Adaptation(
            owner, name, make, owner[name] if isinstance(owner, dict) else getattr(owner, name)
        )
        return make

    return register


def apply() -> None:
    """Apply all adaptations."""
    for adaptation in ADAPTATIONS.values():
        adaptation.put(adaptation.make(adaptation.original))


@replaces(ir, "is_cpu")
def cpu_heuristics(original: Any) -> Any:
    """Decides, as for the CPU, what is computed once and kept, and what each kernel that needs it recomputes.

    Otherwise every user of exp, sigmoid and similar functions recomputes them; softmax computes exp twice.
    """
    return lambda x: ir.get_device_type(x) in ("cpu", identity.name)


@replaces(scheduler.BaseSchedulerNode, "is_cpu")
def no_loop_reordering(original: Any) -> Any:
    """Fusion reorders and inverts loops on every device except the CPU, whose code generator does not support that."""
    return lambda node: (device := node.get_device()) is not None and device.type in ("cpu", identity.name)


@replaces(lowering, "use_two_step_variance")
def two_step_variance(original: Any) -> Any:
    """Computes variances of short rows in two passes, as for the CPU; Welford's method is slower in C++."""

    def use_two_step_variance(x: Any, axis: Any, keepdim: bool, **more: Any) -> bool:
        if x.get_device().type != identity.name:
            return original(x, axis=axis, keepdim=keepdim, **more)
        axis = lowering._validate_reduction_axis(x, axis)
        loops = lowering._make_reduction_inner(x, axis=axis, keepdims=keepdim, dtype=None, override_return_dtype=None)
        length = sympy_product(loops["reduction_ranges"])
        return (
            length.is_Integer
            and int(length) <= config.cpp.use_two_step_variance_threshold
            and sympy_product(loops["ranges"]) != 1
        )

    return use_two_step_variance


@replaces(scheduler.ForeachKernelSchedulerNode, "combinable_nodes")
def no_combo_kernels(original: Any) -> Any:
    """`combo_kernels` leaves the device's kernels alone, like the CPU's: KernelGroup fuses what it can.

    Inductor combines the kernels of every device except the CPU, and then asserts that they are written in Triton.
    """

    def combinable_nodes(nodes: Any) -> Any:
        return original([x for x in nodes if (device := x.get_device()) is None or device.type != identity.name])

    return staticmethod(combinable_nodes)


@replaces(lowering, "_make_reduction_inner")
def logical_argmax(original: Any) -> Any:
    """argmax and argmin over several dimensions count elements in index order.

    Devices that Inductor does not know use the memory order instead, so ``x.t().argmax()`` is wrong.
    """
    get_device_type = ir.get_device_type

    def make_reduction_inner(x: Any, **arguments: Any) -> Any:
        with patch.object(ir, "get_device_type", lambda x: _as_cpu(get_device_type(x))):
            return original(x, **arguments)

    return make_reduction_inner


@replaces(lowering, "is_gpu")
def device_of_the_result(original: Any) -> Any:
    """A kernel runs on the device of its operands, even if the first of them is a 0-dim tensor on the CPU.

    Otherwise it is a CPU kernel, which reads device memory from the host, and its result is on the CPU. In torch 2.15
    this also covers index_put where it accumulates integers: as in 2.13, ATen's kernel does that.
    """
    return lambda device: device == identity.name or original(device)


@replaces(utils, "GPU_TYPES")
def cuda_is_not_a_gpu(original: Any) -> Any:
    """Under the name cuda, the device's code is C++; Inductor writes Triton for CUDA and tunes it to the GPU."""
    return [name for name in original if name != identity.name]


@replaces(cpp_builder, "get_cpp_torch_device_options")
def cuda_without_its_libraries(original: Any) -> Any:
    """Under the name cuda, compiled C++ needs neither CUDA's headers nor its libraries."""
    return lambda device_type, **options: original(device_type=_as_cpu(device_type), **options)


@replaces(scheduler.Scheduler, "create_backend")
def cuda_without_triton(original: Any) -> Any:
    """Under the name cuda, the device's kernels need neither Triton nor a compute capability."""

    def create_backend(self: scheduler.Scheduler, device: torch.device) -> Any:
        if device.type != identity.name:
            return original(self, device)
        V.graph.add_device_info(device)
        return common.get_scheduling_for_device(device.type)(self)

    return create_backend


@replaces(GraphLowering, "run_node")
def host_values(original: Any) -> Any:
    """Computes on the host, from tensors of any size, a 0-dim CPU value that a device kernel reads.

    Inductor computes it inside the kernel that reads it, but a launch passes only single values from the host, not
    arrays.
    """

    def run_node(graph: GraphLowering, node: torch.fx.Node) -> Any:
        result = original(graph, node)
        values = [x for user in node.users for x in tree_leaves(user.meta.get("val")) if isinstance(x, torch.Tensor)]
        if (
            isinstance(result, ir.TensorBox)
            and ir.get_device_type(result) == "cpu"
            and not result.get_size()
            and any(x.device.type == identity.name for x in values)
            and any(graph.get_numel(name) != 1 for name in result.get_read_names())
        ):
            return ir.ExternKernel.copy_input(result)
        return result

    return run_node


@replaces(lowering, "get_constant_value")
def exact_division(original: Any) -> Any:
    """Divides by a constant, as eager mode and the CPU do; for other devices Inductor multiplies by 1/c.

    The device of the dividend matters, but it is not available here: a CPU divisor may be a scalar with a dividend on
    this device.
    """

    def get_constant_value(x: Any) -> Any:
        results = tree_leaves(V.graph.current_node.meta.get("val"))  # of the division, whose divisor may be on the CPU
        ours = any(isinstance(result, torch.Tensor) and result.device.type == identity.name for result in results)
        return None if ours else original(x)

    return get_constant_value


@replaces(lowering, "pointwise_cat")
def vectorised_cat(original: Any) -> Any:
    """cat writes each input to its place. The single expression generated for other devices is not vectorized in
    C++."""

    def pointwise_cat(inputs: Any, dim: int = 0) -> Any:
        if inputs[0].get_device().type != identity.name:
            return original(inputs, dim)
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))

    return pointwise_cat


@replaces(lowering, "_pad_as_cat")
def pad_in_one_kernel(original: Any) -> Any:
    """Padding on the right is one kernel, as for the CPU; other devices use a cat, which takes two."""
    return lambda x, *rest: None if x.get_device().type == identity.name else original(x, *rest)


@replaces(cudagraph_utils, "check_lowering_disable_cudagraph")
def reduce_overhead(original: Any) -> Any:
    """Graphs may be captured whose operators are all on one device of this type; Inductor asks for CUDA."""

    def check_lowering_disable_cudagraph(nodes: dict[torch.device, torch.fx.Node]) -> str | None:
        if not any(device.type == identity.name for device in nodes):
            return original(nodes)
        names = sorted({str(device) for device in nodes if device.type != "meta"})
        return None if len(names) == 1 else f"skipping cudagraphs due to several devices: {', '.join(names)}"

    return check_lowering_disable_cudagraph


@replaces(output_code.CompiledFxGraph, "post_compile")
def graphs_of_the_device(original: Any) -> Any:
    """Wraps compiled graphs of this device as openreg_ops/inductor/graphs.py does, unless the program has a policy.

    A policy in Inductor's configuration would also apply to CUDA's graphs, which Inductor then no longer partitions.
    """

    def post_compile(graph: Any, *args: Any, **options: Any) -> Any:
        from openreg_ops.inductor import graphs

        if config.cudagraph_policy is not None or identity.name not in graph.device_types:
            return original(graph, *args, **options)
        with config.patch(cudagraph_policy=graphs.Policy()):
            return original(graph, *args, **options)

    return post_compile


@replaces(aot_autograd_result.GenericAOTAutogradResult, "wrap_post_compile")
def metadata_of_cached_graphs(original: Any) -> Any:
    """Tells graphs.py which results are only for backward, also of a graph from the cache."""

    def wrap_post_compile(result: Any, *args: Any, **options: Any) -> Any:
        context = torch._guards.TracingContext.try_get()
        if context is None or context.fw_metadata is not None:
            return original(result, *args, **options)
        with patch.object(context, "fw_metadata", result.runtime_metadata):
            return original(result, *args, **options)

    return wrap_post_compile


@replaces(codecache, "_precompile_header")
def no_precompiled_header(original: Any) -> Any:
    """AOTInductor precompiles a header for the device, but there is none with this device's name."""
    return lambda *args, **options: None if options.get("device_type") == identity.name else original(*args, **options)


@replaces(lowering.lowerings, torch.ops.higher_order.flex_attention)
def flex_attention_template(original: Any) -> Any:
    """Uses the CPU's C++ template where it can; other devices get a Triton template.

    The template returns no logsumexp, which training needs, and supports three dtypes. In all other cases, lowers the
    plain implementation.
    """

    def flex_attention(query: Any, key: Any, value: Any, *args: Any) -> Any:
        if query.get_device().type != identity.name:
            return original(query, key, value, *args)
        users = V.graph.current_node.users
        dtypes = {x.get_dtype() for x in (query, key, value)}
        if (
            any(user.args[1] != 0 for user in users)
            or len(dtypes) > 1
            or dtypes & {torch.float64}
            or not flex_cpu.check_cpu_supported()
        ):
            return _lower_plain(query, key, value, *args)
        subgraph, block_mask, scale, kernel_options, *buffers = args
        kernel_options = {**kernel_options, "OUTPUT_LOGSUMEXP": False}
        set_device = V.graph.set_current_device
        with patch.object(V.graph, "set_current_device", lambda _: set_device(torch.device("cpu"))):
            return flex_cpu.lower_cpu(query, key, value, subgraph, block_mask, scale, kernel_options, *buffers)

    return flex_attention


@replaces(lowering.lowerings, torch.ops.higher_order.flex_attention_backward)
def flex_attention_backward(original: Any) -> Any:
    """Lowers the plain implementation: the CPU has no template, and other devices have a Triton template."""

    def backward(query: Any, *args: Any) -> Any:
        if query.get_device().type != identity.name:
            return original(query, *args)
        *_, gradients = V.graph.current_node.meta["val"]
        *_, buffers, _ = V.graph.current_node.args  # what score_mod holds
        # The plain implementation differentiates with respect to the buffers that require a gradient.
        for buffer, gradient in zip(buffers, gradients, strict=True):
            if gradient is not None:
                buffer.meta["val"] = buffer.meta["val"].detach().requires_grad_()
        return _lower_plain(query, *args)

    return backward


def _lower_plain(*args: Any) -> Any:
    """Lower the current node, a higher-order operator, as the operators that its plain implementation calls."""
    node, leaves = V.graph.current_node, tree_leaves(args)
    plain = node.target.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    nodes, spec = tree_flatten(node.args)
    values = [
        leaf.graph_module if isinstance(leaf, ir.Subgraph) else x.meta["val"] if isinstance(x, torch.fx.Node) else x
        for leaf, x in zip(leaves, nodes, strict=True)
    ]
    inputs = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor | torch.SymInt)]

    def call(*given: Any) -> Any:
        filled = list(values)
        for i, x in zip(inputs, given, strict=True):
            filled[i] = x
        with patch.object(torch, "tensor", lambda value, **options: torch.full((), value, **options)):  # no constants
            return plain(*tree_unflatten(filled, spec))

    with V.fake_mode, torch.no_grad():
        graph = make_fx(call, select_decomp_table())(*(values[i] for i in inputs))
    return lowering.process_subgraph_nodes(graph, [leaves[i] for i in inputs])


def _as_cpu(device_type: str | None) -> str | None:
    return "cpu" if device_type == identity.name else device_type
