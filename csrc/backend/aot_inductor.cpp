// What Inductor's C++ wrappers (cpp_wrapper, AOTInductor) need from a device: the ATen operators that they call by
// name, and a runner that loads a compiled model.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_int_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/scatter_reduce.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include "backend/allocator.h"
#include "backend/identity/identity.h"

namespace {

at::Tensor& tensor(AtenTensorHandle handle) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
}

} // namespace

// Note [C shims]
// A wrapper calls every operator through the dispatcher, by its schema, except those that Inductor picks itself. It
// calls these as aoti_torch_DEVICE_NAME, with the signature of aoti_torch_cpu_NAME in c_shim_cpu.h.
// SHIMS in openreg_ops/inductor/codegen.py lists them.
#define SHIM __attribute__((visibility("default"))) AOTITorchError
#define BODY(...) AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({ __VA_ARGS__; })

extern "C" {

SHIM aoti_torch_openreg_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2){
    BODY(at::mm_out(tensor(out), tensor(self), tensor(mat2)))}

SHIM aoti_torch_openreg_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
    AtenTensorHandle mat2, double beta,
    double alpha){BODY(at::addmm_out(tensor(out), tensor(self), tensor(mat1), tensor(mat2), beta, alpha))}

SHIM aoti_torch_openreg_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2){
    BODY(at::bmm_out(tensor(out), tensor(self), tensor(mat2)))}

SHIM aoti_torch_openreg_baddbmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle batch1,
    AtenTensorHandle batch2, double beta,
    double alpha){BODY(at::baddbmm_out(tensor(out), tensor(self), tensor(batch1), tensor(batch2), beta, alpha))}

SHIM aoti_torch_openreg__int_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2){
    BODY(at::_int_mm_out(tensor(out), tensor(self), tensor(mat2)))}

SHIM aoti_torch_openreg_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias,
    const int64_t* stride, int64_t stride_len, const int64_t* padding, int64_t padding_len, const int64_t* dilation,
    int64_t dilation_len, int32_t transposed, const int64_t* output_padding, int64_t output_padding_len, int64_t groups,
    AtenTensorHandle* ret0) {
  using Dims = at::IntArrayRef;
  const auto size = [](int64_t length) { return static_cast<size_t>(length); };
  BODY(*ret0 = torch::aot_inductor::new_tensor_handle(
           at::convolution(tensor(input), tensor(weight), bias ? std::optional(tensor(*bias)) : std::nullopt,
               Dims(stride, size(stride_len)), Dims(padding, size(padding_len)), Dims(dilation, size(dilation_len)),
               transposed, Dims(output_padding, size(output_padding_len)), groups)))
}

SHIM aoti_torch_openreg_randint_low_out(
    AtenTensorHandle out, int64_t low, int64_t high, const int64_t* size, int64_t size_len){
    BODY(at::randint_out(tensor(out), low, high, at::IntArrayRef(size, static_cast<size_t>(size_len))))}

SHIM
    aoti_torch_openreg_scatter_src_out(AtenTensorHandle out, AtenTensorHandle self, int64_t dim, AtenTensorHandle index,
        AtenTensorHandle src){BODY(at::scatter_out(tensor(out), tensor(self), dim, tensor(index), tensor(src)))}

SHIM aoti_torch_openreg_scatter_value_out(AtenTensorHandle out, AtenTensorHandle self, int64_t dim,
    AtenTensorHandle index, double value){BODY(at::scatter_out(tensor(out), tensor(self), dim, tensor(index), value))}

SHIM aoti_torch_openreg_scatter_reduce_two_out(AtenTensorHandle out, AtenTensorHandle self, int64_t dim,
    AtenTensorHandle index, AtenTensorHandle src, const char* reduce, int32_t include_self) {
  BODY(at::scatter_reduce_out(tensor(out), tensor(self), dim, tensor(index), tensor(src), reduce, include_self))
}

} // extern "C"

namespace openreg {
namespace {

AOTIRuntimeError refuse_to_copy(AOTInductorModelContainerHandle, AOTInductorConstantMapHandle, bool, bool) {
  TORCH_CHECK(false,
      "openreg: load_constants cannot copy weights into a package on this device; pass user_managed=True and keep the "
      "tensors alive");
}

// Loads a compiled model. Its runtime supports only PyTorch's own devices, so we tell it that it runs on the CPU, with
// this device's index; see CppWrapper.get_device_include_path_aot in openreg_ops/inductor/codegen.py for the other
// half. The runtime keeps the weights in malloc's memory, so we replace them with copies in device memory. It must not
// copy new ones from load_constants().
class Runner final : public torch::inductor::AOTIModelContainerRunner {
 public:
  Runner(const std::string& path, size_t models, c10::DeviceIndex device, const std::string& directory, bool single)
      : AOTIModelContainerRunner(path, models, "cpu:" + std::to_string(device), directory, single) {
    update_constant_buffer_func_ = &refuse_to_copy;
    for (const auto& [name, weight] : extract_constants_map(/*use_inactive=*/false))
      weights_[name] = on_device(weight.device()) ? weight.clone() : weight;
    if (weights_.empty()) return;
    update_constant_buffer(weights_, /*use_inactive=*/false, /*validate_full_updates=*/false, /*user_managed=*/true);
  }

 private:
  std::unordered_map<std::string, at::Tensor> weights_;
};

std::unique_ptr<torch::inductor::AOTIModelContainerRunner> make_runner(
    const std::string& path, size_t models, const std::string& device, const std::string& directory, bool single) {
  const auto index = checked_index(std::optional(c10::Device(device)));
  AdoptHostMemory weights(index);
  return std::make_unique<Runner>(path, models, index, directory, single);
}

const torch::inductor::RegisterAOTIModelRunner runner_registered(identity.name, &make_runner);

} // namespace
} // namespace openreg
