// What Python may ask and tell the fallback. Rung 4.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace acme {

std::map<std::string, int64_t> fallback_counts(bool reset); // calls by operator; the first of them is your to-do list
std::string set_fallback_policy(const std::string& policy); // "allow", "warn" or "error"; returns the one before

} // namespace acme
