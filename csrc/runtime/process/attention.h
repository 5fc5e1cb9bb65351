// What a launch must look at before its work may run.
#pragma once

#include <atomic>
#include <cstdint>

namespace openreg::detail {

// The number of streams that have queued work, plus one bit for each thing that a launch must handle. Work may run
// immediately while this is zero apart from kNoWait.
extern std::atomic<std::uint32_t> attention;

inline constexpr std::uint32_t kModeBit = 1u << 31;      // the launch mode is not inline
inline constexpr std::uint32_t kErrorBit = 1u << 30;     // an error is pending
inline constexpr std::uint32_t kForkBit = 1u << 29;      // the process may not use the device: see Note [Fork]
inline constexpr std::uint32_t kFaultBit = 1u << 28;     // see Note [Faults]
inline constexpr std::uint32_t kIsolationBit = 1u << 27; // see Note [Isolation]
inline constexpr std::uint32_t kProfileBit = 1u << 26;   // see Note [Profile]
inline constexpr std::uint32_t kCaptureBit = 1u << 25;   // a stream of the process is captured: see Note [Capture]
inline constexpr std::uint32_t kPoolBit = 1u << 24;      // see Note [Private pools]
inline constexpr std::uint32_t kExitBit = 1u << 23;      // threads are kept away: see Note [Exit]
// These alone are no reason for work to wait.
inline constexpr std::uint32_t kNoWait = kIsolationBit | kProfileBit | kPoolBit;

} // namespace openreg::detail
