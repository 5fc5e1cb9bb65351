// The CPU fallback: a true copy to the CPU and back, by the user's policy, counted.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace openreg {

// The cost of an operator's fallback so far.
struct FallbackRecord {
  std::string name;
  std::uint64_t calls, bytes, nanoseconds;
};

// policy: "allow", "warn" or "error". The lists hold operator names, with or without overload, or
// patterns such as "aten::linalg_*"; deny wins over allow, allow over the policy.
void set_fallback_policy(const std::string& policy, std::vector<std::string> allow, std::vector<std::string> deny);

// Issues the warnings of policy "warn". TORCH_WARN reaches Python's warnings only below PyTorch's own bindings, not
// below torch.ops, so the bindings set this.
void set_fallback_warning(void (*warn)(const std::string& message));

// Why operators have no kernel, by full name: the error says it.
void set_missing_reasons(std::map<std::string, std::string> reasons);

// What the fallback does with an operator that reaches it. `why` is a predicate, "is on the deny list"; `advice`, which
// may be empty, is a sentence that says what to do about a refusal.
struct FallbackDecision {
  bool runs, warns;
  std::string why, advice;
};
FallbackDecision fallback_decision(const c10::OperatorHandle& op);

// The costs since the start or the last reset, by operator.
std::vector<FallbackRecord> fallback_report();
void reset_fallback_report();

// How one operator runs on the device from now on: "fallback" (copies, though it has a device
// kernel), "share" (its CPU kernel, on device memory, though it is not torch's), or "" (as it was).
void route_operator(const std::string& name, const std::string& overload, const std::string& route);

} // namespace openreg
