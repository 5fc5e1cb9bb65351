#include "aten/traits/wider_dtypes.h"

#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/_to_copy.h>
#include <c10/util/llvmMathExtras.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "aten/traits/replaced_arguments.h"
#include "aten/traits/traits.h"
#include "backend/identity/identity.h"
#include "backend/map_tensors.h"

namespace openreg {
namespace {

using at::ScalarType;
using torch::jit::Stack;

ScalarType wide(ScalarType type) {
  switch (type) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2:
    case at::kFloat8_e5m2fnuz:
      return at::kFloat;
    case at::kComplexHalf:
      return at::kComplexFloat;
    case at::kBool:
      return at::kByte;
    default:
      return type;
  }
}

// The final dtype of a result computed as `type`, if the arguments should have had dtype `narrow`.
ScalarType rounded(ScalarType type, ScalarType narrow) {
  const bool half = narrow == at::kHalf || narrow == at::kComplexHalf;
  if (type == at::kComplexFloat && half) return at::kComplexHalf;
  if (type == at::kFloat && half) return at::kHalf;
  if (type == at::kFloat && (bit(narrow) & (bit(at::kBFloat16) | kFloat8s))) return narrow;
  return type;
}

at::Tensor cast(const at::Tensor& x, ScalarType type, std::optional<at::MemoryFormat> format = std::nullopt) {
  if (x.scalar_type() == type) return x;
  return at::_to_copy(x, x.options().dtype(type), /*non_blocking=*/false, format);
}

bool is_dtype(const c10::Argument& argument) {
  auto type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::ScalarTypeType;
}

// The dtype that an operator computes in, and whether the arguments included another one.
struct Found {
  std::optional<ScalarType> type;
  bool mixed = false;
};

Found find(const c10::FunctionSchema& schema, const c10::IValue* arguments, Computes rule, std::uint64_t lacks) {
  Found found;
  at::native::ResultTypeState state;
  std::vector<ScalarType> outs;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool out = argument.kwarg_only() && is_written(argument);
    if (is_dtype(argument) && !arguments[i].isNone()) return {arguments[i].toScalarType(), false};
    visit_tensors(arguments[i], [&](const at::Tensor& x) {
      if (!x.defined()) return;
      const ScalarType type = x.scalar_type();
      if (out) return outs.push_back(type);
      if (rule == Computes::kInPromoted) {
        state = at::native::update_result_type_state(x, state);
      } else if (bit(type) & lacks) {
        found.mixed |= found.type && *found.type != type;
        found.type = type;
      } else if (c10::isFloatingType(type) || c10::isComplexType(type)) {
        found.mixed = true;
      }
    });
    if (rule == Computes::kInPromoted && arguments[i].isScalar() && !is_dtype(argument) &&
        argument.type()->kind() == c10::TypeKind::NumberType)
      state = at::native::update_result_type_state(arguments[i].toScalar(), state);
  }
  if (rule == Computes::kInPromoted) found.type = at::native::result_type(state);
  // A half-type kernel accepts only an out= of its own dtype.
  if (rule == Computes::kInOneDtype && (lacks & kHalfs))
    for (const ScalarType type : outs) found.mixed |= type != found.type;
  return found;
}

// The signal sizes of a transform.
std::vector<int64_t> signal_sizes(const c10::OperatorHandle& op, const c10::IValue* arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  std::vector<int64_t> sizes;
  const auto dims = arguments[1].toIntVector();
  for (const int64_t dim : dims)
    if (self.dim() && dim >= -self.dim() && dim < self.dim()) sizes.push_back(self.size(dim));
  if (op.schema().name() == "aten::_fft_c2r" && !sizes.empty()) sizes.back() = arguments[3].toInt();
  return sizes;
}

} // namespace

bool run_wider(const Traits& traits, const c10::OperatorHandle& op, Stack* stack, c10::DispatchKey key) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const Found found = find(schema, stack->data() + first, traits.computes, traits.lacks);
  // An operator that takes one floating-point dtype rejects two; its CPU kernel does that.
  if (!found.type || !(bit(*found.type) & traits.lacks) || found.mixed) return false;
  const ScalarType narrow = *found.type;
  if (traits.computes == Computes::kTransforms && narrow != at::kBFloat16)
    check_half_transform(schema.name().c_str(), signal_sizes(op, stack->data() + first));

  for (size_t i = 0; i < count; ++i)
    if (c10::IValue& value = (*stack)[first + i]; is_dtype(schema.arguments()[i]) && !value.isNone())
      value = wide(value.toScalarType());
  const auto widen = [&](const at::Tensor& x, bool written) {
    const ScalarType type = x.scalar_type();
    const bool half = type == at::kHalf || type == at::kBFloat16;
    if (!(bit(type) & traits.lacks) && !(half && narrow == at::kComplexHalf)) return x;
    // The CPU kernels of the other operators check this. angle and _fft_c2r return real results for complex arguments.
    TORCH_CHECK(!written || traits.computes != Computes::kInPromoted || c10::canCast(narrow, type), "result type ",
        narrow, " can't be cast to the desired output type ", type);
    // Some CPU kernels write as if a result were contiguous; the copy has the caller's strides.
    const bool contiguous = written && x.layout() == at::kStrided;
    at::Tensor widened = cast(x, wide(type), contiguous ? at::MemoryFormat::Contiguous : at::MemoryFormat::Preserve);
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) widened.unsafeGetTensorImpl()->set_wrapped_number(true);
    return widened;
  };
  call_with_replaced(
      op, stack, key, widen, [&](const at::Tensor& y) { return cast(y, rounded(y.scalar_type(), narrow)); });
  return true;
}

void check_half_transform(const char* name, at::IntArrayRef sizes) {
  const bool all = std::all_of(sizes.begin(), sizes.end(),
      [](int64_t size) { return size < 1 || c10::llvm::isPowerOf2_64(static_cast<std::uint64_t>(size)); });
  TORCH_CHECK(all, name,
      ": expected signal sizes that are powers of two in half precision, as cuFFT requires, but got ", sizes,
      "; convert the input to float32, or pad the signal with n= or s=");
}

at::Tensor& write_out(const char* name, const at::Tensor& result, at::Tensor& out) {
  TORCH_CHECK(c10::canCast(result.scalar_type(), out.scalar_type()), name, ": result type ", result.scalar_type(),
      " can't be cast to the desired output type ", out.scalar_type());
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

} // namespace openreg
