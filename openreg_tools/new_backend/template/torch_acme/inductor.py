"""torch.compile: Dynamo's interface to the device, and Inductor's C++ kernels on device memory. Rung 10.

Documents: the four end where compilers begin ("Extending dispatcher for a new backend in C++", section "JIT support").

A kernel of CPU Inductor is a C++ function of pointers and sizes. Here its body becomes a function that the stream's
thread calls, with pointers from acme_local(). The function of the original name packs the arguments in a struct and
passes both to acme_launch_generated(), in csrc/inductor.cpp. A vendor with a compiler replaces this by its own.

torch_acme/device.py imports this file when Inductor needs it.
"""

import ctypes
from typing import Any

import torch
from torch._dynamo import device_interface
from torch._inductor import ir, lowering, scheduler
from torch._inductor.codegen import common, cpp, cpp_utils, wrapper
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen  # noqa: F401
from torch._inductor.utils import Placeholder
from torch._inductor.virtualized import V

from torch_acme import _C, device

CPU = torch.device("cpu")
EXPORT = f'extern "C" {cpp.get_export_declaration()} void'


class Interface(device_interface.DeviceInterface):
    """Dynamo's names for the functions of torch.acme."""

    device, Stream, Event = device.device, torch.Stream, torch.Event
    maybe_exchange_device = exchange_device = staticmethod(_C.exchange_device)
    get_compute_capability = staticmethod(lambda device=None: 0)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    get_raw_stream = staticmethod(lambda index: device.current_stream(index).native_handle)

    class Worker:
        """The methods that Inductor's compile processes call; these processes do not use the device."""


for name in "is_available device_count synchronize stream current_stream set_stream memory_allocated".split():
    setattr(Interface, name, staticmethod(getattr(device, name)))
for name in ("set_device", "current_device", "get_device_properties"):
    setattr(Interface, name, staticmethod(getattr(device, name)))
    setattr(Interface.Worker, name, staticmethod(getattr(device, name)))


# ---- kernels ----


class KernelArgs(common.KernelArgs):
    """A kernel's arguments; the last is the device's index, once `device` is set."""

    device: torch.device | None = None

    def cpp_argdefs(self, *args: Any) -> tuple[list[str], list[str], list[str]]:
        definitions, values, types = super().cpp_argdefs(*args)
        if self.device is None:
            return definitions, values, types
        return [*definitions, "const int64_t device"], [*values, str(self.device.index)], [*types, "const int64_t"]

    def host_scalars(self) -> set[str]:
        """The arguments that are 0-dim tensors on the CPU: they are read at the launch."""
        buffers = {inner: V.graph.try_get_buffer(outer) for outer, inner in self.input_buffers.items()}
        return {inner for inner, x in buffers.items() if x is not None and ir.get_device_type(x) == "cpu"}


class Group(cpp.KernelGroup):
    """Kernels that are fused to one function."""

    def __init__(self) -> None:
        super().__init__()
        self.args = KernelArgs()

    def codegen_group(self, name: str | None = None) -> str:
        source = super().codegen_group(name)
        parameters = self.args.cpp_argdefs()[0]
        self.args.device = self.device if source else None
        kernel = str(Placeholder.KERNEL_NAME) if name is None else name
        return launched(source, kernel, parameters, self.args.host_scalars()) if source else ""

    def call_kernel(self, wrapper: Any, kernel_name: str) -> None:
        _, values, types = self.args.cpp_argdefs()
        wrapper.generate_kernel_call(
            kernel_name, values, triton=False, arg_types=types, device=CPU
        )  # as one of the CPU


def launched(source: str, kernel: str, parameters: list[str], host_scalars: set[str]) -> str:
    """The source of a kernel for the CPU, as the source of a function that launches it."""
    fields, values, uses = [], [], []
    for parameter in parameters:
        type_, name = parameter.rsplit(" ", 1)
        scalar, pointer = name in host_scalars, type_.endswith("*")
        fields.append(f"{type_.removeprefix('const ').removesuffix('*') if scalar else type_} {name};")
        values.append(f"*{name}" if scalar else name)
        uses.append(f"&a.{name}" if scalar else f"({type_})acme_local(a.{name})" if pointer else f"a.{name}")
    body = source.replace(EXPORT, "static void", 1).replace(f" {kernel}(", f" {kernel}_body(", 1)
    return f"""{body}
extern "C" void acme_launch_generated(int64_t, void (*)(const void*), const void*, size_t, const char*);
extern "C" void* acme_local(const void*);
{EXPORT} {kernel}({", ".join([*parameters, "const int64_t device"])})
{{
    struct Arguments {{ {" ".join(fields)} }} arguments{{{", ".join(values)}}};
    acme_launch_generated(device, [](const void* pointer) {{
        const auto& a = *static_cast<const Arguments*>(pointer);
        {kernel}_body({", ".join(uses)});
    }}, &arguments, sizeof(arguments), "{Placeholder.DESCRIPTIVE_NAME}");
}}
"""


class Scheduling(cpp.CppScheduling):
    def reset_kernel_group(self) -> None:
        self.kernel_group = Group()

    def codegen_node(self, node: Any) -> None:
        self.kernel_group.device = node.get_device()
        with V.graph.set_current_device(CPU):
            super().codegen_node(node)


# ---- wrappers: the code that calls kernels and operators ----


class PythonWrapperCodegen(wrapper.PythonWrapperCodegen):
    @staticmethod
    def create(is_subgraph: bool, name: Any, parent: Any, signatures: Any = None) -> Any:
        if is_subgraph:
            return wrapper.SubgraphPythonWrapperCodegen(name, parent, signatures)
        return PythonWrapperCodegen()

    def generate_fallback_kernel(self, node: Any) -> None:
        for backend in V.graph.scheduler.backends.values():
            backend.flush()  # writes the kernels before it
        super().generate_fallback_kernel(node)


class CppWrapperCodegen:
    @staticmethod
    def create(*_args: Any) -> Any:
        raise NotImplementedError("acme: the C++ wrapper and AOTInductor are not supported; set cpp_wrapper=False")


class Lines(common.DeviceOpOverrides):
    """Lines that Inductor writes into wrappers."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"def {name}(_):\n    return 0\n"

    def set_device(self, index: int) -> str:
        return f"torch.acme.set_device({index})"

    def synchronize(self) -> str:
        return "torch.acme.synchronize()"

    def device_guard(self, index: int) -> str:
        return f"torch.acme.device({index})"


device_interface.device_interfaces["acme"] = Interface
common.register_device_op_overrides("acme", Lines())
if hasattr(cpp_utils, "DEVICE_TO_ATEN"):  # torch 2.13 and 2.14
    cpp_utils.DEVICE_TO_ATEN["acme"] = "at::kPrivateUse1"
ctypes.CDLL(_C.__file__, ctypes.RTLD_GLOBAL)  # where generated code finds acme_launch_generated()

# Inductor treats devices that it does not know as GPUs, whose kernels its C++ code generator cannot write.
scheduler.BaseSchedulerNode.is_cpu = lambda node: (on := node.get_device()) is not None and on.type in ("cpu", "acme")
ir.is_cpu = lambda x: ir.get_device_type(x) in ("cpu", "acme")
_is_gpu = lowering.is_gpu
lowering.is_gpu = lambda name: name == "acme" or _is_gpu(name)  # where a kernel with a CPU scalar has its result
