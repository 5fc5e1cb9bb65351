"""torch.compile for the device: Dynamo's device interface, and Inductor's C++ kernels run on device memory.

Users need nothing of it but `decompositions`. Importing this package loads neither Dynamo nor Inductor (two seconds):
the parts register themselves when PyTorch loads those.

    backend.py   torch.compile(backend="openreg")
    dynamo.py    what Dynamo asks a device: streams, events, current device
    operators.py what becomes of custom operators
    codegen.py   what Inductor generates for the device: kernels that go through launch(), and the wrappers
    higher_order.py  operators that take functions, such as flex_attention
    convolution.py   the strides of a convolution's result in graphs
    adapt.py     where Inductor's own code must be adapted, one function each, pinned to versions of torch; it names
                 the few other places that are
"""

from __future__ import annotations

import ctypes

from openreg_ops import _C
from openreg_ops.imports import after_import
from openreg_ops.inductor import backend, convolution, higher_order

# The operators that Inductor takes apart, with their backward, and fuses with what stands around them; of the others,
# and in eager mode, the device's own kernel runs. May be changed at any time, for the graphs compiled from then on;
# "rms_norm" may be added, another name is an error. The default is what is faster:
# `python -m openreg_ops bench compiled --only decompositions`.
decompositions: set[str] = {"rotary_embedding", "swiglu"}


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
    """Arrange that the device is known to Dynamo and Inductor as soon as they are there."""
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
