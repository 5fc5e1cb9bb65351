"""torch.compile: Dynamo's interface to the device, and Inductor's C++ kernels on device memory. Rung 10.

Documents: the four end where compilers begin ("Extending dispatcher for a new backend in C++", section "JIT support").

A kernel of CPU Inductor is a C++ function of pointers and sizes. Here its body becomes a function that the stream's
thread calls, with pointers from acme_local(). The function of the original name packs the arguments in a struct and
passes both to acme_launch_generated(), in csrc/inductor.cpp. A vendor with a compiler replaces this by its own.
"""

import ctypes
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import torch

from torch_acme import _C, device


def _register_dynamo() -> None:
    from torch._dynamo import device_interface

    class Interface(device_interface.DeviceInterface):
        device, Stream, Event = device.device, torch.Stream, torch.Event

        class Worker:  # for Inductor's compile processes, which do not use the device
            set_device = staticmethod(device.set_device)
            current_device = staticmethod(device.current_device)
            get_device_properties = staticmethod(device.get_device_properties)

        @staticmethod
        def maybe_exchange_device(index: int) -> int:
            return _C.exchange_device(index)

        @staticmethod
        def get_raw_stream(index: int) -> int:
            return device.current_stream(index).native_handle

        @staticmethod
        def get_compute_capability(device: Any = None) -> int:
            return 0

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

    names = "is_available device_count current_device set_device synchronize stream current_stream set_stream"
    for name in (*names.split(), "memory_allocated"):
        setattr(Interface, name, staticmethod(getattr(device, name)))
    Interface.exchange_device = staticmethod(_C.exchange_device)
    device_interface.device_interfaces["acme"] = Interface


def _register_inductor() -> None:
    from torch._inductor import ir, lowering, scheduler
    from torch._inductor.codegen import common, cpp, cpp_utils, wrapper
    from torch._inductor.utils import Placeholder
    from torch._inductor.virtualized import V

    cpu = torch.device("cpu")

    class Group(cpp.KernelGroup):
        """Kernels that are fused to one function."""

        def codegen_group(self, name: str | None = None) -> str:
            source = super().codegen_group(name)
            kernel = str(Placeholder.KERNEL_NAME) if name is None else name
            return _launched(source, kernel, self.args.cpp_argdefs()[0], _host_scalars(self.args)) if source else ""

        def call_kernel(self, wrapper: Any, kernel_name: str) -> None:
            _, values, types = self.args.cpp_argdefs()
            # The wrapper knows how to call kernels of the CPU.
            wrapper.generate_kernel_call(
                kernel_name,
                [*values, str(self.device.index)],
                triton=False,
                arg_types=[*types, "const int64_t"],
                device=cpu,
            )

    def _host_scalars(args: Any) -> set[str]:
        """The arguments that are 0-dim tensors on the CPU: they are read at the launch."""
        buffers = {inner: V.graph.try_get_buffer(outer) for outer, inner in args.input_buffers.items()}
        return {
            inner for inner, buffer in buffers.items() if buffer is not None and ir.get_device_type(buffer) == "cpu"
        }

    class Scheduling(cpp.CppScheduling):
        def reset_kernel_group(self) -> None:
            self.kernel_group = Group()

        def codegen_node(self, node: Any) -> None:
            self.kernel_group.device = node.get_device()
            with V.graph.set_current_device(cpu):
                super().codegen_node(node)

    class Wrapper(wrapper.PythonWrapperCodegen):
        @staticmethod
        def create(is_subgraph: bool, name: Any, parent: Any, signatures: Any = None) -> Any:
            return wrapper.SubgraphPythonWrapperCodegen(name, parent, signatures) if is_subgraph else Wrapper()

        def generate_fallback_kernel(self, node: Any) -> None:
            for backend in V.graph.scheduler.backends.values():
                backend.flush()  # the kernels before it
            super().generate_fallback_kernel(node)

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

        def aten_device_type(self) -> str:  # torch 2.15
            return "at::kPrivateUse1"

        def current_stream(self) -> str:
            return "torch.acme.current_stream()"

    common.register_device_op_overrides("acme", Lines())
    if hasattr(cpp_utils, "DEVICE_TO_ATEN"):  # torch 2.13 and 2.14
        cpp_utils.DEVICE_TO_ATEN["acme"] = "at::kPrivateUse1"
    common.register_backend_for_device("acme", Scheduling, Wrapper)
    # Inductor treats devices that it does not know as GPUs, whose kernels its C++ code generator cannot write.
    scheduler.BaseSchedulerNode.is_cpu = lambda node: (
        (on := node.get_device()) is not None and on.type in ("cpu", "acme")
    )
    ir.is_cpu = lambda x: ir.get_device_type(x) in ("cpu", "acme")
    is_gpu = lowering.is_gpu
    lowering.is_gpu = lambda name: name == "acme" or is_gpu(name)  # the result of a kernel with a CPU scalar is here


def _launched(source: str, kernel: str, parameters: list[str], host_scalars: set[str]) -> str:
    """The source of a kernel for the CPU, as the source of a function that launches it."""
    from torch._inductor.codegen import cpp

    export = f'extern "C" {cpp.get_export_declaration()} void'
    body = source.replace(export, "static void", 1).replace(f" {kernel}(", f" {kernel}_body(", 1)
    fields, values, uses = [], [], []
    for parameter in parameters:
        type_, name = parameter.rsplit(" ", 1)
        scalar, pointer = name in host_scalars, type_.endswith("*")
        fields.append(f"{type_.removeprefix('const ').removesuffix('*') if scalar else type_} {name};")
        values.append(f"*{name}" if scalar else name)
        uses.append(f"&a.{name}" if scalar else f"({type_})acme_local(a.{name})" if pointer else f"a.{name}")
    return f"""{body}
extern "C" void acme_launch_generated(int64_t, void (*)(const void*), const void*, size_t, const char*);
extern "C" void* acme_local(const void*);
{export} {kernel}({", ".join([*parameters, "const int64_t device"])})
{{
    struct Arguments {{ {" ".join(fields)} }} arguments{{{", ".join(values)}}};
    acme_launch_generated(device, [](const void* pointer) {{
        const auto& a = *static_cast<const Arguments*>(pointer);
        {kernel}_body({", ".join(uses)});
    }}, &arguments, sizeof(arguments), "{kernel}");
}}
"""


class _AfterImport(MetaPathFinder):
    """Calls a function when PyTorch has imported a module, because importing Dynamo or Inductor here takes seconds."""

    calls = {"torch._dynamo.device_interface": _register_dynamo, "torch._inductor.compile_fx": _register_inductor}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.calls:
            return None
        call = self.calls.pop(name)
        spec = next(found for finder in sys.meta_path[1:] if (found := finder.find_spec(name, path, target)))
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            call()

        spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    finder = _AfterImport()
    for name in [name for name in finder.calls if name in sys.modules]:
        finder.calls.pop(name)()
    sys.meta_path.insert(0, finder)
    ctypes.CDLL(_C.__file__, ctypes.RTLD_GLOBAL)  # generated code finds acme_launch_generated() in it
