#include "unchecked.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace openreg {
namespace {

using torch::jit::Stack;

// The arguments of a call, by name.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack)
      : schema_(op.schema()), first_(&stack[stack.size() - schema_.arguments().size()]) {}

  const c10::IValue& operator[](const char* name) const {
    return first_[static_cast<size_t>(*schema_.argumentIndexWithName(name))];
  }
  const at::Tensor& tensor(const char* name) const { return (*this)[name].toTensor(); }
  // The numbers in a list or a tensor. Empty for a tensor of another dtype than integers, which the kernel refuses.
  std::vector<int64_t> numbers(const char* name) const {
    const c10::IValue& value = (*this)[name];
    if (!value.isTensor()) return value.isNone() ? std::vector<int64_t>() : value.toIntVector();
    const at::Tensor& x = value.toTensor();
    if (!x.defined() || !c10::isIntegralType(x.scalar_type(), /*includeBool=*/false)) return {};
    const at::Tensor integers = x.to(at::kLong).contiguous();
    return {integers.const_data_ptr<int64_t>(), integers.const_data_ptr<int64_t>() + integers.numel()};
  }
  // The operator, for a message.
  std::string name() const { return schema_.name().substr(schema_.name().find("::") + 2); }

 private:
  const c10::FunctionSchema& schema_;
  const c10::IValue* first_;
};

constexpr const char* kRows = "the rows of the weight";
constexpr const char* kElements = "places among the indices";
constexpr const char* kClasses = "the classes of log_probs";

// Raises unless `values`, of the argument `which`, lie in [0, bound); `bounds` says what that is.
template <class T>
void expect_below(const Arguments& call, const char* which, at::ArrayRef<T> values, int64_t bound, const char* bounds) {
  const auto is_outside = [=](int64_t value) {
    return static_cast<std::uint64_t>(value) >= static_cast<std::uint64_t>(bound);
  };
  bool outside = false;
  for (const T value : values) outside |= is_outside(value); // without a branch, so that it is vectorized
  if (!outside) return;
  TORCH_CHECK_INDEX(
      bound > 0, call.name(), ": expected no ", which, ", because ", bounds, " are none, but got ", values.front());
  TORCH_CHECK_INDEX(false, call.name(), ": expected ", which, " from 0 to ", bound - 1, ", ", bounds, ", but got ",
      *std::ranges::find_if(values, is_outside));
}

void expect_below(const Arguments& call, const char* which, const at::Tensor& x, int64_t bound, const char* bounds) {
  const at::Tensor values = x.contiguous();
  const auto count = static_cast<size_t>(values.numel());
  if (values.scalar_type() == at::kLong)
    expect_below(call, which, at::ArrayRef(values.const_data_ptr<int64_t>(), count), bound, bounds);
  if (values.scalar_type() == at::kInt)
    expect_below(call, which, at::ArrayRef(values.const_data_ptr<int>(), count), bound, bounds);
} // kernels refuse all other dtypes

// The gradient of a pooling: `indices` are places in the last `count` dimensions of `self`. `adaptive`: the kernel does
// not check the number of dimensions.
template <int64_t count, bool adaptive>
void check_pooling(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &grad = call.tensor("grad_output"), &self = call.tensor("self"), &indices = call.tensor("indices");
  const bool same = grad.dim() == self.dim() && (adaptive || indices.dim() == self.dim());
  if (self.dim() < count || !same) return; // the kernel raises
  const auto planes = [](const at::Tensor& x) { return x.sizes().slice(0, static_cast<size_t>(x.dim() - count)); };
  TORCH_CHECK(planes(grad) == planes(self), call.name(), ": expected a grad_output of shape ", planes(self),
      " before its last ", count, " dimensions, as self, of shape ", self.sizes(), ", but got ", grad.sizes());
  TORCH_CHECK(indices.sizes() == grad.sizes(), call.name(), ": expected indices of shape ", grad.sizes(),
      ", as grad_output, but got ", indices.sizes());
  const int64_t bound = c10::multiply_integers(self.sizes().slice(static_cast<size_t>(self.dim() - count)));
  expect_below(call, "indices", indices, bound, "places in a plane of self");
}

