// Recurrent networks. PyTorch's composites compute a cell on the CPU with linear() and pointwise operators, and on
// every other device with the fused cells, which only CUDA has. The composites here work like the CPU's, so results are
// equal. Under torch.func, autocast and compilation the composites are PyTorch's, which call the fused cells of
// openreg_ops/cuda_operators/cells.py.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/gru_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/lstm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rnn_relu_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_tanh_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include <algorithm>

#include "backend/identity/identity.h"
#include "compat.h"

namespace openreg {
namespace {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;

enum class Cell { kLstm, kGru, kTanh, kRelu };

struct State {
  Tensor h, c; // c: of an LSTM
};
struct Weights {
  Tensor ih, hh, ih_bias, hh_bias, hr; // biases where there are some, hr: of an LSTM with projections
};

// A padded sequence [T, N, I], or a packed one [sum(batch_sizes), I].
struct RnnSequence {
  Tensor data;
  bool packed = false;
  at::IntArrayRef batch_sizes;
};

// For modes, subclasses, torch.func wrappers and symbolic shapes: PyTorch's composites use the fused cells, which have
// rules for them.
bool is_plain(const Tensor& x) {
  constexpr auto wrapped = c10::functorch_transforms_ks | c10::python_ks |
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
          c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::Functionalize});
  return !x.defined() || (!x.key_set().has_any(wrapped) && !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides());
}
bool is_plain(TensorList list) {
  return std::all_of(list.begin(), list.end(), [](const Tensor& x) { return is_plain(x); });
}

// Autocast lowers the precision of the fused cells and the state, as on CUDA.
template <class... Args>
bool as_on_cpu(const Args&... args) {
  return (is_plain(args) && ...) && !at::autocast::is_autocast_enabled(identity.type);
}

std::vector<Tensor> gates_of(const char* op, const Tensor& gates, int64_t count) {
  TORCH_CHECK_INDEX(
      gates.dim() > 1, op, ": expected an input of one dimension more, but its gates have shape ", gates.sizes());
  TORCH_CHECK(gates.dim() == 2 && gates.size(1) % count == 0, op, ": expected weights for ", count,
      " gates, but they give gates of shape ", gates.sizes());
  return gates.unsafe_chunk(count, 1);
}

// One step; `input` has been multiplied by its weights.
State step(Cell cell, const Tensor& input, const State& state, const Weights& w) {
  const Tensor hidden = at::linear(state.h, w.hh, w.hh_bias);
  switch (cell) {
    case Cell::kTanh:
      return {at::tanh(hidden.add_(input)), {}};
    case Cell::kRelu:
      return {at::relu(hidden.add_(input)), {}};
    case Cell::kGru: {
      const auto in = gates_of("gru", input, 3), gates = gates_of("gru", hidden, 3);
      const auto r = gates[0].add_(in[0]).sigmoid_(), z = gates[1].add_(in[1]).sigmoid_();
      const auto n = in[2].add(gates[2].mul_(r)).tanh_();
      return {(state.h - n).mul_(z).add_(n), {}};
    }
    case Cell::kLstm: {
      const auto gates = gates_of("lstm", hidden.add_(input), 4);
      const auto i = gates[0].sigmoid_(), f = gates[1].sigmoid_(), g = gates[2].tanh_(), o = gates[3].sigmoid_();
      const auto c = (f * state.c).add_(i * g), h = o * c.tanh();
      return {w.hr.defined() ? at::matmul(h, w.hr.t()) : h, c};
    }
  }
  return {};
}

State narrow(const State& state, int64_t begin, int64_t end) {
  const auto rows = [=](const Tensor& x) { return x.defined() ? x.narrow(0, begin, end - begin) : x; };
  return {rows(state.h), rows(state.c)};
}

State concatenate(const std::vector<State>& states) {
  std::vector<Tensor> h, c;
  for (const State& state : states) {
    h.push_back(state.h);
    if (state.c.defined()) c.push_back(state.c);
  }
  return {at::cat(h, 0), c.empty() ? Tensor() : at::cat(c, 0)};
}

