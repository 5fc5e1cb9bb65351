"""The code that Inductor generates for the device: the CPU's vectorized C++, run by launch(). See
csrc/backend/inductor.h.

Note [Generated kernels]
A kernel of CPU Inductor is one function, `extern "C" void kernel(const float* in_ptr0, ..., const int64_t ks0)`.
Here its body is a function with that signature. The kernel, which also takes the device's index, packs its arguments in
a struct and passes both to openreg_launch(). So stream order, the launch mode and faults work for generated kernels as
for all others, no matter who calls them: the Python wrapper, the C++ wrapper or AOTInductor.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config, ir
from torch._inductor.codegen import common, cpp, cpp_utils, cpp_wrapper_cpu, wrapper
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.stream_utils import DEFAULT_STREAM_IDX, get_stream_name
from torch._inductor.utils import Placeholder
from torch._inductor.virtualized import V

from openreg_ops import _build, inductor, meta
from openreg_ops.identity import identity
from openreg_ops.inductor import adapt, operators

CPU = torch.device("cpu")
_DEVICE_TYPE = "cuda" if identity.name == "cuda" else "privateuse1"


class KernelArgs(common.KernelArgs):
    """A kernel's arguments, with the device's index last once `device` is set."""

    device: torch.device | None = None

    def cpp_argdefs(self, *args: Any) -> tuple[list[str], list[str], list[str]]:
        definitions, values, types = super().cpp_argdefs(*args)
        if self.device is None:
            return definitions, values, types
        return (
            [*definitions, "const int64_t device"],
            [*values, V.graph.wrapper_code.device_index(self.device)],
            [*types, "const int64_t"],
        )

    def host_scalars(self) -> set[str]:
        """The one-element arguments on the CPU; their values are read at the launch, as in eager mode."""
        scalars = set()
        for outer, inner in self.input_buffers.items():
            buffer = V.graph.try_get_buffer(outer)
            if buffer is None or ir.get_device_type(buffer) != "cpu":
                continue
            if buffer.get_numel() != 1:  # which adapt.host_values prevents
                raise NotImplementedError(
                    "openreg: a generated kernel takes CPU tensors of one element, but got one of shape "
                    f"{list(buffer.get_size())}; move it to the device with .to()"
                )
            scalars.add(inner)
        return scalars


class KernelGroup(cpp.KernelGroup):
    """Kernels fused into one function; see Note [Generated kernels]."""

    def __init__(self) -> None:
        super().__init__()
        self.args = KernelArgs()
        self.device: torch.device | None = None

    def codegen_group(self, name: str | None = None) -> str:
        source = super().codegen_group(name)
        if not source:
            return ""
        kernel = str(Placeholder.KERNEL_NAME) if name is None else name
        parameters = self.args.cpp_argdefs()[0]
        self.args.device = self.device
        title = str(Placeholder.DESCRIPTIVE_NAME) if name is None else name
        return as_body(source, kernel) + launcher(kernel, title, parameters, self.args.host_scalars())

    def call_kernel(self, wrapper: Any, kernel_name: str) -> None:
        _, call_args, arg_types = self.args.cpp_argdefs()
        # Registered as a CPU kernel: wrappers know how to call those.
        wrapper.generate_kernel_call(kernel_name, call_args, triton=False, arg_types=arg_types, device=CPU)


def as_body(source: str, kernel: str) -> str:
    """Turns the source of a CPU Inductor kernel into the source of the launched function."""
    export = f'extern "C" {cpp.get_export_declaration()} void'
    return one_at_a_time(source.replace(export, "static void", 1).replace(f" {kernel}(", f" {kernel}_body(", 1))


# See Note [Integer division].
POINT = "    inductor_cpu_integer_div_error_flag = &inductor_cpu_integer_div_error;\n"
UNPOINT = "    inductor_cpu_integer_div_error_flag = nullptr;\n"
DIVIDES = re.compile(r"\b(floor_divide_integral|remainder_integral|mod)\(")
MUTEX = """#ifndef OPENREG_INTEGER_DIVISION
#define OPENREG_INTEGER_DIVISION
#include <mutex>
inline std::mutex openreg_integer_division;
#endif
"""
LOCK = "    const std::lock_guard openreg_lock(openreg_integer_division);\n"


def one_at_a_time(source: str) -> str:
    """The source of a body, changed so that no two kernels that divide integers run at once.

    Note [Integer division]
    A division by zero sets a flag in the kernel, which raises when its loops have ended. The process has one pointer to
    that flag, and nearly every kernel sets and clears the pointer. Kernels on several streams and devices run at once,
    so kernels that do not need the pointer leave it alone, and the others take turns.
    """
    if not DIVIDES.search(source):
        return source.replace(POINT, "").replace(UNPOINT, "")
    return source.replace("static void", f"{MUTEX}static void", 1).replace(POINT, LOCK + POINT, 1)


def launcher(kernel: str, title: str, parameters: list[str], host_scalars: set[str]) -> str:
    """The source of the function `kernel`, which launches ``{kernel}_body`` under the name `title` in profiles."""
    fields, values, uses = [], [], []
    for parameter in parameters:
        type_, name = parameter.rsplit(" ", 1)
        scalar = name in host_scalars
        fields.append(f"{type_.removeprefix('const ').removesuffix('*') if scalar else type_} {name};")
        values.append(f"*{name}" if scalar else name)
        uses.append(f"&a.{name}" if scalar else f"a.{name}")
    return f"""
