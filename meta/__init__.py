"""What each openreg:: operator means: its signature with documentation, fake kernel and plain reference."""

from openreg_ops.meta.cross_entropy import cross_entropy, cross_entropy_backward
from openreg_ops.meta.custom_abs import custom_abs
from openreg_ops.meta.custom_autograd_fn_aliasing import custom_autograd_fn_aliasing
from openreg_ops.meta.custom_autograd_fn_returns_self import custom_autograd_fn_returns_self
from openreg_ops.meta.dropout_add import dropout_add, dropout_add_backward
from openreg_ops.meta.fused_add_rms_norm import fused_add_rms_norm, fused_add_rms_norm_backward
from openreg_ops.meta.int8_linear import int8_linear
from openreg_ops.meta.quantize_rowwise import dequantize_rowwise, quantize_rowwise
from openreg_ops.meta.rms_norm import rms_norm, rms_norm_backward
from openreg_ops.meta.rotary_embedding import rotary_embedding, rotary_embedding_backward
from openreg_ops.meta.swiglu import swiglu, swiglu_backward

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "custom_abs",
    "custom_autograd_fn_aliasing",
    "custom_autograd_fn_returns_self",
    "dequantize_rowwise",
    "dropout_add",
    "dropout_add_backward",
    "fused_add_rms_norm",
    "fused_add_rms_norm_backward",
    "int8_linear",
    "quantize_rowwise",
    "rms_norm",
    "rms_norm_backward",
    "rotary_embedding",
    "rotary_embedding_backward",
    "swiglu",
    "swiglu_backward",
]
