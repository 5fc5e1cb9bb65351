#include "aten/boxed.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/clone.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aten/deferred/deferred.h"
#include "aten/kernel_kind.h"
#include "aten/traits/cuda_rules.h"
#include "aten/traits/host_scalars.h"
#include "aten/traits/results_in_own_memory.h"
#include "aten/traits/traits.h"
#include "aten/traits/wider_dtypes.h"
#include "backend/allocator.h"
#include "backend/generator.h"
#include "backend/identity/identity.h"
#include "backend/map_tensors.h"
#include "backend/sync_debug.h"
#include "runtime/device.h"
#include "runtime/process/attention.h"

namespace openreg {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Returns true for a quantized tensor of torch.empty, which few kernels take.
bool lacks_quantizer(const at::Tensor& t) {
  return t.defined() && t.is_quantized() &&
      dynamic_cast<at::UnknownQuantizer*>(static_cast<at::QTensorImpl*>(t.unsafeGetTensorImpl())->quantizer().get());
}

// Runs the CPU kernel of one operator; `target` is the CPU's key for the layout it serves.
class BoxedCpuKernel final : public c10::OperatorKernel {
 public:
  BoxedCpuKernel(const c10::OperatorHandle& op, DispatchKey target) : target_(target), traits_(traits_of(op)) {
    const c10::FunctionSchema& schema = op.schema();
    const auto kSizes = c10::OptionalType::create(c10::ListType::create(c10::SymIntType::get()));
    for (const auto& argument : schema.arguments()) {
      write_.push_back(is_written(argument));
      const auto& type = argument.type();
      generator_.push_back(type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())));
      takes_generator_ |= generator_.back();
      takes_device_ |= type->isSubtypeOf(*c10::OptionalType::create(c10::DeviceObjType::get()));
      takes_sizes_ |= argument.real_type()->isSubtypeOf(*kSizes);
    }
    draws_ = !takes_generator_ && op.hasTag(at::Tag::nondeterministic_seeded) && !traits_.never_draws;
    takes_results_ = takes_results(schema);
    views_ = op.hasTag(at::Tag::inplace_view) || traits_.has_no_memory;
    for (const auto& result : schema.returns()) views_ |= result.alias_info() && !result.alias_info()->isWrite();
    if (target == DispatchKey::CPU) {
      contiguous_ = read_as_contiguous(op);
    } else {
      traits_.check_shapes = nullptr;
      if (target != DispatchKey::SparseCsrCPU) traits_.lacks = 0;
    }
  }

  void operator()(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
    if (takes_sizes_) plain_sizes(stack);
    if (C10_UNLIKELY(traits_.only_cpu_scalar != nullptr)) check_cpu_scalar(traits_, op, *stack);
    if (C10_UNLIKELY(!contiguous_.empty())) make_contiguous(contiguous_, op, stack);
    if (C10_UNLIKELY(traits_.synchronizes != nullptr) && watches_syncs())
      if (const auto* arguments = stack->data() + stack->size() - write_.size(); traits_.synchronizes(arguments))
        synchronizes(op.operator_name().name.c_str());
    if (C10_UNLIKELY(traits_.nondeterministic != nullptr) && at::globalContext().deterministicAlgorithms() &&
        traits_.nondeterministic(stack->data() + stack->size() - write_.size()))
      refuse_nondeterministic(op.schema().name());
    if (C10_UNLIKELY(traits_.lacks != 0)) {
      const bool dense = target_ == DispatchKey::CPU;
      if (run_wider(traits_, op, stack, dense ? identity.dense : identity.sparse_csr)) return;
    }
    if (C10_UNLIKELY(takes_results_) && target_ == DispatchKey::CPU && call_with_own_memory(op, stack)) return;
    const bool may_capture = detail::any_capture();
    if (C10_UNLIKELY(queueing()) && !(may_capture && here_is_captured()) && target_ == DispatchKey::CPU &&
        queue_operator(op, stack))
      return;
    // The stack holds the only reference to some tensors, which the call needs until it ends.
    c10::SmallVector<c10::IValue, 8> held;
    CpuCall call(op.operator_name().name.c_str(), traits_.reads_no_data ? CpuCall::kAny : CpuCall::kSame);
    bool for_host = false; // the caller asks for a CPU result, which then does not belong to the device
    if (traits_.host_tensors != HostTensors::kNone) call.allow_host_tensors();
    if (traits_.only_cpu_scalar != nullptr) call.allow_scalars();
    const size_t count = write_.size();
    for (size_t i = 0; i < count && takes_device_; ++i) {
      c10::IValue& value = (*stack)[stack->size() - count + i];
      if (!value.isDevice()) continue;
      for_host = value.toDevice().is_cpu();
      if (for_host) continue;
      call.set_device(checked_index(value.toDevice()));
      value = c10::Device(c10::kCPU);
    }
    held.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack)[stack->size() - count + i];
      if (!holds_tensors(value)) continue;
      held.push_back(std::move(value));
      // As on CUDA, indices, which are in lists, may be on the host, and a value only if it is 0-dim.
      if (C10_UNLIKELY(traits_.host_tensors == HostTensors::kIndices))
        call.allow_host_tensors(!held.back().isTensor() || held.back().toTensor().dim() == 0);
      value = map_tensors(held.back(), [&](const at::Tensor& x) -> const at::Tensor& {
        const at::Tensor& alias = call.alias(x, write_[i]);
        if (C10_UNLIKELY(traits_.asks_requires_grad) && x.requires_grad()) alias.set_requires_grad(true);
        return alias;
      });
    }
    std::vector<std::pair<size_t, at::Generator>> generators;
    for (size_t i = 0; i < count && takes_generator_; ++i)
      if (generator_[i]) {
        c10::IValue& value = (*stack)[stack->size() - count + i];
        const auto given = value.toOptional<at::Generator>();
        if (C10_UNLIKELY(may_capture))
          generators.emplace_back(i, given && given->defined() ? *given : default_generator(call.device()));
        value = call.generator(given);
      }
    if (C10_UNLIKELY(may_capture) && !for_host && (views_ || capturing(call.device()))) {
      if (views_) { // launches nothing
        call.run_on_host([&] { op.redispatchBoxed(DispatchKeySet(target_), stack); });
      } else {
        const CapturedCall captured{
            op, target_, call, current_stream(call.device()), draws_, false, std::move(generators)};
        return capture_operator(captured, stack);
      }
    } else {
      const at::Generator lent = draws_ ? inner_generator(default_generator(call.device())) : at::Generator();
      call.device();
      LendDeviceMemory memory(for_host ? c10::DeviceIndex(-1) : LendDeviceMemory::lent());
      try {
        call.run([&] {
          const LendGenerator lend(lent);
          if (C10_UNLIKELY(traits_.check_shapes != nullptr)) traits_.check_shapes(op, *stack);
          if (C10_UNLIKELY(traits_.check_values != nullptr)) traits_.check_values(op, *stack);
          op.redispatchBoxed(DispatchKeySet(target_), stack);
        });
      } catch (const c10::Error& error) { // every function of an UnknownQuantizer is an internal assertion that fails
        const bool internal = error.msg().find("INTERNAL ASSERT FAILED") != std::string::npos;
        bool lacking = false;
        for (const c10::IValue& value : held)
          visit_tensors(value, [&](const auto& x) { lacking |= lacks_quantizer(x); });
        TORCH_CHECK_NOT_IMPLEMENTED(!internal || !lacking, op.operator_name().name,
            ": expected quantized tensors with a quantizer, but got one that torch.empty made; use "
            "torch.quantize_per_tensor or torch._empty_affine_quantized");
        throw;
      }
    }
    if (C10_UNLIKELY(for_host)) return;
    const size_t returns = op.schema().returns().size();
    for (size_t i = 0; i < returns; ++i) {
      c10::IValue& value = (*stack)[stack->size() - returns + i];
      if (value.isTensor()) {
        // Some kernels assign to their out= argument instead of writing to it.
        const at::Tensor& out = value.toTensor();
        TORCH_CHECK_NOT_IMPLEMENTED(!takes_results_ || !out.defined() || traits_.reads_no_data || call.passed(out),
            op.operator_name().name,
            ": PyTorch's kernel does not write to this out= tensor, but returns another one; call it without out=");
        value = own(call, std::move(value).toTensor());
      } else {
        value = map_tensors(value, [&](const at::Tensor& x) { return call.result(x); });
      }
    }
  }

 private:
  // A list with an integer below -2^62, which SymInt keeps on the heap, is boxed as one of SymInts. Kernels that take
  // int64_t fail an internal assertion for it.
  void plain_sizes(torch::jit::Stack* stack) const {
    for (size_t i = stack->size() - write_.size(); i < stack->size(); ++i) {
      c10::IValue& value = (*stack)[i];
      if (C10_LIKELY(!value.isSymIntList())) continue;
      c10::List<int64_t> sizes;
      for (const c10::SymInt& each : value.toSymIntVector()) sizes.push_back(each.guard_int(__FILE__, __LINE__));
      value = std::move(sizes);
    }
  }
  // Returns true if the calling thread captures, or its launches on the current device are captured.
  static bool here_is_captured() { return detail::in_capture() || capturing(current_device()); }
  // A tensor that a kernel returns and something else keeps (a quantizer its scales, Python its objects) stays with its
  // owner. Ours is a view if it views an argument, else a copy.
  static at::Tensor own(CpuCall& call, at::Tensor tensor) {
    if (C10_UNLIKELY(tensor.use_count() > 1 && tensor.defined() && !call.passed(tensor))) {
      if (call.views_argument(tensor)) tensor = tensor.alias();
      else tensor = openreg::run(current_stream(call.device()), [&] { return to_host(tensor).clone(); });
    }
    return call.result(std::move(tensor));
  }
  static at::Tensor to_host(at::Tensor tensor) {
    if (tensor.has_storage()) move_to_host(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    return tensor;
  }

  DispatchKey target_;
  Traits traits_; // a copy, beside the rest
  std::vector<bool> write_, generator_;
  std::vector<size_t> contiguous_;
  bool takes_generator_ = false, takes_device_ = false, takes_results_ = false, takes_sizes_ = false;
  bool draws_ = false; // random numbers, without a Generator argument
  bool views_ = false; // it returns views, changes only the geometry, or gives a tensor without memory
};

