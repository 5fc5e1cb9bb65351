#include "aten/traits/missing_checks.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace openreg {

void expect_layer_norm(
    const at::Tensor& grad_out, const at::Tensor& input, size_t dims, const at::Tensor& mean, const at::Tensor& rstd) {
  constexpr const char* kName = "native_layer_norm_backward";
  TORCH_CHECK(grad_out.sizes() == input.sizes(), kName, ": expected grad_out of shape ", input.sizes(),
      ", the shape of input, but got ", grad_out.sizes());
  const auto outer = static_cast<size_t>(input.dim()) - std::min(dims, static_cast<size_t>(input.dim()));
  const int64_t rows = c10::multiply_integers(input.sizes().slice(0, outer));
  TORCH_CHECK(mean.numel() == rows && rstd.numel() == rows, kName, ": expected mean and rstd of ", rows,
      " elements, one for each row of input, but got ", mean.sizes(), " and ", rstd.sizes());
}

namespace {

using torch::jit::Stack;

// The arguments of a call, by name.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack)
      : schema_(op.schema()), first_(&stack[stack.size() - schema_.arguments().size()]) {}

  const c10::IValue& operator[](const char* name) const {
    const auto place = schema_.argumentIndexWithName(name);
    TORCH_INTERNAL_ASSERT(place.has_value(), this->name(), " has no argument ", name);
    return first_[static_cast<size_t>(*place)];
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
  // Returns true if the operator has this argument, and it is not None.
  bool has(const char* name) const {
    return schema_.argumentIndexWithName(name).has_value() && !(*this)[name].isNone();
  }
  // The operator, for a message.
  std::string name() const { return schema_.name().substr(schema_.name().find("::") + 2); }
  // The number in the operator's name: 2 for avg_pool2d_backward.
  int64_t dimensions() const { return schema_.name()[schema_.name().find_first_of("123")] - '0'; }

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
  bound = std::max<int64_t>(bound, 0);
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

// Raises unless the tensor `which` has this shape. Accepts an undefined tensor.
void expect_shape(const Arguments& call, const char* which, at::IntArrayRef shape) {
  const at::Tensor& x = call.tensor(which);
  if (x.defined())
    TORCH_CHECK(x.sizes() == shape, call.name(), ": expected ", which, " of shape ", shape, ", but got ", x.sizes());
}

// Raises unless each of these arguments has one number for each of the `count` elements of a dimension; `of` names it.
// An argument that is missing or None has none.
void expect_one_each(
    const Arguments& call, std::initializer_list<const char*> arguments, int64_t count, const char* of) {
  for (const char* which : arguments) {
    if (!call.has(which) || !call.tensor(which).defined()) continue;
    TORCH_CHECK(call.tensor(which).numel() == count, call.name(), ": expected ", which, " of ", count,
        " elements, one for each of ", of, ", but got shape ", call.tensor(which).sizes());
  }
}

// The gradient of a function of each plane, the last `count` dimensions, has as many planes.
void expect_same_planes(const Arguments& call, int64_t count) {
  const at::Tensor &grad = call.tensor("grad_output"), &self = call.tensor("self");
  const auto planes = self.sizes().slice(0, static_cast<size_t>(self.dim() - count));
  TORCH_CHECK(grad.dim() == self.dim() && grad.sizes().slice(0, planes.size()) == planes, call.name(),
      ": expected a grad_output of shape ", planes, " before its last ", count, " dimensions, as self, of shape ",
      self.sizes(), ", but got ", grad.sizes());
}

} // namespace

// The gradient of a pooling: `indices` are places in the last `count` dimensions of `self`. The kernel of an adaptive
// one does not check the number of dimensions.
void check_pooling(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const int64_t count = call.dimensions();
  const bool adaptive = call.name().starts_with("adaptive");
  const at::Tensor &grad = call.tensor("grad_output"), &self = call.tensor("self"), &indices = call.tensor("indices");
  const bool same = grad.dim() == self.dim() && (adaptive || indices.dim() == self.dim());
  if (self.dim() < count || !same) return; // the kernel raises
  expect_same_planes(call, count);
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

namespace {

// How many bags the offsets begin before the last index; each index after the last offset belongs to the last of them.
int64_t bags_of(const Arguments& call, int64_t indices) {
  return std::ranges::count_if(call.numbers("offsets"), [=](int64_t offset) { return offset < indices; });
}

} // namespace

// Embedding bags; only `offsets` between the first and the last have no check.
void check_offsets(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const int64_t indices = call.tensor("indices").numel();
  if (!call["offsets"].isTensor() || !call.tensor("offsets").defined()) return;
  expect_below(call, "offsets", call.tensor("offsets"), indices + 1, kElements);
  // Kernels that compute the bag of each index need one.
  const at::Tensor& weight = call.tensor("weight");
  const bool of_each = call["mode"].toInt() == 2 || weight.scalar_type() == at::kDouble || !weight.is_contiguous();
  const int64_t bags = call.tensor("offsets").numel() - call["include_last_offset"].toBool();
  TORCH_CHECK(!of_each || !indices || bags > 0, call.name(),
      ": expected offsets of at least one bag, because there are ", indices, " indices, but got shape ",
      call.tensor("offsets").sizes());
}

void check_quantized_bags(const c10::OperatorHandle& op, const Stack& stack) {
  check_offsets(op, stack);
  const Arguments call(op, stack);
  const int64_t rows = call.tensor("weight").dim() ? call.tensor("weight").size(0) : 0;
  expect_one_each(call, {"per_sample_weights"}, call.tensor("indices").numel(), "the indices");
  if (!call["pruned_weights"].toBool() || !call.has("compressed_indices_mapping")) return;
  const auto mapping = call.numbers("compressed_indices_mapping");
  const auto is_row = [rows](int64_t row) { return -1 <= row && row < rows; };
  TORCH_CHECK_INDEX(mapping.size() <= 1 || std::ranges::all_of(mapping, is_row), call.name(),
      ": expected compressed_indices_mapping from -1, for a row that is pruned, to ", rows - 1, ", but got ",
      *std::ranges::find_if_not(mapping, is_row));
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
  if (has_weight) std::erase(used, padding); // the other kernels count each index
  expect_below<int64_t>(call, "indices", used, rows, kRows);
  expect_below(call, "offset2bag", call.tensor("offset2bag"), grad.size(0), "the bags");
  if (has_weight && call.tensor("offset2bag").numel())
    expect_one_each(call, {"offset2bag"}, indices.numel(), "the indices");
  if (op.schema().argumentIndexWithName("offsets")) {
    expect_below(call, "offsets", call.tensor("offsets"), indices.numel() + 1, kElements);
    if (!call.tensor("offset2bag").numel() && indices.numel()) { // the kernel computes it
      const auto offsets = call.numbers("offsets");
      TORCH_CHECK(std::ranges::find(offsets, 0) != offsets.end(), call.name(),
          ": expected offsets with one of 0, for the first index, but got ", at::IntArrayRef(offsets));
      TORCH_CHECK(bags_of(call, indices.numel()) <= grad.size(0), call.name(), ": expected offsets of ", grad.size(0),
          " bags, the rows of grad, but got offsets ", at::IntArrayRef(offsets), " for ", indices.numel(), " indices");
    }
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
  const auto reduce = call["reduce"].toStringView();
  if (!chosen.defined() || (reduce != "amax" && reduce != "amin")) return; // a reduction that chooses none
  TORCH_CHECK(chosen.sizes() == grad.sizes(), call.name(), ": expected arg_out of shape ", grad.sizes(),
      ", as grad_out, but got ", chosen.sizes());
  expect_below(call, "arg_out", chosen, call.tensor("self")._nnz() + 1, "places among the values of self");
}

// The CTC loss and its gradient. A 2-dim `targets` has a row for each batch, a 1-dim one has them one after another.
void check_ctc(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &log_probs = call.tensor("log_probs"), &targets = call.tensor("targets");
  const bool backward = call.has("log_alpha"); // which checks nothing
  const bool right = log_probs.dim() == 3 && (targets.dim() == 1 || targets.dim() == 2);
  TORCH_CHECK(right || !backward, call.name(), ": expected log_probs of 3 dimensions and targets of 1 or 2, but got ",
      log_probs.sizes(), " and ", targets.sizes());
  if (!right) return; // the kernel raises
  const int64_t steps = log_probs.size(0), batch = log_probs.size(1), classes = log_probs.size(2);
  const auto inputs = call.numbers("input_lengths"), lengths = call.numbers("target_lengths");
  if (backward) {
    const at::Tensor& alpha = call.tensor("log_alpha");
    TORCH_CHECK(alpha.dim() == 3 && alpha.size(0) >= batch && alpha.size(1) >= steps, call.name(),
        ": expected log_alpha of shape (", batch, ", ", steps, ", 2 * target length + 1), but got ", alpha.sizes());
    for (const char* which : {"grad", "neg_log_likelihood"})
      TORCH_CHECK(call.tensor(which).dim() == 1 && call.tensor(which).size(0) == batch, call.name(), ": expected ",
          which, " of shape (", batch, "), but got ", call.tensor(which).sizes());
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

// The gradient of a loss without reduction.
void check_classes(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& self = call.tensor("self");
  if (call["reduction"].toInt() != 0 || (self.dim() != 4 && self.dim() != 2)) return; // the kernel checks, or raises
  auto used = call.numbers("target");
  std::erase(used, call["ignore_index"].toInt());
  expect_below<int64_t>(call, "target", used, self.size(1), "the classes of self");
}

void check_rows(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  TORCH_CHECK(
      call["size"].toInt() >= 0, call.name(), ": expected a size of at least 0, but got ", call["size"].toInt());
  expect_below(call, "self", call.tensor("self"), call["size"].toInt(), "the rows");
}

void check_compressed(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &rows = call.tensor("crow_indices"), &columns = call.tensor("col_indices");
  if (!columns.dim() || !rows.dim()) return; // the kernel raises
  expect_below(call, "crow_indices", rows, columns.size(-1) + 1, "the places of col_indices");
  const auto numbers = call.numbers("crow_indices");
  for (size_t i = 1; i < numbers.size(); ++i)
    TORCH_CHECK(static_cast<int64_t>(i) % rows.size(-1) == 0 || numbers[i - 1] <= numbers[i], call.name(),
        ": expected crow_indices that do not decrease, but got ", numbers[i - 1], " before ", numbers[i]);
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

void check_batch_norm(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& input = call.tensor("input");
  if (input.dim() < 2) return; // the kernel raises
  constexpr const char* kChannels = "the channels of input";
  expect_one_each(call, {"weight", "bias", "running_mean", "running_var"}, input.size(1), kChannels);
  const bool backward = call.has("grad_out");
  const std::string_view name = op.schema().name();
  bool training = name != "aten::_batch_norm_no_update";
  for (const char* flag : {"training", "train", "update"})
    if (call.has(flag)) training = call[flag].toBool();
  if (!training) // the statistics are read
    for (const char* which : {"running_mean", "running_var"})
      TORCH_CHECK(call.has(which) && call.tensor(which).defined(), call.name(), ": expected a ", which,
          ", because this is not training, but got none");
  if (!backward) return;
  expect_shape(call, "grad_out", input.sizes());
  TORCH_CHECK(input.size(0) > 0 && input.size(1) > 0, call.name(),
      ": expected an input with a batch and channels, but got shape ", input.sizes());
  if (!training) return;
  for (const char* which : {"save_mean", name == "aten::batch_norm_backward" ? "save_var" : "save_invstd"})
    TORCH_CHECK(call.has(which) && call.tensor(which).defined(), call.name(), ": expected a ", which,
        ", because this is training, but got none");
  expect_one_each(call, {"save_mean", "save_invstd", "save_var"}, input.size(1), kChannels);
}

// `g` or its like has a number for each slice of `v` in the dimension `dim`.
void check_weight_norm(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const bool forward = call.has("v");
  const at::Tensor& v = call.tensor(forward ? "v" : "saved_v");
  const int64_t dim = call["dim"].toInt();
  if (dim < 0 || dim >= v.dim()) return; // the kernel raises
  if (!forward) expect_shape(call, "grad_w", v.sizes());
  TORCH_CHECK(
      v.size(dim) > 0, call.name(), ": expected a v with elements in dimension ", dim, ", but got shape ", v.sizes());
  expect_one_each(call, {"g", "saved_g", "saved_norms"}, v.size(dim), "the slices of v in dimension dim");
}

// The gradient of sampling at the points of `grid`, (N, *out, dimensions).
void check_grid(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &input = call.tensor("input"), &grid = call.tensor("grid");
  if (input.dim() < 2 || grid.dim() != input.dim()) return; // the kernel raises
  std::vector<int64_t> shape = {input.size(0), input.size(1)};
  shape.insert(shape.end(), grid.sizes().begin() + 1, grid.sizes().end() - 1);
  expect_shape(call, "grad_output", shape);
}

// The gradient of a function of each plane.
void check_planes(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const int64_t count = call.dimensions();
  const at::Tensor &grad = call.tensor("grad_output"), &self = call.tensor("self");
  if (self.dim() < count) return; // the kernel raises
  expect_same_planes(call, count);
  TORCH_CHECK(self.numel() > 0 || grad.numel() == 0, call.name(), ": expected a self with elements, as grad_output of ",
      grad.sizes(), " has, but got ", self.sizes());
}

// The gradient of a reflection, which reads no further than the other edge.
void check_reflection(const c10::OperatorHandle& op, const Stack& stack) {
  check_planes(op, stack);
  check_lists(op, stack);
  const Arguments call(op, stack);
  const at::Tensor& self = call.tensor("self");
  const auto padding = call["padding"].toIntVector();
  for (size_t i = 0; i < padding.size() && static_cast<int64_t>(i / 2) < self.dim(); ++i) {
    const int64_t dim = -1 - static_cast<int64_t>(i / 2);
    TORCH_CHECK(padding[i] < self.size(dim), call.name(), ": expected padding less than ", self.size(dim),
        ", the size of dimension ", dim, " of self, but got ", at::IntArrayRef(padding));
  }
}

// The gradient of a fractional pooling, which checks the values of `indices`.
void check_fractional(const c10::OperatorHandle& op, const Stack& stack) {
  check_planes(op, stack);
  const Arguments call(op, stack);
  const int64_t count = call.dimensions();
  const auto given = static_cast<int64_t>(call["output_size"].toIntVector().size());
  TORCH_CHECK(given >= count, call.name(), ": expected ", count, " numbers for output_size, but got ", given);
  expect_shape(call, "indices", call.tensor("grad_output").sizes());
}

// The gradient of a loss. Without reduction, there is one for each row of `self`.
void check_margins(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& self = call.tensor("self");
  if (call["reduction"].toInt() == 0 && self.dim() == 2)
    return expect_one_each(call, {"grad_output"}, self.size(0), "the rows of self");
  TORCH_CHECK(call.tensor("grad_output").numel() > 0, call.name(),
      ": expected a grad_output with an element, but got shape ", call.tensor("grad_output").sizes());
}

void check_layer_norm(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  expect_layer_norm(call.tensor("grad_out"), call.tensor("input"), call["normalized_shape"].toIntVector().size(),
      call.tensor("mean"), call.tensor("rstd"));
}

void check_softmax(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  expect_shape(call, "output", call.tensor("grad_output").sizes());
}

// `pivots` of a matrix of m rows and n columns: min(m, n).
void check_pivots(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& matrix = call.tensor("LU_data");
  if (matrix.dim() < 2 || !call["unpack_pivots"].toBool()) return;
  std::vector<int64_t> shape = matrix.sizes().vec();
  shape.pop_back();
  shape.back() = std::min(matrix.size(-1), matrix.size(-2));
  expect_shape(call, "LU_pivots", shape);
}

// The gradient of the distances of rows of `x1` from rows of `x2`.
void check_distances(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &x1 = call.tensor("x1"), &x2 = call.tensor("x2");
  if (x1.dim() < 2 || x2.dim() < 2) return; // the kernel raises
  TORCH_CHECK(x1.size(-1) == x2.size(-1), call.name(), ": expected x1 and x2 with the same last dimension, but got ",
      x1.sizes(), " and ", x2.sizes());
  const auto batch = [](const at::Tensor& x) { return x.sizes().slice(0, static_cast<size_t>(x.dim() - 2)); };
  std::vector<int64_t> shape = at::infer_size(batch(x1), batch(x2));
  shape.insert(shape.end(), {x1.size(-2), x2.size(-2)});
  if (c10::multiply_integers(shape) == 0 || x1.size(-1) == 0) return; // reads nothing
  expect_shape(call, call.has("grad") ? "grad" : "grad_output", shape); // as versions of PyTorch call it
  expect_shape(call, "cdist", shape);
}

// The gradient of the distances between the rows of `self`.
void check_pairs(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor& self = call.tensor("self");
  TORCH_CHECK(self.dim() == 2, call.name(), ": expected a self of 2 dimensions, but got shape ", self.sizes());
  const int64_t rows = self.size(0);
  expect_one_each(call, {"grad", "grad_output", "pdist"}, rows * (rows - 1) / 2, "the pairs of rows of self");
}

// Attention, with tensors of (batch, heads, length, size), and its gradient.
void check_attention(const c10::OperatorHandle& op, const Stack& stack) {
  const Arguments call(op, stack);
  const at::Tensor &query = call.tensor("query"), &key = call.tensor("key"), &value = call.tensor("value");
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return; // the kernel raises
  TORCH_CHECK(key.sizes() == value.sizes() && key.size(0) == query.size(0) && key.size(3) == query.size(3), call.name(),
      ": expected a key and a value of the same shape, with the batch and the size of query, of shape ", query.sizes(),
      ", but got key ", key.sizes(), " and value ", value.sizes());
  TORCH_CHECK(key.size(1) > 0 && query.size(1) % key.size(1) == 0, call.name(),
      ": expected a number of heads of query that is a multiple of those of key, but got ", query.size(1), " and ",
      key.size(1));
  const bool backward = call.has("grad_out");
  TORCH_CHECK(backward || (query.size(2) > 0 && key.size(2) > 0), call.name(),
      ": expected a length of at least 1, but got query ", query.sizes(), " and key ", key.sizes());
  if (!backward) return;
  expect_shape(call, "grad_out", query.sizes());
  expect_shape(call, "out", query.sizes());
  expect_shape(call, "logsumexp", query.sizes().slice(0, 3));
}

// embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
bool conditions::embedding_ignores_counts(const c10::IValue* arguments) {
  return !arguments[4].toBool();
}

// nll_loss_backward(grad_output, self, target, weight, reduction)
bool conditions::nll_loss_backward_reduces(const c10::IValue* arguments) {
  return arguments[4].toInt() != at::Reduction::None;
}

} // namespace openreg
