#include "aten/boxed.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/from_blob.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aten/deferred/captured.h"
#include "aten/deferred/queued.h"
#include "aten/traits/cuda_rules.h"
#include "aten/traits/host_scalars.h"
#include "aten/traits/missing_checks.h"
#include "aten/traits/results_in_own_memory.h"
#include "aten/traits/wider_dtypes.h"
#include "backend/allocator.h"
#include "backend/generator.h"
#include "backend/identity/identity.h"
#include "backend/sync_debug.h"
#include "runtime/device.h"

namespace openreg {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Operators with arguments that are on the host by design: on CUDA too, lengths and index lists may be.
const std::unordered_set<std::string> kHostArguments = {"aten::_pack_padded_sequence", "aten::index",
    "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_masked_index",
    "aten::_unsafe_masked_index_put_accumulate", "aten::_ctc_loss", "aten::_pad_packed_sequence",
    "aten::_nested_from_padded", "aten::_nested_tensor_from_mask", "aten::_nested_view_from_buffer",
    "aten::_nested_view_from_buffer_copy", "aten::quantized_gru", "aten::quantized_lstm"};
// Operators that read no data from their tensor arguments, which may be on any device.
const std::unordered_set<std::string> kReadsNoData = {"aten::empty_quantized"};
// Results that stay on the host: Python code reads the batch sizes of a packed sequence.
const std::unordered_map<std::string, size_t> kHostResults = {{"aten::_pack_padded_sequence", 1}};

// CPU kernels that check whether an argument requires grad, to save what only backward needs.
const std::unordered_set<std::string> kAsksRequiresGrad = {"aten::_sparse_mm_reduce_impl"};
// Composites that work only on aliases: they require a CPU tensor by name, or call a CPU stub directly. ldexp computes
// 2 ** other on any other device, which overflows where the result does not.
const std::unordered_set<std::string> kHostComposites = {"aten::mode", "aten::mode.values", "aten::conj_physical_",
    "aten::_batch_norm_no_update", "aten::ldexp.Tensor", "aten::ldexp_"};

// Whether this is a quantized tensor of torch.empty, which few kernels take.
bool lacks_quantizer(const at::Tensor& t) {
  return t.defined() && t.is_quantized() &&
      dynamic_cast<at::UnknownQuantizer*>(static_cast<at::QTensorImpl*>(t.unsafeGetTensorImpl())->quantizer().get());
}

// Runs the CPU kernel of one operator; `target` is the CPU's key for the layout it serves.
class NativeKernel final : public c10::OperatorKernel {
 public:
  NativeKernel(const c10::OperatorHandle& op, DispatchKey target) : target_(target) {
    const c10::FunctionSchema& schema = op.schema();
    const auto kSizes = c10::OptionalType::create(c10::ListType::create(c10::SymIntType::get()));
    for (const auto& argument : schema.arguments()) {
      const auto* info = argument.alias_info();
      write_.push_back(info && info->isWrite());
      const auto& type = argument.type();
      generator_.push_back(type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())));
      takes_generator_ |= generator_.back();
      takes_device_ |= type->isSubtypeOf(*c10::OptionalType::create(c10::DeviceObjType::get()));
      takes_sizes_ |= argument.real_type()->isSubtypeOf(*kSizes);
    }
    // The flash kernel has the tag but refuses dropout, so it never draws.
    draws_ = !takes_generator_ && op.hasTag(at::Tag::nondeterministic_seeded) &&
        schema.name() != "aten::_scaled_dot_product_flash_attention_for_cpu";
    host_arguments_ = kHostArguments.count(schema.name()) > 0;
    host_lists_only_ = host_arguments_ && schema.name().find("index_put") != std::string::npos;
    reads_no_data_ = kReadsNoData.count(schema.name()) > 0;
    takes_results_ = takes_results(schema);
    if (target == DispatchKey::CPU) contiguous_ = read_as_contiguous(op);
    views_ = op.hasTag(at::Tag::inplace_view) || schema.name() == "aten::_efficientzerotensor";
    for (const auto& result : schema.returns()) views_ |= result.alias_info() && !result.alias_info()->isWrite();
    if (constexpr std::string_view kForeach = "aten::_foreach_"; schema.name().starts_with(kForeach)) {
      each_ = "aten::" + schema.name().substr(kForeach.size());
      for (size_t i = 0; i < write_.size() && host_scalars_of_each(each_) == HostScalars::kLast; ++i)
        if (schema.arguments()[i].type()->isSubtypeOf(*c10::ListType::ofTensors())) last_list_ = i;
    }
    scalar_check_ = scalar_check(op);
    synchronizes_ = synchronizes_on_cuda(op);
    nondeterministic_ = nondeterministic_on_cuda(op);
    missing_check_ = missing_check(op);
    if (target == DispatchKey::CPU) missing_shape_check_ = missing_shape_check(op);
    asks_requires_grad_ = kAsksRequiresGrad.count(schema.name()) > 0;
    if (auto it = kHostResults.find(schema.name()); it != kHostResults.end()) host_result_ = it->second;
    if (target == DispatchKey::CPU || target == DispatchKey::SparseCsrCPU) wider_ = Wider::of(schema.name());
  }

  void operator()(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
    if (takes_sizes_) plain_sizes(stack);
    if (C10_UNLIKELY(scalar_check_ != nullptr)) scalar_check_(op, *stack);
    if (C10_UNLIKELY(!contiguous_.empty())) make_contiguous(contiguous_, op, stack);
    if (C10_UNLIKELY(synchronizes_ != nullptr) && watches_syncs())
      if (const auto* arguments = stack->data() + stack->size() - write_.size(); synchronizes_(arguments))
        synchronizes(op.operator_name().name.c_str(), stream_of(*arguments));
    if (C10_UNLIKELY(nondeterministic_ != nullptr) && at::globalContext().deterministicAlgorithms() &&
        nondeterministic_(stack->data() + stack->size() - write_.size()))
      refuse_nondeterministic(op.schema().name());
    if (C10_UNLIKELY(wider_ != nullptr)) {
      const bool dense = target_ == DispatchKey::CPU;
      if (wider_->run(op, stack, dense ? identity.dense : identity.sparse_csr)) return;
    }
    if (C10_UNLIKELY(takes_results_) && target_ == DispatchKey::CPU && call_with_own_memory(op, stack)) return;
    const bool may_capture = detail::attention.load(std::memory_order_relaxed) & detail::kCaptureBit;
    if (C10_UNLIKELY(queueing()) && !(may_capture && here_is_captured()) && target_ == DispatchKey::CPU &&
        queue_operator(op, stack))
      return;
    if (C10_UNLIKELY(may_capture) && !each_.empty() && capture_each(op, stack)) return;
    // The stack holds the only reference to some arguments, which the call needs until it ends.
    c10::SmallVector<at::Tensor, 8> held;
    CpuCall call(op.operator_name().name.c_str(), reads_no_data_ ? CpuCall::kAny : CpuCall::kSame);
    bool for_host = false; // the caller asks for a CPU result, which then does not belong to the device
    if (host_arguments_) call.allow_host_tensors();
    if (scalar_check_ != nullptr) call.allow_scalars();
    const size_t count = write_.size();
    held.reserve(count);
    for (size_t i = 0; i < count && takes_device_; ++i) {
      c10::IValue& value = (*stack)[stack->size() - count + i];
      if (!value.isDevice()) continue;
      for_host = value.toDevice().is_cpu();
      if (for_host) continue;
      call.set_device(checked_index(value.toDevice()));
      value = c10::Device(c10::kCPU);
    }
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack)[stack->size() - count + i];
      if (value.isTensor()) {
        held.push_back(std::move(value).toTensor());
        // As on CUDA, indices may be on the host, and a value only if it is 0-dim.
        if (C10_UNLIKELY(host_lists_only_)) call.allow_host_tensors(held.back().dim() == 0);
        const at::Tensor& alias = call.alias(held.back(), write_[i]);
        if (C10_UNLIKELY(asks_requires_grad_) && held.back().requires_grad()) alias.set_requires_grad(true);
        value = alias;
      } else if (value.isTensorList()) {
        const auto list = value.toTensorList();
        c10::List<at::Tensor> aliases;
        aliases.reserve(list.size());
        lists_hold(held, list);
        if (C10_UNLIKELY(i < last_list_)) // before the list that may have CPU scalars
          for (const at::Tensor& t : list)
            if (t.is_cpu()) check_scalar_is_last(each_.c_str());
        for (const at::Tensor& t : list) aliases.push_back(call.alias(t, write_[i]));
        value = std::move(aliases);
      } else if (value.isOptionalTensorList()) {
        const auto list = value.toOptionalTensorList();
        c10::List<std::optional<at::Tensor>> aliases;
        aliases.reserve(list.size());
        if (C10_UNLIKELY(host_arguments_)) call.allow_host_tensors();
        for (const std::optional<at::Tensor>& t : list) {
          if (t) held.push_back(*t);
          aliases.push_back(t ? std::optional(call.alias(*t, write_[i])) : std::nullopt);
        }
        value = std::move(aliases);
      }
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
        if (host_result_ != static_cast<size_t>(-1))
          detail::refuse_capture(captured.stream, captured.op.operator_name().name,
              "the host needs its result now. Move it out of the capture.");
        return capture_call(captured, stack);
      }
    } else {
      const at::Generator lent = draws_ ? inner_generator(default_generator(call.device())) : at::Generator();
      call.device();
      LendDeviceMemory memory(for_host ? c10::DeviceIndex(-1) : LendDeviceMemory::lent());
      try {
        call.run([&] {
          const LendGenerator lend(lent);
          if (C10_UNLIKELY(missing_shape_check_ != nullptr)) missing_shape_check_(op, *stack);
          if (C10_UNLIKELY(missing_check_ != nullptr)) missing_check_(op, *stack);
          op.redispatchBoxed(DispatchKeySet(target_), stack);
        });
      } catch (const c10::Error& error) { // every function of an UnknownQuantizer is an internal assertion that fails
        const bool internal = error.msg().find("INTERNAL ASSERT FAILED") != std::string::npos;
        TORCH_CHECK_NOT_IMPLEMENTED(!internal || std::ranges::none_of(held, lacks_quantizer), op.operator_name().name,
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
        TORCH_CHECK_NOT_IMPLEMENTED(!takes_results_ || !out.defined() || reads_no_data_ || call.passed(out),
            op.operator_name().name,
            ": PyTorch's kernel does not write to this out= tensor, but returns another one; call it without out=");
        at::Tensor mine = std::move(value).toTensor();
        value = C10_UNLIKELY(i == host_result_) ? to_host(std::move(mine)) : own(call, std::move(mine));
      } else if (value.isTensorList()) {
        auto list = value.toTensorList();
        c10::List<at::Tensor> out;
        out.reserve(list.size());
        for (const at::Tensor& t : list) out.push_back(call.result(t));
        value = std::move(out);
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
  // Whether the calling thread captures, or its launches on the current device are captured.
  static bool here_is_captured() { return detail::in_capture() || capturing(current_device()); }
  // In a capture, the CPU's foreach kernel calls the operator for each element, so each element gets a node.
  bool capture_each(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    for (size_t i = stack->size() - write_.size(); i < stack->size(); ++i) {
      if (!(*stack)[i].isTensorList()) continue;
      const auto list = (*stack)[i].toTensorList();
      if (list.empty() || !on_device(list.get(0)) || !capturing(list.get(0).get_device())) return false;
      c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
      op.redispatchBoxed(DispatchKeySet(target_), stack);
      return true;
    }
    return false;
  }
  // The stream for an operator whose first argument is a tensor, on the device or on the host.
  static Stream stream_of(const c10::IValue& first) {
    const bool here = first.isTensor() && on_device(first.toTensor());
    return current_stream(here ? first.toTensor().device().index() : checked_index(-1));
  }
  static void lists_hold(c10::SmallVector<at::Tensor, 8>& held, const c10::List<at::Tensor>& list) {
    for (const at::Tensor& t : list) held.push_back(t);
  }
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
  std::vector<bool> write_, generator_;
  std::vector<size_t> contiguous_;
  bool takes_generator_ = false, takes_device_ = false, takes_results_ = false, takes_sizes_ = false;
  bool draws_ = false; // random numbers, without a Generator argument
  bool host_arguments_ = false, host_lists_only_ = false, asks_requires_grad_ = false, reads_no_data_ = false;
  size_t host_result_ = static_cast<size_t>(-1);
  bool views_ = false; // it returns views, changes only the geometry, or gives a tensor without memory
  ScalarCheck scalar_check_ = nullptr;
  CudaRule synchronizes_ = nullptr, nondeterministic_ = nullptr;
  MissingCheck missing_check_ = nullptr, missing_shape_check_ = nullptr;
  const Wider* wider_ = nullptr;
  std::string each_;     // for a foreach operator: what it calls for each element
  size_t last_list_ = 0; // for an operator that accepts CPU scalars only in its last list
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

c10::RegistrationHandleRAII register_native_kernel(const c10::OperatorHandle& op, DispatchKey cpu, DispatchKey device) {
  return c10::Dispatcher::singleton().registerImpl(op.operator_name(), device,
      c10::KernelFunction::makeFromBoxedFunctor<NativeKernel>(std::make_unique<NativeKernel>(op, cpu)), std::nullopt,
      nullptr, "csrc/aten/boxed.cpp, sharing the CPU's kernel");
}

const c10::BoxedKernel& native_kernel() {
  struct Any final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
      static thread_local std::unordered_map<const c10::FunctionSchema*, NativeKernel> known;
      known.try_emplace(&op.schema(), op, DispatchKey::CPU).first->second(op, keys, stack);
    }
  };
  static const auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<Any>());
  return kernel;
}

