// Shared by the kernels: checks, memory for results, and running the work. Every call into PyTorch uses its stable ABI:
// torch/csrc/stable, torch/headeronly and the C functions below them.
#pragma once

#include <openreg/openreg.h>

#include "tensor.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace stable_operators {

using torch::headeronly::ScalarType;

constexpr int64_t kGrain = 4096; // elements that justify another thread

// Compiles a loop for several generations of processors; the one that fits is chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif

// The type that kernels compute in: float for the half types, else T.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// ---- checks: the same messages as the fake kernels ----

// STD_TORCH_CHECK would prefix the message with the function, file and line.
template <class... Words>
[[noreturn]] void fail(const Words&... words) {
  std::ostringstream sentence;
  (sentence << ... << words);
  throw std::runtime_error(sentence.str());
}

// The name that Python gives a dtype: "float32".
inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default: { // UInt16 and Float8_e5m2, for example, in lower case
      std::string name = torch::headeronly::toString(type);
      for (char& c : name)
        if (c >= 'A' && c <= 'Z') c += 'a' - 'A';
      return name;
    }
  }
}

inline std::string dtype_name(int32_t dtype) {
  return dtype_name(torch::stable::detail::to<ScalarType>(torch::stable::detail::from(dtype)));
}

inline std::string shape_of(Sizes sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
  return out + "]";
}

// The dtype and device of x, as PyTorch's own numbers; ask once in each call. Translating them to ScalarType and Device
// takes ten calls each, which matters in an operator of two microseconds, so we translate them only for messages.
struct Kind {
  explicit Kind(const Tensor& x) : dtype(x.dtype()), device_type(x.device_type()), device(x.device_index()) {}
  bool on_same_device(const Kind& other) const { return device_type == other.device_type && device == other.device; }
  bool on_cpu() const { return device_type == aoti_torch_device_type_cpu(); }
  int32_t dtype, device_type, device;
};

// float32 for the half types.
inline int32_t wide_dtype(int32_t dtype) {
  return dtype == aoti_torch_dtype_float64() ? dtype : aoti_torch_dtype_float32();
}

// A kernel sees tensors on its own device and, if a caller mixes devices, on the CPU or another openreg device.
inline std::string device_of(const Kind& kind) {
  return kind.on_cpu() ? "cpu" : "openreg:" + std::to_string(kind.device);
}

inline void check_tensor(const char* op, const char* name, const Tensor& x) {
  if (!x.defined()) fail(op, ": expected ", name, " to be a tensor, but got None");
}

inline Kind check_floating(const char* op, const char* name, const Tensor& x) {
  check_tensor(op, name, x);
  const Kind kind(x);
  if (kind.dtype != aoti_torch_dtype_float32() && kind.dtype != aoti_torch_dtype_float64() &&
      kind.dtype != aoti_torch_dtype_float16() && kind.dtype != aoti_torch_dtype_bfloat16())
    fail(op, ": expected ", name, " of float32, float64, float16 or bfloat16, but got ", dtype_name(kind.dtype),
        "; convert it with .to()");
  return kind;
}

// Checks that x has this dtype, the dtype of `of`, and is on the device of y.
inline void check_kind(const char* op, const char* name, const Tensor& x, int32_t dtype, const char* of,
    const char* y_name, const Kind& y) {
  check_tensor(op, name, x);
  const Kind kind(x);
  if (!kind.on_same_device(y))
    fail(op, ": ", y_name, " is on ", device_of(y), " but ", name, " is on ", device_of(kind), "; move one with .to()");
  if (kind.dtype != dtype)
    fail(op, ": expected ", name, " of ", dtype_name(dtype), ", the dtype of ", of, ", but got ",
        dtype_name(kind.dtype), "; convert one with .to()");
}

inline void check_shape(const char* op, const char* name, const Tensor& x, Sizes shape, const char* of) {
  if (x.sizes() != shape)
    fail(op, ": expected ", name, " of shape ", shape_of(shape), ", ", of, ", but got ", shape_of(x.sizes()));
}

// Checks that x has the device, dtype and shape of y.
inline void check_like(
    const char* op, const char* name, const Tensor& x, const char* of, const Tensor& y, const Kind& kind) {
  check_kind(op, name, x, kind.dtype, of, of, kind);
  if (x.sizes() != y.sizes()) check_shape(op, name, x, y.sizes(), ("the same as " + std::string(of)).c_str());
}

// ---- memory and work ----

// Replaces each tensor that is not contiguous by a copy that is. Calling aten::contiguous through the dispatcher costs
// as much as a small kernel, so ask first.
template <class... Tensors>
void make_contiguous(Tensors&... tensors) {
  const auto make = [](Tensor& x) {
    if (x.is_contiguous()) return;
    StableIValue stack[] = {torch::stable::detail::from(x.release()),
        torch::stable::detail::from(aoti_torch_memory_format_contiguous_format())};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::contiguous", "", stack, TORCH_ABI_VERSION));
    x = Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  };
  (make(tensors), ...);
}

// Contiguous memory on the device of x. torch::stable::new_empty() would box six arguments.
inline Tensor memory(Sizes sizes, int32_t dtype, const Kind& x) {
  int64_t few[8], stride = 1;
  std::vector<int64_t> many(sizes.size() > std::size(few) ? sizes.size() : 0);
  int64_t* const strides = many.empty() ? few : many.data();
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle out = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype, x.device_type, x.device, &out));
  return Tensor(out);
}

// f(begin, end) over parts of n items, each as much work as `weight` elements.
template <class F>
void parallel(int64_t n, int64_t weight, const F& f) {
  const int64_t grain = kGrain / (weight + 1) + 1;
  if (n <= grain) f(0, n);
  else torch::stable::parallel_for(0, n, grain, f);
}

// Runs immediately on the CPU. On openreg it runs in the current stream's order, now or later, so it holds no tensor.
template <class Work>
void run(const Kind& x, const char* name, Work work) {
  if (x.on_cpu()) work();
  else openreg::launch(openreg::current_stream(x.device), work, name);
}

// Calls f with a null pointer to the floating-point type of x.
template <class F>
void dispatch(const Kind& x, const F& f) {
  if (x.dtype == aoti_torch_dtype_float32()) f(static_cast<float*>(nullptr));
  else if (x.dtype == aoti_torch_dtype_float64()) f(static_cast<double*>(nullptr));
  else if (x.dtype == aoti_torch_dtype_float16()) f(static_cast<torch::headeronly::Half*>(nullptr));
  else f(static_cast<torch::headeronly::BFloat16*>(nullptr));
}

} // namespace stable_operators
