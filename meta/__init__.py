"""What each openreg:: operator means: its signature with documentation, fake kernel and plain reference."""

from openreg_ops.meta.cross_entropy import cross_entropy, cross_entropy_backward
from openreg_ops.meta.custom_abs import custom_abs
from openreg_ops.meta.custom_autograd_fn_aliasing import custom_autograd_fn_aliasing
from openreg_ops.meta.custom_autograd_fn_returns_self import custom_autograd_fn_returns_self
from openreg_ops.meta.fake_quantize import fake_quantize, fake_quantize_backward
from openreg_ops.meta.rms_norm import rms_norm, rms_norm_backward
from openreg_ops.meta.scale_gradient import scale_gradient
from openreg_ops.meta.swiglu import swiglu, swiglu_backward

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "custom_abs",
    "custom_autograd_fn_aliasing",
    "custom_autograd_fn_returns_self",
    "fake_quantize",
    "fake_quantize_backward",
    "rms_norm",
    "rms_norm_backward",
    "scale_gradient",
    "swiglu",
    "swiglu_backward",
]