struct Layout {
  DispatchKey cpu, device;
};
const Layout kLayouts[] = {
    {DispatchKey::CPU, identity.dense},
    {DispatchKey::SparseCPU, identity.sparse},
    {DispatchKey::SparseCsrCPU, identity.sparse_csr},
    {DispatchKey::QuantizedCPU, identity.quantized},
    {DispatchKey::NestedTensorCPU, identity.nested},
};

// The namespaces whose operators ship with torch. All others belong to third-party libraries: their operators fall
// back, by policy, unless the user shares their CPU kernels (openreg_ops.fallback.share).
const std::unordered_set<std::string> kNamespaces = {
    "aten", "quantized", "_quantized", "sparse", "mkl", "mkldnn", "onednn"};

} // namespace

c10::RegistrationHandleRAII register_boxed_kernel(const c10::OperatorHandle& op, DispatchKey cpu, DispatchKey device) {
  return c10::Dispatcher::singleton().registerImpl(op.operator_name(), device,
      c10::KernelFunction::makeFromBoxedFunctor<BoxedCpuKernel>(std::make_unique<BoxedCpuKernel>(op, cpu)),
      std::nullopt, nullptr, "csrc/aten/boxed.cpp, sharing the CPU's kernel");
}

const c10::BoxedKernel& boxed_kernel() {
  struct Any final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
      static thread_local std::unordered_map<const c10::FunctionSchema*, BoxedCpuKernel> known;
      known.try_emplace(&op.schema(), op, DispatchKey::CPU).first->second(op, keys, stack);
    }
  };
  static const auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<Any>());
  return kernel;
}

int64_t register_boxed_kernels() {
  // Leaked: removing a registration while the process exits would race with the dispatcher's own teardown.
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto ns = name.getNamespace();
    if (!ns || !kNamespaces.count(std::string(*ns))) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    for (const auto& [cpu, device] : kLayouts) {
      const bool composite = cpu == DispatchKey::CPU && traits_of(*op).runs_on_aliases;
      if (!(op->hasKernelForDispatchKey(cpu) || composite) || op->hasKernelForDispatchKey(device)) continue;
      // A composite differentiates through its parts; a backend kernel would cut that off, unless the operator also has
      // its own derivative (mish_backward).
      if (cpu == DispatchKey::CPU && op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
          !op->hasKernelForDispatchKey(DispatchKey::Autograd))
        continue;
      registered->push_back(register_boxed_kernel(*op, cpu, device));
      record_kernel(name, device, KernelKind::kBoxed);
    }
  }
  return static_cast<int64_t>(registered->size());
}

} // namespace openreg
