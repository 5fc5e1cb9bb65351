"""Registers the parts of this package when PyTorch loads Dynamo and Inductor. Importing openreg_ops loads neither."""

from __future__ import annotations

import ctypes

from openreg_ops import _C
from openreg_ops.inductor import backend, convolution, higher_order
from openreg_ops.torch_patches.import_hooks import after_import


def _register_interface() -> None:
    from openreg_ops.inductor import dynamo

    dynamo.register_interface()


def _register_context_manager() -> None:
    from openreg_ops.inductor import dynamo

    dynamo.register_context_manager()


def _register_inductor() -> None:
    from openreg_ops.inductor import codegen, operators

    codegen.register()
    operators.register()


def register() -> None:
    """Register the device with Dynamo and Inductor as soon as they are imported."""
    higher_order.register_autocast()
    convolution.register()
    for name, call in (
        ("torch._dynamo.backends.registry", backend.register),
        ("torch._dynamo.device_interface", _register_interface),
        ("torch._dynamo.variables.ctx_manager", _register_context_manager),
        ("torch._prims.rng_prims", higher_order.register_random_state),
        ("torch.nn.attention.flex_attention", higher_order.register_flex_attention),
        ("torch._inductor.compile_fx", _register_inductor),
    ):
        after_import(name, call)
    # Generated code calls openreg_launch; csrc/backend/inductor.h.
    ctypes.CDLL(_C.__file__, ctypes.RTLD_GLOBAL)