// The kernel compares an index with each row; only its count of the index has no check.
void check_embedding(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  if (call["scale_grad_by_freq"].toBool())
    expect_below(call, "indices", call.tensor("indices"), call["num_weights"].toInt(), kRows);
}

// How many bags the offsets begin before the last index; each index after the last offset belongs to the last of them.
int64_t bags_of(const Arguments& call, int64_t indices) {
  return std::ranges::count_if(call.numbers("offsets"), [=](int64_t offset) { return offset < indices; });
}

// Embedding bags; only `offsets` between the first and the last have no check.
void check_offsets(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const int64_t indices = call.tensor("indices").numel();
  if (!call["offsets"].isTensor() || !call.tensor("offsets").defined()) return;
  expect_below(call, "offsets", call.tensor("offsets"), indices + 1, kElements);
  // With a last offset there is one bag less. Kernels that compute the bag of each index do not check that it exists.
  const at::Tensor& weight = call.tensor("weight");
  const bool of_each = call["mode"].toInt() == 2 || weight.scalar_type() == at::kDouble || !weight.is_contiguous();
  if (of_each && call["include_last_offset"].toBool()) {
    const int64_t bags = call.tensor("offsets").numel() - 1;
    TORCH_CHECK(bags_of(call, indices) <= bags, call.name(), ": expected a last offset of ", indices,
        ", the number of indices, but got offsets ", at::IntArrayRef(call.numbers("offsets")));
  }
}

// The gradients of embedding bags; `grad` has a row for each bag.
void check_bags(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &grad = call.tensor("grad"), &indices = call.tensor("indices");
  const bool has_weight = op.schema().argumentIndexWithName("weight").has_value();
  if (!grad.dim() || (has_weight && !call.tensor("weight").dim())) return; // the kernel raises
  const int64_t rows = has_weight ? call.tensor("weight").size(0) : call["num_weights"].toInt();
  const int64_t padding = call["padding_idx"].toInt();
  auto used = call.numbers("indices");
  std::erase(used, padding);
  expect_below<int64_t>(call, "indices", used, rows, kRows);
  expect_below(call, "offset2bag", call.tensor("offset2bag"), grad.size(0), "the bags");
  if (op.schema().argumentIndexWithName("offsets")) {
    expect_below(call, "offsets", call.tensor("offsets"), indices.numel() + 1, kElements);
    if (!call.tensor("offset2bag").numel()) // the kernel computes it
      TORCH_CHECK(bags_of(call, indices.numel()) <= grad.size(0), call.name(), ": expected offsets of ", grad.size(0),
          " bags, the rows of grad, but got offsets ", at::IntArrayRef(call.numbers("offsets")), " for ",
          indices.numel(), " indices");
  }
  if (op.schema().argumentIndexWithName("bag_size") && call["mode"].toInt() == 1)
    TORCH_CHECK(call.tensor("bag_size").numel() >= grad.size(0), call.name(), ": expected a bag_size for each of ",
        grad.size(0), " bags, but got ", call.tensor("bag_size").numel());
}

// A segment reduction and its gradient. `lengths` or `offsets` end in the dimension of `data` that is reduced.
void check_segments(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& data = call.tensor("data");
  const bool forward = op.schema().argumentIndexWithName("unsafe").has_value();
  for (const char* which : {"lengths", "offsets"}) {
    const auto given = call[which].toOptional<at::Tensor>();
    if (!given || !given->defined() || !given->dim() || given->dim() > data.dim()) continue; // the kernel raises
    const int64_t axis = given->dim() - 1, length = given->size(axis), size = data.size(axis);
    const bool is_offsets = which[0] == 'o';
    const auto outer = static_cast<size_t>(axis);
    TORCH_CHECK(data.sizes().slice(0, outer) == given->sizes().slice(0, outer), call.name(), ": expected ", which,
        " of the shape of data before dimension ", axis, ", but got ", which, " of shape ", given->sizes(),
        " and data of shape ", data.sizes());
    if (!forward) {
      std::vector<int64_t> shape = data.sizes().vec();
      shape[outer] = length - is_offsets;
      for (const char* gradient : {"grad", "output"})
        TORCH_CHECK(call.tensor(gradient).sizes() == shape, call.name(), ": expected ", gradient, " of shape ",
            at::IntArrayRef(shape), ", but got ", call.tensor(gradient).sizes());
    }
    const auto numbers = call.numbers(which);
    if (is_offsets) {
      expect_below<int64_t>(call, which, numbers, size + 1, "places in data");
    } else if (!forward || call["unsafe"].toBool()) { // otherwise the kernel adds the lengths
      expect_below<int64_t>(call, which, numbers, size + 1, "the size of data");
      for (size_t row = 0; row < numbers.size(); row += static_cast<size_t>(length)) {
        const auto first = numbers.begin() + static_cast<std::ptrdiff_t>(row);
        const int64_t sum = std::accumulate(first, first + length, int64_t{0});
        TORCH_CHECK(sum <= size, call.name(), ": expected lengths with a sum of at most ", size,
            ", the size of data in dimension ", axis, ", but got ", sum);
      }
    }
    return; // lengths take precedence
  }
}

