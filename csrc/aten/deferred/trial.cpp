#include "aten/deferred/trial.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

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

// What a trial may allocate. Larger calls are tried with small tensors.
constexpr size_t kTrialBytes = 1 << 20;

} // namespace

Verdict verdict_of(uint64_t signature) {
  for (size_t i = first_place(signature), end = i + kPlaces; i < end; ++i) {
    const uint64_t known = signatures[i].load(std::memory_order_relaxed);
    if ((known & ~kRefused) == signature) return known & kRefused ? Verdict::kRefused : Verdict::kAccepted;
  }
  return Verdict::kUnknown;
}

void remember(uint64_t signature, bool accepted) {
  const size_t first = first_place(signature);
  size_t at = first + (signature >> 60) % kPlaces;
  for (size_t i = first; i < first + kPlaces; ++i)
    if (signatures[i].load(std::memory_order_relaxed) == 0) {
      at = i;
      break;
    }
  signatures[at].store(signature | (accepted ? 0 : kRefused), std::memory_order_relaxed);
}

at::Tensor Scratch::like(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, x.itemsize());
  bytes_ += std::max(bytes, static_cast<size_t>(c10::multiply_integers(sizes)) * x.itemsize());
  if (bytes_ > kTrialBytes) return {};
  at::Tensor made(at::detail::empty_strided_cpu(sizes, strides, x.scalar_type()));
  if (bytes) std::memset(made.unsafeGetTensorImpl()->unsafe_storage().mutable_data(), 0, bytes);
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor Scratch::tiny(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec(), strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 0;) {
    sizes[i] = std::min<int64_t>(sizes[i], 2);
    if (i + 1 < sizes.size()) strides[i] = strides[i + 1] * sizes[i + 1];
  }
  return like(x, sizes, strides);
}

} // namespace openreg
