// The fused LSTM and GRU cells, which PyTorch calls on every device but the CPU and has CUDA kernels
// for only. Written with tensor operations: each is a native kernel on the device already.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace openreg {
namespace {

at::Tensor add_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// hy, cy and the activated gates (i, f, g, o side by side), from which backward is computed.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
    const at::Tensor& cx, const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto gates = (add_bias(input_gates, input_bias) + add_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto i = at::sigmoid(gates[0]), f = at::sigmoid(gates[1]), g = at::tanh(gates[2]), o = at::sigmoid(gates[3]);
  const auto cy = f * cx + i * g;
  return {o * at::tanh(cy), cy, at::cat({i, f, g, o}, 1)};
}

// Gradients of the four gates before activation, of cx, and of one bias.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy,
    const std::optional<at::Tensor>& grad_cy, const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace,
    bool has_bias) {
  const bool from_hy = grad_hy && grad_hy->defined(), from_cy = grad_cy && grad_cy->defined();
  if (!from_hy && !from_cy) return {};
  const auto gates = workspace.chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto tanh_cy = at::tanh(cy);
  at::Tensor dc = from_cy ? *grad_cy : at::zeros_like(cy);
  if (from_hy) dc = dc + *grad_hy * o * (1 - tanh_cy * tanh_cy);
  const at::Tensor dO = from_hy ? *grad_hy * tanh_cy * o * (1 - o) : at::zeros_like(o);
  const auto d = at::cat({dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), dO}, 1);
  return {d, dc * f, has_bias ? d.sum(0) : at::Tensor()};
}

// hy, and r, z, n, hx and the hidden part of n side by side.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
    const at::Tensor& hx, const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto in = add_bias(input_gates, input_bias).chunk(3, 1),
             hidden = add_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto r = at::sigmoid(in[0] + hidden[0]), z = at::sigmoid(in[1] + hidden[1]),
             n = at::tanh(in[2] + r * hidden[2]);
  return {n + z * (hx - n), at::cat({r, z, n, hx, hidden[2]}, 1)};
}

// Gradients of the input gates, the hidden gates, hx, and both biases.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &r = saved[0], &z = saved[1], &n = saved[2], &hx = saved[3], &hidden_n = saved[4];
  const auto dn = grad_hy * (1 - z) * (1 - n * n), dz = grad_hy * (hx - n) * z * (1 - z),
             dr = dn * hidden_n * r * (1 - r);
  const auto in = at::cat({dr, dz, dn}, 1), hidden = at::cat({dr, dz, dn * r}, 1);
  return {in, hidden, grad_hy * z, has_bias ? in.sum(0) : at::Tensor(), has_bias ? hidden.sum(0) : at::Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

} // namespace openreg