extern "C" void openreg_launch(int64_t, void (*)(const void*), const void*, size_t, const char*);
extern "C" {cpp.get_export_declaration()} void {kernel}({", ".join([*parameters, "const int64_t device"])})
{{
    struct Arguments {{ {" ".join(fields)} }} arguments{{{", ".join(values)}}};
    openreg_launch(device, [](const void* pointer) {{
        const auto& a = *static_cast<const Arguments*>(pointer);
        {kernel}_body({", ".join(uses)});
    }}, &arguments, sizeof(arguments), "{title}");
}}
"""


class Scheduling(cpp.CppScheduling):
    """CPU Inductor's scheduling with the kernels defined here."""

    def reset_kernel_group(self) -> None:
        self.kernel_group = KernelGroup()

    def codegen_node(self, node: Any) -> None:
        self.kernel_group.device = node.get_device()
        with V.graph.set_current_device(CPU):
            super().codegen_node(node)

    def codegen_template(self, template_node: Any, *others: Any) -> None:
        """flex_attention's kernel: the CPU's C++ template, launched like the others."""
        node, device = template_node.node, template_node.get_device()
        make = node.make_kernel_render

        def make_kernel_render(*args: Any, **options: Any) -> Any:
            kernel, render = make(*args, **options)
            kernel.args = KernelArgs()

            def launched() -> str:
                # A tail of one vector must not be taken for a whole block: it would read and write 8 elements beyond.
                source = render().replace("N % Vectorized::size() == 0", "N == BLOCK_N")
                name = str(Placeholder.KERNEL_NAME)
                parameters = kernel.args.cpp_argdefs()[0]
                kernel.args.device = device
                title = str(Placeholder.DESCRIPTIVE_NAME)
                return as_body(source, name) + launcher(name, title, parameters, kernel.args.host_scalars())

            return kernel, launched

        with patch.object(node, "make_kernel_render", make_kernel_render), V.graph.set_current_device(CPU):
            super().codegen_template(template_node, *others)


class _Wrapper:
    """What the Python wrappers of whole graphs and of subgraphs share."""

    def device_index(self, device: torch.device) -> str:
        return str(device.index)

    def make_allocation(
        self,
        name: str,
        device: torch.device,
        dtype: Any,
        shape: Any,
        stride: Any,
        allocation_shape: Any = None,
        *rest: Any,
    ) -> str:
        line = super().make_allocation(name, device, dtype, shape, stride, allocation_shape, *rest)
        if device.type != identity.name:
            return line
        function, options = ("_cuda", dtype) if identity.name == "cuda" else ("", f"device='openreg', dtype={dtype}")
        return line.replace(f"= empty_strided{function}(", "= empty_strided_openreg(", 1).replace(
            f", {options})", f", {dtype}, {device.index})", 1
        )

    def generate_fallback_kernel(self, node: Any) -> None:
        _flush()
        super().generate_fallback_kernel(node)

    def codegen_cuda_stream_enter(self, stream_idx: int) -> Any:
        # Inductor declares streams where it enters a device guard, and CPU code has no such guards.
        if stream_idx == DEFAULT_STREAM_IDX:
            stream = V.graph.device_ops.current_stream()
        else:
            self.add_import_once("from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index")
            stream = f"get_external_object_by_index({V.graph.scheduler.stream_idx_to_user_obj_idx[stream_idx]})"
        self.writeline(f"{get_stream_name(stream_idx)} = {stream}")
        return super().codegen_cuda_stream_enter(stream_idx)


class PythonWrapper(_Wrapper, wrapper.PythonWrapperCodegen):
    """The Python code that allocates buffers and calls kernels."""

    @staticmethod
    def create(is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None) -> Any:
        if is_subgraph:
            return SubgraphPythonWrapper(subgraph_name, parent_wrapper, partition_signatures)
        return PythonWrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline("from openreg_ops._C import empty_strided as empty_strided_openreg")


class SubgraphPythonWrapper(_Wrapper, wrapper.SubgraphPythonWrapperCodegen):
    """Writes the body of a `cond` or `while_loop`."""


# See Note [C shims] in csrc/backend/aot_inductor.cpp.
SHIMS = (
    *("mm_out", "addmm_out", "bmm_out", "baddbmm_out", "_int_mm_out", "convolution", "randint_low_out"),
    *("scatter_src_out", "scatter_value_out", "scatter_reduce_two_out"),
)