int64_t register_native_kernels() {
  // Leaked: removing a registration while the process exits would race with the dispatcher's own teardown.
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto ns = name.getNamespace();
    if (!ns || !kNamespaces.count(std::string(*ns))) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    for (const auto& [cpu, device] : kLayouts) {
      const bool composite = cpu == DispatchKey::CPU && kHostComposites.count(toString(name));
      if (!(op->hasKernelForDispatchKey(cpu) || composite) || op->hasKernelForDispatchKey(device)) continue;
      // A composite differentiates through its parts; a backend kernel would cut that off, unless the operator also has
      // its own derivative (mish_backward).
      if (cpu == DispatchKey::CPU && op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
          !op->hasKernelForDispatchKey(DispatchKey::Autograd))
        continue;
      registered->push_back(register_native_kernel(*op, cpu, device));
    }
  }
  return static_cast<int64_t>(registered->size());
}

void capture_unary(Stream stream, const char* name, at::TensorIteratorBase& iter,
    std::function<void(at::TensorIteratorBase&)> kernel) {
  std::vector<MemoryUse> uses;
  const auto over_memory = [&](const at::Tensor& x, bool written) {
    auto host = at::for_blob(written ? x.mutable_data_ptr() : const_cast<void*>(x.const_data_ptr()), x.sizes())
                    .strides(x.strides())
                    .options(x.options().device(at::kCPU))
                    .target_device(at::kCPU)
                    .make_tensor();
    uses.push_back({host.const_data_ptr(), host.storage().nbytes(), written});
    return host;
  };
  auto out = over_memory(iter.tensor(0), true);
  auto on_memory = at::TensorIterator::unary_op(out, over_memory(iter.tensor(1), false));
  detail::capture(stream, Site(name),
      detail::Task([iter = std::move(on_memory), kernel = std::move(kernel)]() mutable { kernel(iter); }),
      std::move(uses));
}

} // namespace openreg