// One direction of one layer: the outputs, and the last state.
std::pair<Tensor, State> padded(Cell cell, const Tensor& data, const State& first, const Weights& w, bool reverse) {
  auto steps = at::linear(data, w.ih, w.ih_bias).unbind(0);
  TORCH_CHECK(!steps.empty(), "Expected sequence length to be larger than 0 in RNN");
  if (reverse) std::reverse(steps.begin(), steps.end());
  State state = first;
  for (Tensor& output : steps) {
    state = step(cell, output, state, w);
    output = state.h;
  }
  if (reverse) std::reverse(steps.begin(), steps.end());
  return {at::stack(steps, 0), state};
}

// One direction of one layer for a packed sequence: sequences end during a forward pass, and join during a backward
// pass.
std::pair<Tensor, State> packed(
    Cell cell, const RnnSequence& sequence, const State& first, const Weights& w, bool reverse) {
  const Tensor input = at::linear(sequence.data, w.ih, w.ih_bias);
  const at::IntArrayRef sizes = sequence.batch_sizes;
  std::vector<Tensor> outputs;
  if (reverse) {
    int64_t end = sequence.data.size(0), before = sizes.back();
    State state = narrow(first, 0, before);
    for (auto size = sizes.rbegin(); size != sizes.rend(); before = *size++) {
      if (*size > before) state = concatenate({state, narrow(first, before, *size)});
      state = step(cell, input.narrow(0, end - *size, *size), state, w);
      end -= *size;
      outputs.push_back(state.h);
    }
    std::reverse(outputs.begin(), outputs.end());
    return {at::cat(outputs, 0), state};
  }
  int64_t begin = 0, before = sizes.front();
  State state = first;
  std::vector<State> ended;
  for (const int64_t size : sizes) {
    if (size < before) {
      ended.push_back(narrow(state, size, before));
      state = narrow(state, 0, size);
    }
    state = step(cell, input.narrow(0, begin, size), state, w);
    begin += size;
    before = size;
    outputs.push_back(state.h);
  }
  ended.push_back(state);
  std::reverse(ended.begin(), ended.end());
  return {at::cat(outputs, 0), concatenate(ended)};
}

std::vector<Weights> weights_of(TensorList params, bool has_biases, bool has_projections) {
  const size_t count = 2 + (has_biases ? 2 : 0) + (has_projections ? 1 : 0);
  TORCH_CHECK(params.size() % count == 0, "got an incorrect number of RNN parameters");
  std::vector<Weights> all;
  for (size_t i = 0; i < params.size(); i += count)
    all.push_back({params[i], params[i + 1], has_biases ? params[i + 2] : Tensor(),
        has_biases ? params[i + 3] : Tensor(), has_projections ? params[i + count - 1] : Tensor()});
  return all;
}

// Every layer in every direction; `states` become the last ones.
Tensor layers(Cell cell, RnnSequence sequence, std::vector<State>& states, const std::vector<Weights>& weights,
    int64_t num_layers, double dropout, bool train, bool bidirectional) {
  const size_t directions = bidirectional ? 2 : 1, count = static_cast<size_t>(std::max<int64_t>(num_layers, 0));
  TORCH_CHECK(states.size() == count * directions, "Expected ", count * directions,
      " hidden states in stacked_rnn, but got ", states.size());
  TORCH_CHECK(weights.size() == count * directions, "Expected weights for ", count * directions,
      " layers in stacked_rnn, but got weights for ", weights.size());
  for (size_t layer = 0; layer < count; ++layer) {
    std::vector<Tensor> outputs;
    for (size_t direction = 0; direction < directions; ++direction) {
      const size_t i = layer * directions + direction;
      auto [output, state] = sequence.packed ? packed(cell, sequence, states[i], weights[i], direction == 1)
                                             : padded(cell, sequence.data, states[i], weights[i], direction == 1);
      outputs.push_back(output);
      states[i] = state;
    }
    sequence.data = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer + 1 < count) sequence.data = at::dropout(sequence.data, dropout, /*train=*/true);
  }
  return sequence.data;
}

void check_devices(const Tensor& input, TensorList hidden, TensorList params) {
  TORCH_CHECK(input.defined(), "expected the input of an RNN to be a tensor, but got None");
  at::native::check_attributes(input, params, hidden);
}

