// Tensors, and the form in which the dispatcher calls a kernel of them. torch::stable::Tensor and TORCH_BOX do the same
// and are enough for most operators. These are faster, which shows in an operator of one microsecond: a tensor
// allocates no memory, and results are moved to the caller instead of copied.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace stable_operators {

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Owns a handle, which is an at::Tensor to PyTorch. Each property is a call into PyTorch.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  AtenTensorHandle release() { return handle_.release(); }

  bool defined() const { return ask<bool>(aoti_torch_is_defined); }
  int64_t dim() const { return ask<int64_t>(aoti_torch_get_dim); }
  int64_t numel() const { return ask<int64_t>(aoti_torch_get_numel); }
  Sizes sizes() const { return {ask<int64_t*>(aoti_torch_get_sizes), static_cast<size_t>(dim())}; }
  bool is_contiguous() const { return ask<bool>(aoti_torch_is_contiguous); }
  int32_t dtype() const { return ask<int32_t>(aoti_torch_get_dtype); }
  int32_t device_type() const { return ask<int32_t>(aoti_torch_get_device_type); }
  int32_t device_index() const { return ask<int32_t>(aoti_torch_get_device_index); }

  // What a kernel of T reads or writes. The kernel was chosen by the dtype, which is not checked again.
  template <class T>
  const T* read() const {
    return static_cast<const T*>(ask<const void*>(torch_get_const_data_ptr));
  }
  template <class T>
  T* write() {
    return static_cast<T*>(ask<void*>(torch_get_mutable_data_ptr));
  }

 private:
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };

  template <class T>
  T ask(AOTITorchError (*property)(AtenTensorHandle, T*)) const {
    T out;
    STABLE_TORCH_ERROR_CODE_CHECK(property(handle_.get(), &out));
    return out;
  }

  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
};

// The stack holds the handles of the arguments, which the kernel owns, and gets the handles of the results.
template <auto kernel, class... Results, class... Args, size_t... in, size_t... out>
void call_boxed(
    StableIValue* stack, std::tuple<Results...> (*)(Args...), std::index_sequence<in...>, std::index_sequence<out...>) {
  const auto take = []<class T>(std::type_identity<T>, StableIValue value) {
    if constexpr (std::is_same_v<T, Tensor>) return Tensor(torch::stable::detail::to<AtenTensorHandle>(value));
    else return torch::stable::detail::to<T>(value);
  };
  std::tuple<Args...> args{take(std::type_identity<Args>(), stack[in])...};
  std::tuple<Results...> results = std::apply(kernel, std::move(args));
  ((stack[out] = torch::stable::detail::from(std::get<out>(results).release())), ...);
}

// A kernel that takes Tensors and numbers and returns a tuple of Tensors, in the form that `m.impl` expects.
template <auto kernel>
void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  [&]<class... Results, class... Args>(std::tuple<Results...> (*function)(Args...)) {
    STD_TORCH_CHECK(inputs == sizeof...(Args) && outputs == sizeof...(Results), "expected a schema of ",
        sizeof...(Args), " arguments and ", sizeof...(Results), " results, as the kernel has, but got one of ", inputs,
        " and ", outputs);
    call_boxed<kernel>(stack, function, std::index_sequence_for<Args...>(), std::index_sequence_for<Results...>());
  }(kernel);
}

} // namespace stable_operators
