// The parts of batch normalization over several processes, torch.nn.SyncBatchNorm, for which PyTorch has only CUDA
// kernels. Written with tensor operations, each of which is already a native kernel on the device. As on CUDA,
// statistics are float32 for narrower inputs, else they have the input's dtype.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include "backend/identity/identity.h"

namespace openreg {
namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

void check_tensor(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK(x.defined(), op, ": expected ", name, " to be a tensor, but got None");
  TORCH_CHECK(at::isFloatingType(x.scalar_type()) || at::isIntegralType(x.scalar_type(), /*includeBool=*/false), op,
      ": expected ", name, " of real numbers, but got ", x.scalar_type());
}

void check_input(const char* op, const at::Tensor& input) {
  check_tensor(op, "input", input);
  TORCH_CHECK(at::isFloatingType(input.scalar_type()), op, ": expected a floating-point input, but got ",
      input.scalar_type(), "; convert it with .to()");
  TORCH_CHECK(input.dim() >= 2, op, ": expected an input [N, C, ...], but got one of ", input.dim(), " dimensions");
}

// One value for each channel.
void check_channels(const char* op, const char* name, const at::Tensor& x, const at::Tensor& input) {
  check_tensor(op, name, x);
  TORCH_CHECK(x.numel() == input.size(1), op, ": expected ", name, " of ", input.size(1),
      " values, one for each channel of input, but got shape ", x.sizes());
}
void check_channels(const char* op, const char* name, const Optional& x, const at::Tensor& input) {
  if (x && x->defined()) check_channels(op, name, *x, input);
}

void check_gradient(const char* op, const at::Tensor& grad_out, const at::Tensor& input) {
  check_tensor(op, "grad_out", grad_out);
  TORCH_CHECK(grad_out.sizes() == input.sizes(), op, ": expected grad_out of the shape of input, ", input.sizes(),
      ", but got ", grad_out.sizes());
}

void check_backward(const char* op, const at::Tensor& grad_out, const at::Tensor& input, const at::Tensor& mean,
    const at::Tensor& invstd, const Optional& weight) {
  check_input(op, input);
  check_gradient(op, grad_out, input);
  check_channels(op, "mean", mean, input);
  check_channels(op, "invstd", invstd, input);
  check_channels(op, "weight", weight, input);
}

// Each channel's value, broadcast to all of its elements.
at::Tensor channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  return widened(values).view(shape);
}

std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim)
    if (dim != 1) dims.push_back(dim);
  return dims;
}

std::tuple<at::Tensor, at::Tensor> stats(const at::Tensor& input, double eps) {
  check_input("batch_norm_stats", input);
  const auto [var, mean] = at::var_mean(widened(input), all_but_channels(input), /*correction=*/0);
  return {mean, at::rsqrt(var + eps)};
}

// From each process's mean and 1/sqrt(var + eps), [processes, C], and number of values, [processes].
std::tuple<at::Tensor, at::Tensor> gather_stats_with_counts(const at::Tensor& input, const at::Tensor& mean,
    const at::Tensor& invstd, const Optional& running_mean, const Optional& running_var, double momentum, double eps,
    const at::Tensor& counts) {
  constexpr const char* op = "batch_norm_gather_stats_with_counts";
  check_tensor(op, "mean", mean);
  check_tensor(op, "invstd", invstd);
  check_tensor(op, "counts", counts);
  for (const Optional* running : {&running_mean, &running_var})
    if (*running && (*running)->defined()) check_tensor(op, "running statistics", **running);
  TORCH_CHECK(mean.dim() == 2 && invstd.sizes() == mean.sizes() && counts.numel() == mean.size(0),
      "batch_norm_gather_stats_with_counts: expected mean and invstd [processes, C] and a count for each process, but "
      "got ",
      mean.sizes(), ", ", invstd.sizes(), " and ", counts.sizes());
  const auto each = widened(mean), count = counts.to(each.scalar_type()).view({-1, 1}), total = count.sum(0);
  const auto whole = (each * count).sum(0) / total;
  const auto var = widened(invstd).pow(-2) - eps;
  const auto squares = ((var + (each - whole).square()) * count).sum(0); // of the distances from the mean
  const auto update = [momentum](const Optional& running, const at::Tensor& now) {
    if (running && running->defined()) running->mul_(1 - momentum).add_(now.to(running->scalar_type()), momentum);
  };
  update(running_mean, whole);
  update(running_var, squares / (total - 1));
  return {whole, at::rsqrt(squares / total + eps)};
}

