// Trials, which find out whether a kernel accepts the calls of a signature. See Note [Deferred operators].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <exception>
#include <optional>
#include <string_view>
#include <vector>

namespace openreg {

// A 64-bit hash of everything for which a kernel can reject a call before it reads any data: the operator, the dtypes,
// sizes and strides of tensors, and all other arguments by value. Two calls with the same hash count as the same; at
// worst, an error appears later.
class Signature {
 public:
  explicit Signature(const void* op) { add(reinterpret_cast<std::uintptr_t>(op)); }

  void add(std::uint64_t value) {
    const auto product = static_cast<unsigned __int128>(hash_ ^ value) * kFactor;
    hash_ = static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64) ^ std::rotl(value, 32);
  }
  void add(at::IntArrayRef values) {
    add(values.size());
    for (const int64_t each : values) add(static_cast<std::uint64_t>(each));
  }

  void add_tensor(const at::Tensor& x, std::size_t place) {
    add(place << 8 | static_cast<std::uint64_t>(x.scalar_type()));
    add(x.sizes());
    add(x.strides());
  }

  // A number that programs vary from call to call, such as a learning rate. A single number counts by its position
  // relative to 0, 1 and the limits of narrow dtypes. Several numbers count by value, because a kernel may compare
  // them.
  void add_number(double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    if (value == 0 || value == 1 || numbers_++ > 0) return add(bits);
    add(kLater);
    first_ = value;
  }

  // Any argument other than a tensor; false for an unknown kind of value.
  bool add_value(const c10::IValue& value) {
    if (value.isNone()) add(kNone);
    else if (value.isInt()) add(static_cast<std::uint64_t>(value.toInt()));
    else if (value.isDouble()) add(std::bit_cast<std::uint64_t>(value.toDouble()));
    else if (value.isBool()) add(value.toBool() ? kTrue : kFalse);
    else if (value.isString()) add(std::hash<std::string_view>()(value.toStringView()));
    else if (value.isComplexDouble()) {
      add(std::bit_cast<std::uint64_t>(value.toComplexDouble().real()));
      add(std::bit_cast<std::uint64_t>(value.toComplexDouble().imag()));
    } else if (value.isIntList() || value.isDoubleList() || value.isBoolList() || value.isList()) {
      const auto list = value.toListRef();
      add(list.size());
      for (const c10::IValue& each : list)
        if (!add_value(each)) return false;
    } else return false;
    return true;
  }

  // Never 0, and even.
  std::uint64_t value() const {
    Signature whole = *this;
    if (numbers_ == 1) whole.add(kPlace + place(first_));
    else if (numbers_) whole.add(std::bit_cast<std::uint64_t>(first_));
    return whole.hash_ < 2 ? 2 : whole.hash_ & ~std::uint64_t(1);
  }

 private:
  // Arbitrary numbers that are unlikely to be arguments.
  static constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15, kNone = 0xC2B2AE3D27D4EB4F, kTrue = 0x165667B19E3779F9,
                                 kFalse = 0x27D4EB2F165667C5, kLater = 0x85EBCA77C2B2AE63, kPlace = 0xD6E8FEB86659FD93;

  static std::uint64_t place(double value) {
    constexpr double kLimits[] = {1, 127, 128, 240, 255, 448, 32767, 32768, 57344, 65504, 65535};
    const double size = std::abs(value);
    if (!(size <= kLimits[std::size(kLimits) - 1])) return std::bit_cast<std::uint64_t>(value); // NaN too
    std::uint64_t place = value < 0;
    for (const double limit : kLimits) place += 2 * (std::uint64_t(size >= limit) + std::uint64_t(size > limit));
    return place;
  }

  std::uint64_t hash_ = 0;
  int numbers_ = 0;
  double first_ = 0;
};

// Keeps warnings, to give them later or not at all.
struct KeptWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { all.push_back(warning); }
  void warn_again() const {
    for (const c10::Warning& each : all) c10::warn(each);
  }
  std::vector<c10::Warning> all;
};

// Returns true if `kernel` raises nothing and warns of nothing.
template <class Kernel>
bool accepts(const Kernel& kernel) {
  at::DisableRecordFunctionGuard unseen;
  KeptWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard keep(&warnings);
  try {
    kernel();
  } catch (const std::exception&) {
    return false;
  }
  return warnings.all.empty();
}

// Returns the outcome of an earlier trial of this signature, or nothing.
std::optional<bool> known_outcome(std::uint64_t signature);
void remember_outcome(std::uint64_t signature, bool accepted);

// Returns the outcome of the signature's trial, which runs if it is not known.
template <class Trial>
bool is_accepted(const Signature& signature, const Trial& trial) {
  const std::uint64_t value = signature.value();
  if (const auto known = known_outcome(value)) [[likely]]
    return *known;
  const bool accepted = trial();
  remember_outcome(value, accepted);
  return accepted;
}

} // namespace openreg
