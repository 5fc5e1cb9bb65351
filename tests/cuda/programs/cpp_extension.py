"""A C++ extension for CUDA tensors without CUDA code, built while the program runs."""

import os
import tempfile

import torch
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <torch/extension.h>
#include <ATen/DeviceGuard.h>
#include <c10/core/DeviceGuard.h>

#define CHECK_CUDA(x) TORCH_CHECK((x).is_cuda(), #x " must be a CUDA tensor")
#define CHECK_CONTIGUOUS(x) TORCH_CHECK((x).is_contiguous(), #x " must be contiguous")

at::Tensor gate(const at::Tensor& input, const at::Tensor& weights) {
  CHECK_CUDA(input);
  CHECK_CUDA(weights);
  CHECK_CONTIGUOUS(input);
  const at::OptionalDeviceGuard guard(at::device_of(input));
  auto scratch = torch::empty({input.size(0), weights.size(1)}, at::TensorOptions().device(torch::kCUDA));
  TORCH_CHECK(scratch.device() == input.device(), "the guard did not select ", input.device());
  at::mm_out(scratch, input, weights);
  return scratch.sigmoid_();
}

double first(const at::Tensor& x) { return x.flatten()[0].item<double>(); }

at::Tensor iota(int64_t size, int64_t index) {
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, index));
  return torch::arange(size, torch::dtype(torch::kFloat).device(torch::kCUDA));
}

at::Tensor add_one_cuda(const at::Tensor& x) {
  TORCH_INTERNAL_ASSERT(x.device().type() == at::DeviceType::CUDA);
  return x + 1;
}
at::Tensor add_one_cpu(const at::Tensor& x) { return x + 1; }

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context, torch::autograd::tensor_list grads) {
    return {grads[0] * 2 * context->get_saved_variables()[0]};
  }
};

TORCH_LIBRARY(users_extension, m) {
  m.def("add_one(Tensor x) -> Tensor");
  m.def("square(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(users_extension, CUDA, m) { m.impl("add_one", add_one_cuda); }
TORCH_LIBRARY_IMPL(users_extension, CPU, m) { m.impl("add_one", add_one_cpu); }
TORCH_LIBRARY_IMPL(users_extension, CompositeImplicitAutograd, m) {
  m.impl("square", [](const at::Tensor& x) { return Square::apply(x); });
}
"""

with tempfile.TemporaryDirectory() as folder:
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    extension = load_inline(
        "users_extension", cpp_sources=SOURCE, functions=["gate", "first", "iota"], extra_cflags=["-O0"]
    )
torch.manual_seed(0)
x, weights = torch.randn(3, 4), torch.randn(4, 5)
for device in ("cuda:0", "cuda:1"):
    result = extension.gate(x.to(device), weights.to(device))
    assert result.device == torch.device(device)
    torch.testing.assert_close(result.cpu(), torch.sigmoid(x @ weights))
for arguments, text in (
    ((x, weights.cuda()), "input must be a CUDA tensor"),
    ((x.cuda().t(),) * 2, "must be contiguous"),
):
    try:
        extension.gate(*arguments)
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"expected: {text}")
assert extension.first(x.cuda()) == x[0, 0].item()
assert extension.iota(4, 1).device.index == 1 and extension.iota(4, 1).tolist() == [0, 1, 2, 3]
assert torch.cuda.current_device() == 0
assert torch.equal(torch.ops.users_extension.add_one(x.cuda(1)).cpu(), x + 1)
assert torch.equal(torch.ops.users_extension.add_one(x), x + 1)
y = x.cuda().requires_grad_()
torch.ops.users_extension.square(y).sum().backward()
torch.testing.assert_close(y.grad.cpu(), 2 * x)