// The host reads the batch sizes while it records the steps.
RnnSequence packed_sequence(const char* op, const Tensor& data, const Tensor& batch_sizes) {
  TORCH_CHECK_INDEX(!batch_sizes.defined() || batch_sizes.dim() > 0, op,
      ": expected batch_sizes to have one dimension, but it has none");
  TORCH_CHECK(batch_sizes.defined() && batch_sizes.is_cpu() && batch_sizes.scalar_type() == at::kLong &&
          batch_sizes.dim() == 1 && batch_sizes.numel() > 0 && batch_sizes.is_contiguous(),
      op, ": expected batch_sizes to be a contiguous int64 tensor of one dimension, on the CPU and not empty");
  return {data, true, {batch_sizes.const_data_ptr<int64_t>(), static_cast<size_t>(batch_sizes.numel())}};
}

std::vector<State> states_of(const Tensor& h, const Tensor& c = {}) {
  std::vector<State> all;
  for (const Tensor& layer : h.unbind(0)) all.push_back({layer, {}});
  if (!c.defined()) return all;
  const auto cells = c.unbind(0);
  TORCH_CHECK(cells.size() == all.size(), "lstm: expected as many cell states as hidden states, but got ", cells.size(),
      " and ", all.size());
  for (size_t i = 0; i < all.size(); ++i) all[i].c = cells[i];
  return all;
}

Tensor stacked(const std::vector<State>& states, Tensor State::* member) {
  std::vector<Tensor> all;
  for (const State& state : states) all.push_back(state.*member);
  return at::stack(all, 0);
}

bool mkldnn_supports(const char* op) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").typed<bool()>().call();
}

// Returns true if oneDNN computes this LSTM on the CPU. Its kernel trusts the shapes.
bool uses_mkldnn(
    const Tensor& input, TensorList hx, TensorList params, bool has_biases, int64_t num_layers, bool bidirectional) {
  static const bool bfloat16 = at::hasMKLDNN() && mkldnn_supports("mkldnn::_is_mkldnn_bf16_supported"),
                    half = at::hasMKLDNN() && mkldnn_supports("mkldnn::_is_mkldnn_fp16_supported");
  const auto type = input.scalar_type();
  if (!at::hasMKLDNN() || !at::globalContext().userEnabledMkldnn() || input.numel() == 0 || input.dim() != 3)
    return false;
  if (!(type == at::kFloat || (type == at::kBFloat16 && bfloat16) ||
          (type == at::kHalf && half && !at::GradMode::is_enabled())))
    return false;
  const auto fits = [type](const Tensor& x, at::IntArrayRef shape) {
    return x.defined() && x.layout() == at::kStrided && x.scalar_type() == type && x.sizes() == shape;
  };
  const int64_t directions = bidirectional ? 2 : 1, hidden = hx[0].size(2), weights = has_biases ? 4 : 2;
  const auto& batch = hx[0].sizes();
  if (batch[0] != num_layers * directions || !fits(hx[0], batch) || !fits(hx[1], batch) ||
      static_cast<int64_t>(params.size()) != num_layers * directions * weights)
    return false;
  for (size_t i = 0; i < params.size(); i += static_cast<size_t>(weights)) {
    const bool first = static_cast<int64_t>(i) < weights * directions;
    if (!fits(params[i], {4 * hidden, first ? input.size(2) : hidden * directions}) ||
        !fits(params[i + 1], {4 * hidden, hidden}))
      return false;
    for (size_t k = 2; k < static_cast<size_t>(weights); ++k)
      if (!fits(params[i + k], {4 * hidden})) return false;
  }
  return true;
}

void check_lstm_states(TensorList hx) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  for (const Tensor& state : hx) {
    constexpr const char* expected = "lstm: expected hidden states [layers, N, H], but got ";
    TORCH_CHECK(state.defined(), expected, "None");
    TORCH_CHECK_INDEX(state.dim() >= 3, expected, "shape ", state.sizes()); // the type of the CPU's error
    TORCH_CHECK(state.dim() == 3, expected, "shape ", state.sizes());
  }
}

