"""Why the device has no kernel for the other operators that PyTorch implements only for CUDA."""

from __future__ import annotations

__all__ = ["MISSING", "REASONS"]

#: A reason, and the operators that have it. docs/limits.md shows this table.
REASONS: dict[str, tuple[str, ...]] = {
    "PyTorch calls cuDNN here, which only CUDA has; call the operator's function in torch.nn.functional": (
        "_cudnn_attention_backward",
        "_cudnn_attention_forward",
        "_cudnn_attention_forward_no_dropout_inplace",
        "_cudnn_ctc_loss",
        "_cudnn_ctc_loss.Tensor",
        "_cudnn_init_dropout_state",
        "_cudnn_rnn",
        "_cudnn_rnn_backward",
        "_cudnn_rnn_flatten_weight",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "cudnn_affine_grid_generator",
        "cudnn_affine_grid_generator_backward",
        "cudnn_batch_norm",
        "cudnn_batch_norm.out",
        "cudnn_batch_norm_backward",
        "cudnn_convolution",
        "cudnn_convolution.out",
        "cudnn_convolution_add_relu",
        "cudnn_convolution_relu",
        "cudnn_convolution_transpose",
        "cudnn_grid_sampler",
        "cudnn_grid_sampler_backward",
    ),
    "PyTorch calls MIOpen here, which only ROCm has; call the operator's function in torch.nn.functional": (
        "miopen_batch_norm",
        "miopen_batch_norm_backward",
        "miopen_convolution",
        "miopen_convolution_add_relu",
        "miopen_convolution_relu",
        "miopen_convolution_transpose",
        "miopen_ctc_loss",
        "miopen_ctc_loss.Tensor",
        "miopen_depthwise_convolution",
        "miopen_rnn",
        "miopen_rnn_backward",
    ),
    "2:4 sparsity uses formats of NVIDIA's tensor cores; multiply the dense matrix, which has the same product": (
        "_cslt_compress",
        "_cslt_sparse_mm",
        "_cslt_sparse_mm_search",
        "_sparse_semi_structured_addmm",
        "_sparse_semi_structured_apply",
        "_sparse_semi_structured_apply_dense",
        "_sparse_semi_structured_linear",
        "_sparse_semi_structured_mm",
        "_sparse_semi_structured_tile",
        "_to_sparse_semi_structured",
    ),
    "It launches a Triton kernel written for CUDA; call torch.nn.functional.scaled_dot_product_attention": (
        "_triton_multi_head_attention",
        "_triton_scaled_dot_attention",
    ),
    "Attention in 8-bit floats runs only on Hopper GPUs; convert query, key and value to a half type": (
        "_flash_attention_forward.quantized",
        "_scaled_dot_product_flash_attention.quantized",
    ),
    "It shows the random numbers of CUDA's attention to PyTorch's own tests": ("_fill_mem_eff_dropout_mask_",),
    "No function of PyTorch calls it, and its weights have an interleaved layout that PyTorch does not define; call "
    "_weight_int8pack_mm, or dequantize the weight": ("_mixed_dtypes_linear",),
    "It scales, multiplies and adds in one kernel; call torch.nn.functional.scaled_mm and add its result": (
        "_scaled_addmm",
        "_scaled_addmm.out",
        "_scaled_addmm_",
    ),
    "No function of PyTorch calls it; call torch.nn.functional.scaled_grouped_mm": ("_scaled_grouped_mm_v2.out",),
    "No function of PyTorch calls it; draw with a torch.Generator": (
        "_philox_key_fold_in",
        "_philox_key_split",
        "_philox_normal_",
        "_philox_uniform_",
    ),
}

#: The reason of each operator.
MISSING = {f"aten::{name}": reason for reason, names in REASONS.items() for name in names}