class CppWrapper(cpp_wrapper_cpu.CppWrapperCpu):
    """The C++ code that does the same, for the config `cpp_wrapper` and for AOTInductor."""

    @staticmethod
    def create(*_args: Any) -> CppWrapper:
        return CppWrapper()

    def device_index(self, device: torch.device) -> str:
        return self.codegen_device_idx(device, str(device.index))

    @staticmethod
    def get_device_include_path_jit(device: str) -> str:
        line = cpp_wrapper_cpu.CppWrapperCpu.get_device_include_path_jit("cpu")
        return line if device == "cpu" else f"{line}\n{_declarations()}"

    @staticmethod
    def get_device_include_path_aot(device: str) -> str:
        """A model's runtime (model_base.h) takes the name "cpu" for this device; see Runner in aot_inductor.cpp.

        Everywhere else "cpu" means the CPU, where constants may live.
        """
        line = cpp_wrapper_cpu.CppWrapperCpu.get_device_include_path_aot("cpu")
        if device == "cpu":
            return line
        return (
            "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"
            "#include <string_view>\n"
            "#define aoti_torch_device_type_cpu() "
            f'(std::string_view(__func__) == "parse_device_str" ? aoti_torch_device_type_{_DEVICE_TYPE}() '
            ": (aoti_torch_device_type_cpu)())\n"
            "#include <torch/csrc/inductor/aoti_runtime/model_base.h>\n"
            "#undef aoti_torch_device_type_cpu\n"
            f"{line}\n{_declarations()}"
        )

    def codegen_cuda_stream_enter(self, stream_idx: int) -> None:
        raise NotImplementedError(
            "openreg: streams inside a compiled region need the Python wrapper; set cpp_wrapper=False"
        )

    def codegen_model_constructor(self) -> None:
        self.device = identity.name  # of the constants
        try:
            super().codegen_model_constructor()
        finally:
            self.device = "cpu"

    def generate_fallback_kernel(self, node: Any) -> None:
        """Calls through the dispatcher: C shims exist only for PyTorch's own devices."""
        _flush()
        node.use_runtime_dispatch = True
        arguments = node.export_extern_kernel_node()
        self.generate_fallback_kernel_with_runtime_lookup(
            node.get_name(),
            node.python_kernel_name,
            lambda: [*node.codegen_args(), *node.codegen_kwargs()],
            node.op_overload,
            arguments,
            node.outputs or node.mutation_outputs,
        )


def _declarations() -> str:
    lines = [f'extern "C" decltype(aoti_torch_cpu_{name}) aoti_torch_openreg_{name};' for name in SHIMS]
    if identity.name != "openreg":
        lines += [f"#define aoti_torch_{identity.name}_{name} aoti_torch_openreg_{name}" for name in SHIMS]
    return "\n".join(lines)


def _flush() -> None:
    """Write the kernels collected so far: the scheduler does so before a node of another device, but not before a node
    without a device, such as recording an event."""
    for backend in V.graph.scheduler.backends.values():
        backend.flush()


class DeviceOverrides(common.DeviceOpOverrides):
    """Lines that Inductor writes into wrappers for a device."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"def {name}(_):\n    return 0\n"

    def set_device(self, device_idx: int) -> str:
        return f"torch.openreg.set_device({device_idx})"

    def synchronize(self) -> str:
        return "torch.openreg.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        return f"torch.openreg.device({device_idx})"

    def aten_device_type(self) -> str:  # used by torch 2.15; see register() for earlier versions
        return "at::kCUDA" if identity.name == "cuda" else "at::kPrivateUse1"

    def current_stream(self) -> str:
        return "torch.openreg.current_stream()"


class CacheKey(CustomGraphModulePass):
    """A pass that changes nothing. Caches of compiled graphs use its identity, which is this code generator's."""

    def __call__(self, graph_module: torch.fx.GraphModule) -> None:
        operators.check_names()  # for each graph that is not in a cache yet; one with a wrong name never is

    def uuid(self) -> str:
        return ",".join([_source_digest(), *sorted(inductor.decompositions)])


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256(_build.TORCH_VERSION.encode())
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources() -> list[Path]:
    """What compiled graphs depend on: the code generator, and the references that decompositions trace."""
    return [path for file in (__file__, meta.__file__) for path in sorted(Path(file).parent.glob("*.py"))]


def register() -> None:
    """Register the device with Inductor."""
    if identity.name == "cuda":  # whose default is Triton
        config.cuda_backend = "cpp"
    adapt.apply()
    common.register_device_op_overrides(identity.name, DeviceOverrides())
    if hasattr(cpp_utils, "DEVICE_TO_ATEN"):  # torch 2.13 and 2.14
        cpp_utils.DEVICE_TO_ATEN[identity.name] = DeviceOverrides().aten_device_type()
    common.register_backend_for_device(
        identity.name, Scheduling, PythonWrapper, CppWrapper, device_custom_pass=CacheKey()
    )
