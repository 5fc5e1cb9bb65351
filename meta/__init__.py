"""What each openreg:: operator means: its signature with documentation, fake kernel and plain reference."""

from openreg_ops.meta.adamw_step_ import adamw_step_
from openreg_ops.meta.custom_abs import custom_abs
from openreg_ops.meta.custom_autograd_fn_aliasing import custom_autograd_fn_aliasing
from openreg_ops.meta.custom_autograd_fn_returns_self import custom_autograd_fn_returns_self
from openreg_ops.meta.grouped_linear import grouped_linear, grouped_linear_backward
from openreg_ops.meta.kv_cache_update import kv_cache_update, kv_cache_update_
from openreg_ops.meta.nms import nms
from openreg_ops.meta.rms_norm import rms_norm, rms_norm_backward
from openreg_ops.meta.swiglu import swiglu, swiglu_backward

__all__ = [
    "adamw_step_",
    "custom_abs",
    "custom_autograd_fn_aliasing",
    "custom_autograd_fn_returns_self",
    "grouped_linear",
    "grouped_linear_backward",
    "kv_cache_update",
    "kv_cache_update_",
    "nms",
    "rms_norm",
    "rms_norm_backward",
    "swiglu",
    "swiglu_backward",
]
