#include "aten/deferred/trial.h"

#include <array>
#include <atomic>

namespace openreg {
namespace {

// The outcome of each signature's trial, as its value plus kRefused. A call that finds its slot taken is tried again:
// the table has a fixed size and needs no lock, and losing an entry costs no more than another trial.
constexpr uint64_t kRefused = 1;
constexpr size_t kSignatures = 1 << 16, kPlaces = 4;
std::array<std::atomic<uint64_t>, kSignatures + kPlaces> signatures;

size_t first_place(uint64_t signature) {
  return (signature >> 1) % kSignatures;
}

} // namespace

std::optional<bool> known_outcome(uint64_t signature) {
  for (size_t i = first_place(signature), end = i + kPlaces; i < end; ++i) {
    const uint64_t known = signatures[i].load(std::memory_order_relaxed);
    if ((known & ~kRefused) == signature) return !(known & kRefused);
  }
  return std::nullopt;
}

void remember_outcome(uint64_t signature, bool accepted) {
  const size_t first = first_place(signature);
  size_t at = first + (signature >> 60) % kPlaces;
  for (size_t i = first; i < first + kPlaces; ++i)
    if (signatures[i].load(std::memory_order_relaxed) == 0) {
      at = i;
      break;
    }
  signatures[at].store(signature | (accepted ? 0 : kRefused), std::memory_order_relaxed);
}

} // namespace openreg
