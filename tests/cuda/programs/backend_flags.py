"""torch.backends.cudnn and torch.backends.cuda: flags are remembered, contexts restore them, results stay right."""

import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
torch.manual_seed(0)
images, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
expected = F.conv2d(images, weight)


def check(tolerance=1e-3):
    torch.testing.assert_close(F.conv2d(images.cuda(), weight.cuda()).cpu(), expected, rtol=tolerance, atol=tolerance)


assert cudnn.enabled and (not cudnn.is_available() or cudnn.version() > 8000)
cudnn.benchmark, cudnn.deterministic = True, True
assert cudnn.benchmark and cudnn.deterministic
check(2e-2)
with cudnn.flags(enabled=False, benchmark=False, deterministic=False, allow_tf32=False):
    assert not cudnn.enabled and not cudnn.benchmark and not cudnn.deterministic and not cudnn.allow_tf32
    check()
assert cudnn.enabled and cudnn.benchmark and cudnn.deterministic and cudnn.allow_tf32
cudnn.allow_tf32 = False
check()

a, b = torch.randn(16, 16), torch.randn(16, 16)
for allow in (True, False):
    cuda.matmul.allow_tf32 = allow
    assert cuda.matmul.allow_tf32 == allow and torch.get_float32_matmul_precision() == ("high" if allow else "highest")
    tolerance = 5e-2 if allow else 1e-4
    torch.testing.assert_close((a.cuda() @ b.cuda()).cpu(), a @ b, rtol=tolerance, atol=tolerance)
torch.set_float32_matmul_precision("high")
assert cuda.matmul.allow_tf32
torch.set_float32_matmul_precision("highest")
cuda.matmul.allow_fp16_reduced_precision_reduction = False
assert not cuda.matmul.allow_fp16_reduced_precision_reduction
cuda.matmul.allow_bf16_reduced_precision_reduction = True

assert cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.math_sdp_enabled()
q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
plain = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    with cuda.sdp_kernel(enable_flash=False, enable_math=True, enable_mem_efficient=False):
        assert not cuda.flash_sdp_enabled() and cuda.math_sdp_enabled()
        result = F.scaled_dot_product_attention(q.cuda(), k.cuda(), v.cuda())
torch.testing.assert_close(result.cpu(), plain, rtol=1e-3, atol=1e-4)
with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
    assert cuda.flash_sdp_enabled() and not cuda.math_sdp_enabled()
cuda.enable_flash_sdp(False)
assert not cuda.flash_sdp_enabled()
cuda.enable_flash_sdp(True)
cuda.cufft_plan_cache.clear()
cuda.cufft_plan_cache[0].max_size = 10
assert cuda.cufft_plan_cache[0].max_size == 10 and cuda.cufft_plan_cache.size >= 0
signal = torch.randn(3, 32)
torch.testing.assert_close(torch.fft.rfft(signal.cuda()).cpu(), torch.fft.rfft(signal), rtol=1e-4, atol=1e-4)
torch.backends.cuda.preferred_linalg_library("cusolver")
matrix = torch.randn(5, 5, dtype=torch.float64)
torch.testing.assert_close(torch.linalg.inv(matrix.cuda()).cpu(), torch.linalg.inv(matrix))
torch.use_deterministic_algorithms(True)
index = torch.tensor([0, 1, 1, 0, 2])
total = torch.zeros(3, device="cuda").index_add_(0, index.cuda(), torch.arange(5.0).cuda())
assert total.tolist() == [3.0, 3.0, 4.0] and torch.are_deterministic_algorithms_enabled()
