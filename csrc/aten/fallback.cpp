// See fallback.h. The kernel behind every operator without a device kernel.

#include "aten/fallback.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fnmatch.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "aten/boxed.h"
#include "aten/deferred/deferred.h"
#include "backend/generator.h"
#include "backend/identity/identity.h"
#include "backend/map_tensors.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

enum class Policy { kAllow, kWarn, kError };

struct State {
  std::mutex mutex;
  Policy policy = Policy::kAllow;
  std::vector<std::string> allow, deny;
  std::map<std::string, FallbackRecord> records;
  std::map<std::string, c10::RegistrationHandleRAII> routes;
  std::map<std::string, std::string> missing; // reasons, by operator; written once, at import
  void (*warning)(const std::string&) = [](const std::string& message) { TORCH_WARN(message); };
};
State& state() {
  static auto* instance = new State;
  return *instance;
}

bool matches(const std::vector<std::string>& patterns, const c10::OperatorName& op) {
  const std::string full = toString(op);
  for (const auto& pattern : patterns)
    if (fnmatch(pattern.c_str(), full.c_str(), 0) == 0 || fnmatch(pattern.c_str(), op.name.c_str(), 0) == 0)
      return true;
  return false;
}

// "Float[2, 3]@openreg:0, 1, …": what the operator was called with.
std::string describe(const Stack& stack, size_t count) {
  std::string text;
  auto tensor = [](const at::Tensor& t) {
    if (!t.defined()) return std::string("None");
    if (t.is_nested()) return c10::str(t.scalar_type(), "[", t.size(0), " nested]@", t.device());
    return c10::str(t.scalar_type(), t.sizes(), "@", t.device());
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (!text.empty()) text += ", ";
    const c10::IValue& value = stack[i];
    if (value.isTensor()) text += tensor(value.toTensor());
    else if (value.isTensorList()) {
      text += "[";
      for (const at::Tensor& t : value.toTensorList()) text += tensor(t) + ", ";
      text += "]";
    } else if (value.isInt() || value.isDouble() || value.isBool() || value.isNone() || value.isIntList())
      text += c10::str(value);
    else text += value.tagKind();
  }
  return text;
}

// A part of a device storage, from the first to the last byte that arguments touch, and its copy.
struct Copied {
  c10::Storage device, host;
  size_t first = 0, last = 0;
  bool write = false;
};