std::tuple<at::Tensor, at::Tensor> gather_stats(const at::Tensor& input, const at::Tensor& mean,
    const at::Tensor& invstd, const Optional& running_mean, const Optional& running_var, double momentum, double eps,
    int64_t count) {
  check_tensor("batch_norm_gather_stats", "mean", mean);
  TORCH_CHECK(mean.dim() == 2, "batch_norm_gather_stats: expected mean [processes, C], but got ", mean.sizes());
  const auto counts = at::full({mean.size(0)}, count, widened(mean).options());
  return gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts);
}

at::Tensor& elemt_out(const at::Tensor& input, const Optional& weight, const Optional& bias, const at::Tensor& mean,
    const at::Tensor& invstd, double eps, at::Tensor& out) {
  check_input("batch_norm_elemt", input);
  check_channels("batch_norm_elemt", "mean", mean, input);
  check_channels("batch_norm_elemt", "invstd", invstd, input);
  check_channels("batch_norm_elemt", "weight", weight, input);
  check_channels("batch_norm_elemt", "bias", bias, input);
  check_tensor("batch_norm_elemt", "out", out);
  TORCH_CHECK(out.sizes() == input.sizes(), "batch_norm_elemt: expected out of shape ", input.sizes(),
      ", the same as input", ", but got ", out.sizes());
  auto result = (widened(input) - channels(mean, input)) * channels(invstd, input);
  if (weight && weight->defined()) result = result * channels(*weight, input);
  if (bias && bias->defined()) result = result + channels(*bias, input);
  return out.copy_(result);
}

at::Tensor elemt(const at::Tensor& input, const Optional& weight, const Optional& bias, const at::Tensor& mean,
    const at::Tensor& invstd, double eps) {
  check_input("batch_norm_elemt", input);
  auto out = at::empty_like(input);
  return elemt_out(input, weight, bias, mean, invstd, eps, out);
}

// The sums of grad_out and of grad_out * (input - mean), and the gradients of weight and bias; undefined if not
// asked for.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward_reduce(const at::Tensor& grad_out,
    const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd, const Optional& weight, bool input_g,
    bool weight_g, bool bias_g) {
  constexpr const char* op = "batch_norm_backward_reduce";
  check_backward(op, grad_out, input, mean, invstd, weight);
  const auto dims = all_but_channels(input);
  const auto dy = widened(grad_out);
  const auto sum = dy.sum(dims);
  const auto sum_xmu = (dy * (widened(input) - channels(mean, input))).sum(dims);
  const auto dtype = weight && weight->defined() ? weight->scalar_type() : input.scalar_type();
  return {input_g ? sum : at::Tensor(), input_g ? sum_xmu : at::Tensor(),
      weight_g ? (sum_xmu * invstd).to(dtype) : at::Tensor(),
      bias_g ? sum.to(dtype, false, /*copy=*/true) : at::Tensor()};
}

// From the sums of all processes, and the number of values in each.
at::Tensor backward_elemt(const at::Tensor& grad_out, const at::Tensor& input, const at::Tensor& mean,
    const at::Tensor& invstd, const Optional& weight, const at::Tensor& sum_dy, const at::Tensor& sum_dy_xmu,
    const at::Tensor& count) {
  constexpr const char* op = "batch_norm_backward_elemt";
  check_backward(op, grad_out, input, mean, invstd, weight);
  check_channels(op, "sum_dy", sum_dy, input);
  check_channels(op, "sum_dy_xmu", sum_dy_xmu, input);
  check_tensor(op, "count", count);
  const auto total = count.sum().to(at::toOpMathType(mean.scalar_type()));
  const auto slope = widened(sum_dy_xmu) / total * invstd.square();
  auto grad = widened(grad_out) - channels(sum_dy / total, input) -
      (widened(input) - channels(mean, input)) * channels(slope, input);
  grad = grad * channels(weight && weight->defined() ? invstd * *weight : invstd, input);
  return at::empty_like(input).copy_(grad);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("batch_norm_stats", stats);
  m.impl("batch_norm_gather_stats", gather_stats);
  m.impl("batch_norm_gather_stats_with_counts", gather_stats_with_counts);
  m.impl("batch_norm_elemt", elemt);
  m.impl("batch_norm_elemt.out", elemt_out);
  m.impl("batch_norm_backward_reduce", backward_reduce);
  m.impl("batch_norm_backward_elemt", backward_elemt);
}

} // namespace openreg
