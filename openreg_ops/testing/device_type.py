"""The device in PyTorch's generic device-type tests (torch.testing._internal.common_device_type).

PyTorch's own test files run on the device with ``TORCH_TEST_DEVICES=openreg_ops/testing/device_type.py``
in the environment; our test files call `install` and then `instantiate_device_type_tests`. The lists here say what the
device does not run, or runs with another precision. See docs/device-type-tests.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal import common_device_type
from torch.testing._internal.common_device_type import PrivateUse1TestBase

import openreg_ops  # noqa: F401


class OpenregTestBase(PrivateUse1TestBase):
    """Instantiates generic tests for the device, except those that the lists below block."""

    # Test class -> names of generic tests, or of a test with its operator and dtype; "*" is the whole class.
    blocked_tests: dict[str, set[str]] = {
        # It fills by an index on the CPU, which no device accepts; on CUDA the test returns before that.
        "TestSortAndSelect": {"test_stable_sort_against_numpy"},
        "TestTorchDeviceType": {
            # map_ and map2_ call Python for each element; they support CPU tensors only.
            "test_broadcast_fn_map_openreg",
            "test_broadcast_fn_map2_openreg",
            # They expect the CPU's types, such as torch.FloatTensor, on every device except CUDA.
            "test_grad_scaler_deprecated_warning",
            "test_grad_scaling_state_dict",
            "test_tensor_storage_type",
        },
        "TestNNDeviceType": {
            # It expects the fast path, and its NaN for fully masked rows, only on the CPU and CUDA.
            "test_transformerencoderlayer_openreg_float32",
            "test_transformerencoderlayer_openreg_float64",
        }
        # They expect an error for uint8, which the CPU's kernels accept, on every device except the CPU.
        | {
            f"test_upsamplingBiMode2d_nonsupported_dtypes_antialias_{antialias}_num_channels_{channels}_mode_{mode}_uint8"
            "_openreg_uint8"
            for antialias in (True, False)
            for channels in (3, 5)
            for mode in ("bilinear", "bicubic")
        },
        # They expect the CPU's int4 format, lstsq drivers and bfloat16 only for "cpu", and CUDA's for other devices.
        "TestLinalg": {
            "test__int4_mm",
            "test_compile_int4_mm",
            "test_addbmm_openreg_bfloat16",
            "test_linalg_lstsq_input_checks",
        },
        # They expect the dispatcher's message for a missing operator, and result files named by device.
        "TestSparse": {"test_empty_like", "test_print_coalesced", "test_print_uncoalesced"},
        "TestSparseCompressed": {
            "test_print",
            # The CPU has no such kernel either, but the test is skipped there.
            "test_consistency_SparseCSR_mul_openreg_bool",
        }
        # For lists, without a device, they expect a tensor on a device other than the CPU; PyTorch skips them on
        # "cuda".
        | {
            f"test_sparse_compressed_constructor_shape_and_device_inference_{made}_from_list_{layout}_openreg_{dtype}"
            for made in ("factory", "_")
            for layout in ("SparseCSR", "SparseCSC", "SparseBSR", "SparseBSC")
            for dtype in ("bool", "complex64", "float32", "int64")
        },
        "TestSparseCSR": {
            # On "cpu" it leaves out what the CPU's kernel rejects here too: unitriangular block matrices.
            "test_block_triangular_solve",
            # PyTorch expects them to fail on "cpu": some of their samples are vectors.
            "test_sparse_csr_unary_inplace_abs_openreg_complex64",
            "test_sparse_csr_unary_out_abs_openreg_complex64",
        },
        # With its seed, a product of random numbers exceeds float16's tolerance; with another seed it passes.
        "TestMasked": {"test_mask_layout_sparse_coo_masked_prod_openreg_float16"},
        # The CPU's vector and scalar pow overflow to NaN in different elements: PyTorch skips it on "cpu" as flaky.
        "TestForeach": {"test_parity__foreach_pow_slowpath_inplace_openreg_complex64"},
        # The CPU has no such kernel either, but the test is skipped there.
        "TestSparseAny": {
            "test_binary_operation_mul_SparseCOO_openreg_bool",
            "test_binary_operation_mul_SparseCSR_openreg_bool",
        },
        "TestBinaryUfuncs": {
            # They expect an error only on "cpu", but this device raises it too: integer division by zero, powers of
            # complex32.
            "test_complex_scalar_pow_tensor_openreg_float16",
            "test_fmod_remainder_by_zero_integral",
            "test_pow_openreg_float16",
            # torch._refs.copysign does not accept a scalar CPU tensor with a tensor on another device.
            "test_type_promotion__refs_copysign_openreg",
        },
    }

    # No test is made for these dtypes.
    unsupported_dtypes: set[torch.dtype] = set()

    # dtype -> (atol, rtol) for tests that give none; other dtypes use PyTorch's own.
    tolerances: dict[torch.dtype, tuple[float, float]] = {}

    @classmethod
    def _capabilities(cls) -> dict[str, Callable[[], bool]]:
        """What `@requires_capabilities` of torch 2.15 asks for, under the names of its class Capability."""
        return {
            "dtype.fp8": lambda: True,
            "dtype.bf16": lambda: True,
            "attention.flash_attention": lambda: True,
            "attention.mem_efficient_attention": lambda: True,
        }

    @classmethod
    def instantiate_test(cls, name: str, test: Callable, *, generic_cls: type | None = None) -> None:
        blocked = cls.blocked_tests.get(generic_cls.__name__, set()) if generic_cls else set()
        if name in blocked or "*" in blocked:
            return
        before = set(vars(cls))
        super().instantiate_test(name, test, generic_cls=generic_cls)
        suffixes = tuple(f"_{str(dtype).removeprefix('torch.')}" for dtype in cls.unsupported_dtypes)
        for made in set(vars(cls)) - before:
            if made in blocked or (suffixes and made.endswith(suffixes)):
                delattr(cls, made)

    def _get_tolerance_override(self, test: Callable, dtype: torch.dtype) -> Any:
        if not hasattr(test, "tolerance_overrides") and dtype in self.tolerances:
            return self.tolerances[dtype]
        return super()._get_tolerance_override(test, dtype)


def install(base: type[PrivateUse1TestBase] = OpenregTestBase) -> None:
    """Make `base` what `instantiate_device_type_tests` uses for the device."""
    common_device_type.device_type_test_bases[:] = [
        other for other in common_device_type.device_type_test_bases if not issubclass(other, PrivateUse1TestBase)
    ] + [base]


TEST_CLASS = OpenregTestBase

if __name__ == "<run_path>":  # TORCH_TEST_DEVICES runs this file this way, and appends TEST_CLASS itself
    install()
    common_device_type.device_type_test_bases.remove(TEST_CLASS)