std::tuple<Tensor, Tensor, Tensor> lstm_by_mkldnn(const Tensor& input, TensorList hx, TensorList params,
    bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  Tensor output, hy, cy; // the dispatcher runs the stub's operators on the device
  at::native::lstm_mkldnn_stub(
      at::kCPU, output, hy, cy, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  return {output, hy, cy};
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, TensorList hx, TensorList params, bool has_biases,
    int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  check_lstm_states(hx);
  check_devices(input, hx, params);
  if (!as_on_cpu(input, hx, params))
    return at::compositeimplicitautograd::lstm(
        input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  if (const bool square = hx[0].size(1) == (input.dim() == 3 ? input.size(batch_first ? 0 : 1) : -1);
      square && uses_mkldnn(input, hx, params, has_biases, num_layers, bidirectional)) {
    return lstm_by_mkldnn(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  }
  auto states = states_of(hx[0], hx[1]);
  const Tensor output = layers(Cell::kLstm, {batch_first ? input.transpose(0, 1) : input}, states,
      weights_of(params, has_biases, hx[0].size(2) != hx[1].size(2)), num_layers, dropout, train, bidirectional);
  return {batch_first ? output.transpose(0, 1) : output, stacked(states, &State::h), stacked(states, &State::c)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_packed(const Tensor& data, const Tensor& batch_sizes, TensorList hx,
    TensorList params, bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional) {
  check_lstm_states(hx);
  check_devices(data, hx, params);
  const RnnSequence sequence = packed_sequence("lstm", data, batch_sizes);
  if (!as_on_cpu(data, hx, params))
    return at::compositeimplicitautograd::lstm(
        data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional);
  // PyTorch gives sequences of equal lengths to oneDNN.
  const int64_t steps = static_cast<int64_t>(sequence.batch_sizes.size()), rows = sequence.batch_sizes[0];
  if (data.dim() == 2 && rows == hx[0].size(1) && rows * steps == data.size(0) &&
      std::count(sequence.batch_sizes.begin(), sequence.batch_sizes.end(), rows) == steps) {
    const Tensor input = data.view({steps, rows, data.size(1)});
    if (uses_mkldnn(input, hx, params, has_biases, num_layers, bidirectional)) {
      auto [output, hy, cy] = lstm_by_mkldnn(
          input, hx, params, has_biases, num_layers, dropout, train, bidirectional, /*batch_first=*/false);
      return {output.view({data.size(0), output.size(2)}), hy, cy};
    }
  }
  auto states = states_of(hx[0], hx[1]);
  const Tensor output = layers(Cell::kLstm, sequence, states,
      weights_of(params, has_biases, hx[0].size(2) != hx[1].size(2)), num_layers, dropout, train, bidirectional);
  return {output, stacked(states, &State::h), stacked(states, &State::c)};
}

// A network of one hidden state, and PyTorch's composite for it.
template <Cell cell, auto composite>
std::tuple<Tensor, Tensor> rnn(const Tensor& input, const Tensor& hx, TensorList params, bool has_biases,
    int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  check_devices(input, hx, params);
  if (!as_on_cpu(input, hx, params))
    return composite(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  auto states = states_of(hx);
  const Tensor output = layers(cell, {batch_first ? input.transpose(0, 1) : input}, states,
      weights_of(params, has_biases, false), num_layers, dropout, train, bidirectional);
  return {batch_first ? output.transpose(0, 1) : output, stacked(states, &State::h)};
}

template <Cell cell, auto composite>
std::tuple<Tensor, Tensor> rnn_packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hx,
    TensorList params, bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional) {
  check_devices(data, hx, params);
  const RnnSequence sequence = packed_sequence("rnn", data, batch_sizes);
  if (!as_on_cpu(data, hx, params))
    return composite(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional);
  auto states = states_of(hx);
  const Tensor output =
      layers(cell, sequence, states, weights_of(params, has_biases, false), num_layers, dropout, train, bidirectional);
  return {output, stacked(states, &State::h)};
}

// PyTorch's single-step composites check their arguments; only the arithmetic is the CPU's.
void check_step(const char* op, int64_t count, const Tensor& input, TensorList hx, const Weights& w) {
  // Where PyTorch's composites read the size of a dimension that is missing, they raise IndexError. From 2.15 on, they
  // check the dimensions of the input and of the hidden states first.
  const auto check_dimensions = [op](const char* name, const Tensor& x, bool checked = false) {
    TORCH_CHECK(x.defined(), op, ": expected ", name, " to be a tensor, but got None");
    TORCH_CHECK_INDEX(
        checked || x.dim() >= 2, op, ": expected ", name, " of two dimensions, but got shape ", x.sizes());
    TORCH_CHECK(x.dim() == 2, op, ": expected ", name, " of two dimensions, but got shape ", x.sizes());
  };
  constexpr bool checked = OPENREG_TORCH_AT_LEAST(2, 15);
  check_dimensions("input", input, checked);
  check_dimensions("w_ih", w.ih);
  TORCH_CHECK(input.size(1) == w.ih.size(1), "input has inconsistent input_size: got ", input.size(1), " expected ",
      w.ih.size(1));
  check_dimensions("w_hh", w.hh);
  const int64_t hidden = w.hh.size(1);
  for (size_t i = 0; i < hx.size(); ++i) {
    TORCH_CHECK(!hx[i].defined() || hx[i].dim() == 0 || input.size(0) == hx[i].size(0), "Input batch size ",
        input.size(0), " doesn't match hidden", i, " batch size ", hx[i].size(0));
    check_dimensions("hx", hx[i], checked);
    TORCH_CHECK(hx[i].size(1) == hidden, "hidden", i, " has inconsistent hidden_size: got ", hx[i].size(1),
        ", expected ", hidden);
  }
  for (const auto& [name, weight] : {std::pair{"weight_ih", &w.ih}, std::pair{"weight_hh", &w.hh}})
    TORCH_CHECK(weight->size(0) == count * hidden, name, " first dim must be ", count,
        " * hidden_size = ", count * hidden, ", but got ", weight->size(0));
}

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& input, TensorList hx, const Tensor& w_ih, const Tensor& w_hh,
    const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  const Weights weights{w_ih, w_hh, b_ih.value_or(Tensor()), b_hh.value_or(Tensor()), {}};
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  check_step("lstm_cell", 4, input, hx, weights);
  if (!as_on_cpu(input, hx, w_ih, w_hh, weights.ih_bias, weights.hh_bias))
    return at::compositeimplicitautograd::lstm_cell(input, hx, w_ih, w_hh, b_ih, b_hh);
  const State next = step(Cell::kLstm, at::linear(input, w_ih, b_ih), {hx[0], hx[1]}, weights);
  return {next.h, next.c};
}

Tensor gru_cell(const Tensor& input, const Tensor& hx, const Tensor& w_ih, const Tensor& w_hh,
    const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  const Weights weights{w_ih, w_hh, b_ih.value_or(Tensor()), b_hh.value_or(Tensor()), {}};
  check_step("gru_cell", 3, input, hx, weights);
  if (!as_on_cpu(input, hx, w_ih, w_hh, weights.ih_bias, weights.hh_bias))
    return at::compositeimplicitautograd::gru_cell(input, hx, w_ih, w_hh, b_ih, b_hh);
  return step(Cell::kGru, at::linear(input, w_ih, b_ih), {hx, {}}, weights).h;
}

using Rnn = std::tuple<Tensor, Tensor> (*)(
    const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool, bool, bool);
using RnnPacked = std::tuple<Tensor, Tensor> (*)(
    const Tensor&, const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool, bool);

template <Cell cell, Rnn composite, RnnPacked composite_packed>
void register_rnn(torch::Library& m, const std::string& name) {
  m.impl((name + ".input").c_str(), rnn<cell, composite>);
  m.impl((name + ".data").c_str(), rnn_packed<cell, composite_packed>);
}

void register_composites(torch::Library& m) {
  namespace composites = at::compositeimplicitautograd;
  m.impl("lstm.input", lstm);
  m.impl("lstm.data", lstm_packed);
  register_rnn<Cell::kGru, composites::gru, composites::gru>(m, "gru");
  register_rnn<Cell::kTanh, composites::rnn_tanh, composites::rnn_tanh>(m, "rnn_tanh");
  register_rnn<Cell::kRelu, composites::rnn_relu, composites::rnn_relu>(m, "rnn_relu");
  m.impl("lstm_cell", lstm_cell);
  m.impl("gru_cell", gru_cell);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  register_composites(m);
}
// Composites differentiate through their parts, so autograd uses the same ones.
OPENREG_LIBRARY_IMPL(aten, autograd, m) {
  register_composites(m);
}

} // namespace openreg
