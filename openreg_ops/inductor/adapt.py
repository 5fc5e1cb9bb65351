"""Where Inductor's own code must be adapted to the device. Each function below is one adaptation: it replaces what its
decorator names, and says what goes wrong without it; tests/inductor/test_adapt.py has a test of the same name for each.

Written against torch 2.13 and 2.15. A new version of torch is checked here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import codecache, config, ir, lowering, scheduler
from torch._inductor.utils import sympy_product


@dataclasses.dataclass
class Adaptation:
    """`make`, given the original, returns what takes its place as ``owner.name``."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    original: Any


ADAPTATIONS: dict[str, Adaptation] = {}


def replaces(owner: Any, name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register the decorated function as the adaptation of ``owner.name``."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        ADAPTATIONS[make.__name__] = Adaptation(owner, name, make, getattr(owner, name))
        return make

    return register


def apply() -> None:
    """Put all adaptations in place."""
    for each in ADAPTATIONS.values():
        setattr(each.owner, each.name, each.make(each.original))


@replaces(ir, "is_cpu")
def cpu_heuristics(original: Any) -> Any:
    """What is computed once and kept, and what again in each kernel that needs it: as for the CPU.

    Else every user of exp, sigmoid and their like computes them again; softmax takes exp twice.
    """
    return lambda x: ir.get_device_type(x) in ("cpu", "openreg")


@replaces(scheduler.BaseSchedulerNode, "is_cpu")
def no_loop_reordering(original: Any) -> Any:
    """Fusion reorders and inverts loops on every device but the CPU, whose code generator cannot take them."""
    return lambda node: (device := node.get_device()) is not None and device.type in ("cpu", "openreg")


@replaces(lowering, "use_two_step_variance")
def two_step_variance(original: Any) -> Any:
    """Variances of short rows in two passes, as for the CPU, and not by Welford's method, which is slower in C++."""

    def use_two_step_variance(x: Any, axis: Any, keepdim: bool, **more: Any) -> bool:
        if x.get_device().type != "openreg":
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


@replaces(lowering, "_make_reduction_inner")
def logical_argmax(original: Any) -> Any:
    """argmax and argmin over several dimensions count elements in the order of indices.

    Devices that Inductor does not know get the order in memory instead: ``x.t().argmax()`` is wrong.
    """
    get_device_type = ir.get_device_type

    def make_reduction_inner(x: Any, **arguments: Any) -> Any:
        with patch.object(ir, "get_device_type", lambda x: _as_cpu(get_device_type(x))):
            return original(x, **arguments)

    return make_reduction_inner


@replaces(lowering, "get_constant_value")
def exact_division(original: Any) -> Any:
    """Division by a constant divides, as eager mode and the CPU do; for other devices Inductor multiplies by 1/c."""

    def get_constant_value(x: Any) -> Any:
        ours = isinstance(x, ir.IRNode) and ir.get_device_type(x) == "openreg"
        return None if ours else original(x)

    return get_constant_value


@replaces(lowering, "pointwise_cat")
def vectorised_cat(original: Any) -> Any:
    """cat writes each input to its place. The one expression made for other devices is not vectorised in C++."""

    def pointwise_cat(inputs: Any, dim: int = 0) -> Any:
        if inputs[0].get_device().type != "openreg":
            return original(inputs, dim)
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))

    return pointwise_cat


@replaces(lowering, "_pad_as_cat")
def pad_in_one_kernel(original: Any) -> Any:
    """Padding on the right is one kernel, as for the CPU; as a cat, which other devices take, it is two."""
    return lambda x, *rest: None if x.get_device().type == "openreg" else original(x, *rest)


def _on_cpu(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or x.device.type != "openreg":
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


@replaces(torch._C, "_select_conv_backend")
def conv_backend(original: Any) -> Any:
    """FakeTensor asks which kernel a convolution will run, to know its result's strides: the CPU's, here too.

    It expects contiguous results of convolution_overrideable; the graph's own check of strides then fails.
    """

    def select_conv_backend(x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        if "bias" in options:
            options["bias"] = _on_cpu(options["bias"])
        return original(_on_cpu(x), _on_cpu(weight), *args, **options)

    return select_conv_backend


@replaces(torch._C, "_conv_determine_backend_memory_format")
def conv_memory_format(original: Any) -> Any:
    """And in which memory format: the CPU's small kernels keep channels_last on CPU tensors only."""
    return lambda x, weight, backend: original(_on_cpu(x), _on_cpu(weight), backend)


@replaces(codecache, "_precompile_header")
def no_precompiled_header(original: Any) -> Any:
    """AOTInductor compiles a header for the device beforehand; there is none of this one's name."""
    return lambda *args, **options: None if options.get("device_type") == "openreg" else original(*args, **options)


def _as_cpu(device_type: str | None) -> str | None:
    return "cpu" if device_type == "openreg" else device_type