// The tensors of one call: copies that overlap as the originals do.
class Copies {
 public:
  void add(const at::Tensor& t, bool write, const std::string& name) {
    if (!on_device(t)) return;
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == c10::kStrided && !t.is_quantized() && !t.is_nested(), name,
        ": the CPU fallback copies strided tensors, but got a ", t.layout(), " one; convert it with .to_dense() first");
    TORCH_CHECK(!found_ || t.device() == device_, name,
        ": Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
        t.device(), "! Move one with .to().");
    found_ = true;
    device_ = t.device();
    Copied& part = parts_[t.storage().unsafeGetStorageImpl()];
    if (!part.device) {
      part.device = t.storage();
      part.first = static_cast<size_t>(-1);
    }
    part.write |= write;
    const size_t item = t.dtype().itemsize(), offset = static_cast<size_t>(t.storage_offset()) * item;
    size_t bytes = t.numel() ? item : 0;
    for (int64_t d = 0; d < t.dim() && t.numel(); ++d)
      bytes += static_cast<size_t>((t.size(d) - 1) * t.stride(d)) * item;
    part.first = std::min(part.first, offset / 16 * 16); // a multiple of every itemsize
    part.last = std::max(part.last, offset + bytes);
  }

  void to_host() {
    for (auto& [impl, part] : parts_) {
      const size_t bytes = part.last - part.first;
      part.host =
          c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::kCPU), /*resizable=*/true);
      if (!bytes) continue;
      run(current_stream(part.device.device().index()), [&, storage = impl] {
        std::memcpy(part.host.mutable_data(), static_cast<const char*>(storage->data()) + part.first, bytes);
      });
      bytes_ += bytes;
    }
  }

  at::Tensor host(const at::Tensor& t) {
    if (!on_device(t)) return t;
    for (auto& [real, copy] : tensors_)
      if (real.is_same(t)) return copy;
    const Copied& part = parts_.at(t.storage().unsafeGetStorageImpl());
    at::Tensor copy = at::empty({0}, t.options().device(c10::kCPU));
    const auto offset = t.storage_offset() - static_cast<int64_t>(part.first / t.dtype().itemsize());
    copy.set_(part.host, offset, t.sizes(), t.strides());
    copy._set_conj(t.is_conj());
    copy._set_neg(t.is_neg());
    tensors_.emplace_back(t, copy);
    return copy;
  }

  // Writes changed arguments back; a result that the kernel grew is resized first.
  void back() {
    for (auto& [impl, part] : parts_) {
      if (!part.write || part.last == part.first) continue;
      run(current_stream(part.device.device().index()), [&, storage = impl] {
        LendDeviceMemory here(part.device.device().index());
        std::memcpy(static_cast<char*>(storage->mutable_data()) + part.first, part.host.data(), part.last - part.first);
      });
      bytes_ += part.last - part.first;
    }
    for (auto& [real, copy] : tensors_) {
      if (real.is_conj() != copy.is_conj()) real._set_conj(copy.is_conj());
      if (real.sizes() != copy.sizes() || real.strides() != copy.strides()) {
        real.resize_(copy.sizes());
        real.unsafeGetTensorImpl()->set_sizes_and_strides(copy.sizes(), copy.strides());
        real.copy_(copy);
        bytes_ += copy.nbytes();
      }
    }
  }

  at::Tensor device(const at::Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& [real, copy] : tensors_)
      if (copy.is_same(t)) return real;
    bytes_ += t.nbytes();
    return t.to(device_);
  }

  void set_device(c10::Device device) {
    if (!found_) device_ = device;
  }
  c10::Device where() const { return device_; }
  size_t bytes() const { return bytes_; }

 private:
  std::map<c10::StorageImpl*, Copied> parts_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_; // original, copy
  c10::Device device_ = device_at(0);
  bool found_ = false; // whether a tensor has said which device
  size_t bytes_ = 0;
};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::string name = toString(op.operator_name());
  const FallbackDecision decision = fallback_decision(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      decision.runs, name, " ", decision.why, ". It was called with (", describe(*stack, count), ").", decision.advice);
  if (decision.warns)
    state().warning(c10::str(name, " has no ", identity.name, " kernel and runs on the CPU, with copies both ways. ",
        "Silence this with openreg_ops.fallback.allow(\"", name, "\")."));

  const auto start = std::chrono::steady_clock::now();
  Copies copies;
  copies.set_device(device_at(checked_index(-1)));
  const size_t base = stack->size() - count;
  bool generator = false;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = (*stack)[base + i];
    const bool written = is_written(schema.arguments()[i]);
    visit_tensors(value, [&](const at::Tensor& x) { copies.add(x, written, name); });
    if (value.isDevice() && on_device(value.toDevice())) copies.set_device(device_at(checked_index(value.toDevice())));
  }
  if (capturing(copies.where().index()))
    detail::refuse_capture(current_stream(copies.where().index()), name,
        c10::str("it has no kernel for ", identity.name,
            " and would run on the CPU, with copies. Register a kernel for ", identity.dense,
            ", or move it out of the capture."));
  copies.to_host();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[base + i];
    if (value.isDevice() && on_device(value.toDevice())) {
      value = c10::Device(c10::kCPU);
    } else if (schema.arguments()[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      generator = true;
      const auto given = value.toOptional<at::Generator>();
      value = inner_generator(given && given->defined() ? *given : default_generator(copies.where().index()));
    } else {
      value = map_tensors(value, [&](const at::Tensor& x) { return copies.host(x); });
    }
  }
  {
    c10::impl::ExcludeDispatchKeyGuard below(kAboveBackend);
    const bool draws = !generator && op.hasTag(at::Tag::nondeterministic_seeded);
    LendGenerator lend(draws ? inner_generator(default_generator(copies.where().index())) : at::Generator());
    LendDeviceMemory none(-1);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  copies.back();
  const size_t returns = schema.returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& x) { return copies.device(x); });
  const auto elapsed = std::chrono::steady_clock::now() - start;
  std::lock_guard lock(state().mutex);
  auto& record = state().records.try_emplace(name, FallbackRecord{name, 0, 0, 0}).first->second;
  ++record.calls;
  record.bytes += copies.bytes();
  record.nanoseconds +=
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count());
}