// The gradient of a sparse product; `arg_out` has the number of elements where there was none to choose.
void check_sparse_product(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &grad = call.tensor("grad_out"), &chosen = call.tensor("arg_out");
  if (!chosen.defined() || !chosen.numel()) return; // a reduction that chooses none
  TORCH_CHECK(chosen.sizes() == grad.sizes(), call.name(), ": expected arg_out of shape ", grad.sizes(),
      ", as grad_out, but got ", chosen.sizes());
  expect_below(call, "arg_out", chosen, call.tensor("self")._nnz() + 1, "places among the values of self");
}

// The CTC loss and its gradient. A 2-dim `targets` has a row for each batch, a 1-dim one has them one after another.
void check_ctc(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &log_probs = call.tensor("log_probs"), &targets = call.tensor("targets");
  if (log_probs.dim() != 3 || targets.dim() < 1 || targets.dim() > 2) return; // the kernel raises
  const int64_t steps = log_probs.size(0), batch = log_probs.size(1), classes = log_probs.size(2);
  const auto inputs = call.numbers("input_lengths"), lengths = call.numbers("target_lengths");
  if (op.schema().argumentIndexWithName("log_alpha")) { // the gradient, which checks nothing
    const at::Tensor& alpha = call.tensor("log_alpha");
    TORCH_CHECK(alpha.dim() == 3 && alpha.size(0) >= batch && alpha.size(1) >= steps, call.name(),
        ": expected log_alpha of shape (", batch, ", ", steps, ", 2 * target length + 1), but got ", alpha.sizes());
    for (const char* each : {"grad", "neg_log_likelihood"})
      TORCH_CHECK(call.tensor(each).dim() == 1 && call.tensor(each).size(0) == batch, call.name(), ": expected ", each,
          " of shape (", batch, "), but got ", call.tensor(each).sizes());
    for (const auto& [which, numbers] : {std::pair("input_lengths", inputs), std::pair("target_lengths", lengths)})
      TORCH_CHECK(static_cast<int64_t>(numbers.size()) == batch, call.name(), ": expected ", batch, " ", which,
          ", the size of the batch, but got ", numbers.size());
    expect_below<int64_t>(call, "input_lengths", inputs, steps + 1, "the steps of log_probs");
    expect_below<int64_t>(call, "target_lengths", lengths, (alpha.size(2) - 1) / 2 + 1, "the targets of log_alpha");
    const bool in_rows = targets.dim() == 2;
    const auto is_within = [&](int64_t length) { return length <= targets.size(1); };
    TORCH_CHECK(in_rows ? targets.size(0) >= batch && std::ranges::all_of(lengths, is_within)
                        : std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) <= targets.size(0),
        call.name(), ": expected targets for target_lengths ", at::IntArrayRef(lengths), ", but got targets of shape ",
        targets.sizes());
    expect_below<int64_t>(call, "blank", std::array{call["blank"].toInt()}, classes, kClasses);
  }
  const auto values = call.numbers("targets");
  const auto total = static_cast<int64_t>(values.size()), width = targets.size(-1);
  int64_t start = 0;
  for (const int64_t length : lengths) {
    const int64_t count = std::clamp<int64_t>(length, 0, std::min(width, std::max<int64_t>(total - start, 0)));
    if (count)
      expect_below(call, "targets", at::ArrayRef(&values[static_cast<size_t>(start)], static_cast<size_t>(count)),
          classes, kClasses);
    start += targets.dim() == 1 ? count : width;
  }
}