// Layouts have their own kernel or none at all: nothing is copied implicitly.
void refuse_layout(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, toString(op.operator_name()), ": ", identity.name, " has no kernel for ",
      keys.highestPriorityTypeId(), ", as the CPU has none for that layout; it was called with (",
      describe(*stack, op.schema().arguments().size()),
      "). Convert with .to_dense(), .dequantize() or .to_padded_tensor().");
}

} // namespace

OPENREG_LIBRARY_IMPL(_, dense, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
OPENREG_LIBRARY_IMPL(_, sparse, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
}
OPENREG_LIBRARY_IMPL(_, sparse_csr, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
}
OPENREG_LIBRARY_IMPL(_, quantized, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
}
OPENREG_LIBRARY_IMPL(_, nested, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
}

void set_fallback_policy(const std::string& policy, std::vector<std::string> allow, std::vector<std::string> deny) {
  TORCH_CHECK_VALUE(policy == "allow" || policy == "warn" || policy == "error",
      "openreg_ops.fallback: expected the policy \"allow\", \"warn\" or \"error\", but got \"", policy, "\"");
  auto& s = state();
  std::lock_guard lock(s.mutex);
  s.policy = policy == "allow" ? Policy::kAllow : policy == "warn" ? Policy::kWarn : Policy::kError;
  s.allow = std::move(allow);
  s.deny = std::move(deny);
}

void set_fallback_warning(void (*warn)(const std::string&)) {
  state().warning = warn;
}

void set_missing_reasons(std::map<std::string, std::string> reasons) {
  state().missing = std::move(reasons);
}

FallbackDecision fallback_decision(const c10::OperatorHandle& op) {
  const auto refused = [](std::string why, std::string advice = "") {
    return FallbackDecision{false, false, std::move(why), std::move(advice)};
  };
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const std::string name = toString(op.operator_name());
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
    const std::string none = c10::str("has no kernel for ", identity.name);
    const auto missing = s.missing.find(name);
    if (missing != s.missing.end()) return refused(none + ". " + missing->second);
    return refused(none + " and none for the CPU to fall back to",
        c10::str(" Register a kernel for ", identity.dense, " or for the CPU."));
  }
  if (matches(s.deny, op.operator_name()))
    return refused("is on the deny list of openreg_ops.fallback", " Take it off the list to permit it.");
  const bool allowed = matches(s.allow, op.operator_name());
  if (s.policy == Policy::kError && !allowed)
    return refused(c10::str("would run on the CPU, having no ", identity.name,
                       " kernel or being forced off it, and the fallback policy is \"error\""),
        c10::str(" Permit it with openreg_ops.fallback.allow(\"", name,
            "\") or set_policy(\"allow\"), or register a kernel for ", identity.dense, "."));
  for (const auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite())
      return refused(
          "returns a view, but the fallback computes on copies: the result would not share memory with its input",
          c10::str(" Register a kernel for ", identity.dense, "."));
  return {true, s.policy == Policy::kWarn && !allowed, "copies to the CPU and back", ""};
}

std::vector<FallbackRecord> fallback_report() {
  std::lock_guard lock(state().mutex);
  std::vector<FallbackRecord> all;
  for (const auto& [name, record] : state().records) all.push_back(record);
  return all;
}

void reset_fallback_report() {
  std::lock_guard lock(state().mutex);
  state().records.clear();
}

void route_operator(const std::string& name, const std::string& overload, const std::string& route) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const std::string full = toString(op.operator_name());
  auto& routes = state().routes;
  routes.erase(full);
  if (route.empty()) return;
  // Silences the dispatcher's warning that a kernel is overridden, which is what the user asked for.
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  if (route == "share") {
    TORCH_CHECK_VALUE(op.hasKernelForDispatchKey(DispatchKey::CPU), "openreg_ops.fallback.share: ", full,
        " has no CPU kernel to share");
    routes.emplace(full, register_boxed_kernel(op, DispatchKey::CPU, identity.dense));
  } else {
    routes.emplace(full,
        c10::Dispatcher::singleton().registerImpl(op.operator_name(), identity.dense,
            c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr,
            "csrc/aten/fallback.cpp, by openreg_ops.fallback"));
  }
}

} // namespace openreg