// The gradient of a loss without reduction, in two dimensions.
void check_classes(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& self = call.tensor("self");
  if (call["reduction"].toInt() != 0 || self.dim() != 4) return; // the kernel checks, or raises
  auto used = call.numbers("target");
  std::erase(used, call["ignore_index"].toInt());
  expect_below<int64_t>(call, "target", used, self.size(1), "the classes of self");
}

void check_rows(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  expect_below(call, "self", call.tensor("self"), call["size"].toInt(), "the rows");
}

void check_compressed(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& columns = call.tensor("col_indices");
  if (columns.dim())
    expect_below(call, "crow_indices", call.tensor("crow_indices"), columns.size(-1) + 1, "the places of col_indices");
}

void check_transform(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  expect_below<int64_t>(call, "dim", call.numbers("dim"), call.tensor("self").dim(), "the dimensions of self");
}

// Arguments of a fixed number of numbers, from which the kernel reads this many.
void check_lists(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  for (const c10::Argument& argument : op.schema().arguments()) {
    if (!argument.N() || !call[argument.name().c_str()].isIntList()) continue;
    const auto count = call[argument.name().c_str()].toIntVector().size();
    TORCH_CHECK(count >= static_cast<size_t>(*argument.N()), call.name(), ": expected ", *argument.N(), " numbers for ",
        argument.name(), ", but got ", count);
  }
}

// The gradient of a reflection, which reads no further than the other edge.
void check_reflection(const c10::OperatorHandle& op, const Stack& stack) {
  check_lists(op, stack);
  const Arguments call(op, stack);
  const at::Tensor& self = call.tensor("self");
  const auto padding = call["padding"].toIntVector();
  for (size_t i = 0; i < padding.size() && static_cast<int64_t>(i / 2) < self.dim(); ++i) {
    const int64_t size = self.size(-1 - static_cast<int64_t>(i / 2));
    TORCH_CHECK(padding[i] < size, call.name(), ": expected padding less than ", size, ", the size of dimension ",
        -1 - static_cast<int64_t>(i / 2), " of self, but got ", at::IntArrayRef(padding));
  }
}

} // namespace

MissingCheck missing_check(const c10::OperatorHandle& op) {
  static const auto* checks = new std::unordered_map<std::string, MissingCheck>{
      {"aten::_convert_indices_from_coo_to_csr", check_rows},
      {"aten::_convert_indices_from_csr_to_coo", check_compressed},
      {"aten::_ctc_loss", check_ctc},
      {"aten::_ctc_loss_backward", check_ctc},
      {"aten::_embedding_bag", check_offsets},
      {"aten::_embedding_bag_backward", check_bags},
      {"aten::_embedding_bag_dense_backward", check_bags},
      {"aten::_embedding_bag_forward_only", check_offsets},
      {"aten::_embedding_bag_per_sample_weights_backward", check_bags},
      {"aten::_fft_c2c", check_transform},
      {"aten::_fft_c2r", check_transform},
      {"aten::_fft_r2c", check_transform},
      {"aten::_segment_reduce_backward", check_segments},
      {"aten::_slow_conv2d_backward", check_lists},
      {"aten::_sparse_mm_reduce_impl_backward", check_sparse_product},
      {"aten::adaptive_max_pool2d_backward", check_pooling<2, true>},
      {"aten::adaptive_max_pool3d_backward", check_pooling<3, true>},
      {"aten::embedding_dense_backward", check_embedding},
      {"aten::max_pool2d_with_indices_backward", check_pooling<2, false>},
      {"aten::max_pool3d_with_indices_backward", check_pooling<3, false>},
      {"aten::nll_loss2d_backward", check_classes},
      {"aten::reflection_pad1d_backward", check_reflection},
      {"aten::reflection_pad2d_backward", check_reflection},
      {"aten::segment_reduce", check_segments},
      {"quantized::embedding_bag_2bit_rowwise_offsets", check_offsets},
      {"quantized::embedding_bag_4bit_rowwise_offsets", check_offsets},
      {"quantized::embedding_bag_byte_rowwise_offsets", check_offsets},
  };
  const auto found = checks->find(op.schema().name());
  return found == checks->end() ? nullptr : found->second;
}

} // namespace openreg
