// kv_cache_update: k_cache[slots[i]] = k[i], v_cache[slots[i]] = v[i] for every slots[i] >= 0; forward only.
// Paged attention stores the keys and values of new tokens this way: Kwon et al. 2023, arXiv:2309.06180, where it is
// called reshape_and_cache.
// kv_cache_update_ writes to the caches through their strides; kv_cache_update to copies of them.
// All slots are checked before anything is written, so a rejected call changes nothing.
#include "kernels/loops.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/overlap.h"
#include "runtime/graph/graph.h"

#include <ATen/ops/clone.h>

#include <cstring>
#include <vector>

namespace openreg::ops {
namespace {
using namespace kernels;

void check_slots(const char* op, const int64_t* slots, int64_t n, int64_t num_slots) {
  bool ascending = true; // like the slots of a prompt; then no slot repeats
  int64_t last = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0) continue;
    TORCH_CHECK_INDEX(slots[i] < num_slots, op, ": expected slots below ", num_slots,
        ", the number of slots in k_cache, but got slot ", slots[i], " at position ", i,
        "; give -1 to skip a position");
    ascending &= slots[i] > last;
    last = slots[i];
  }
  if (ascending) return;
  std::vector<std::pair<int64_t, int64_t>> order; // slot, position
  order.reserve(n);
  for (int64_t i = 0; i < n; ++i)
    if (slots[i] >= 0) order.emplace_back(slots[i], i);
  std::sort(order.begin(), order.end());
  const auto twice =
      std::adjacent_find(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
  TORCH_CHECK_INDEX(twice == order.end(), op, ": expected slots without repetition, but got slot ", twice->first,
      " at positions ", twice->second, " and ", std::next(twice)->second, "; give -1 to skip a position");
}

// A row of a cache, with any strides, and the contiguous row that goes there.
struct CacheRows {
  CacheRows(const Tensor& to, const Tensor& from)
      : to_(static_cast<char*>(to.mutable_data_ptr())), from_(static_cast<const char*>(from.const_data_ptr())),
        item_(to.element_size()), step_(to.stride(0) * item_), bytes_(item_) {
    // Contiguous dimensions merge into pieces, beginning with the last one; the others are iterated over.
    for (int64_t d = to.dim() - 1; d > 0; --d) {
      if (to.size(d) == 1) continue;
      if (sizes_.empty() && to.stride(d) * item_ == bytes_) {
        bytes_ *= to.size(d);
      } else {
        sizes_.push_back(to.size(d));
        strides_.push_back(to.stride(d) * item_);
      }
    }
    for (const int64_t size : sizes_) pieces_ *= size;
  }

  int64_t bytes() const { return pieces_ * bytes_; }

  void write(int64_t slot, int64_t i) const {
    char* to = to_ + slot * step_;
    const char* from = from_ + i * bytes();
    if (sizes_.empty()) {
      std::memcpy(to, from, bytes_);
      return;
    }
    for (int64_t piece = 0; piece < pieces_; ++piece, from += bytes_) {
      int64_t offset = 0, rest = piece;
      for (size_t d = 0; d < sizes_.size(); ++d) {
        offset += rest % sizes_[d] * strides_[d];
        rest /= sizes_[d];
      }
      std::memcpy(to + offset, from, bytes_);
    }
  }

 private:
  char* to_;
  const char* from_;
  int64_t item_, step_, bytes_, pieces_ = 1;
  c10::SmallVector<int64_t, 4> sizes_, strides_; // of the pieces, the fastest dimension first
};

void check_kv_cache_update(const char* op, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
    const Tensor& v, const Tensor& slots) {
  check_same_device(op, "k_cache", k_cache, "v_cache", v_cache);
  check_same_device(op, "k_cache", k_cache, "k", k);
  check_same_device(op, "k_cache", k_cache, "v", v);
  check_same_device(op, "k_cache", k_cache, "slots", slots);
  TORCH_CHECK(k_cache.dim() >= 1, op, ": expected k_cache of shape [num_slots, ...], but got a scalar");
  const SymInt num_slots = k_cache.sym_size(0);
  TORCH_CHECK(v_cache.dim() >= 1 && expect(v_cache.sym_size(0).sym_eq(num_slots)), op,
      ": expected v_cache with as many slots as k_cache, ", num_slots, ", but got ", v_cache.sym_sizes());
  check_integers(op, "slots", slots);
  TORCH_CHECK(slots.dim() == 1, op, ": expected slots of one dimension, but got ", slots.sym_sizes(),
      "; flatten it together with the first dimensions of k and v");
  const auto rows_for = [&](const Tensor& cache) {
    auto shape = cache.sym_sizes().vec();
    shape[0] = slots.sym_size(0);
    return shape;
  };
  check_dtype(op, "k", k, k_cache.scalar_type(), "k_cache");
  check_shape(op, "k", k, rows_for(k_cache), "a row of k_cache for each slot");
  check_dtype(op, "v", v, v_cache.scalar_type(), "v_cache");
  check_shape(op, "v", v, rows_for(v_cache), "a row of v_cache for each slot");
}

// Reads everything, then writes: k, v and slots may lie in the caches.
Tensor source(const Tensor& x, const Tensor& k_cache, const Tensor& v_cache) {
  return x.is_alias_of(k_cache) || x.is_alias_of(v_cache) ? x.clone(at::MemoryFormat::Contiguous) : x.contiguous();
}

void write_rows(const char* op, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_, const Tensor& v_,
    const Tensor& slots_) {
  for (const Tensor* x : {&k_cache, &v_cache, &k_, &v_, &slots_}) expect_memory(op, *x);
  const Tensor k = source(k_, k_cache, v_cache), v = source(v_, k_cache, v_cache),
               slots = source(slots_.to(at::kLong), k_cache, v_cache);
  const Stream stream = current_stream(k_cache.get_device());
  const int64_t n = slots.numel();
  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto check = [op, slot, n, slots = k_cache.size(0)] { check_slots(op, slot, n, slots); };
  const bool later = capturing(stream.device); // each replay reads its slots
  if (!later) run(stream, check);
  launch(stream, [check, later, n, slot, k = CacheRows(k_cache, k), v = CacheRows(v_cache, v)] {
    if (later) check();
    parallel_each(n, (k.bytes() + v.bytes()) / 4, [&](int64_t i) {
      if (slot[i] < 0) return;
      k.write(slot[i], i);
      v.write(slot[i], i);
    });
  });
}

void kv_cache_update_(
    const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots) {
  constexpr const char* op = "kv_cache_update_";
  check_kv_cache_update(op, k_cache, v_cache, k, v, slots);
  WrittenTo written(op);
  written.add("k_cache", k_cache);
  written.add("v_cache", v_cache);
  written.check();
  write_rows(op, k_cache, v_cache, k, v, slots);
}

std::tuple<Tensor, Tensor> kv_cache_update(
    const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots) {
  constexpr const char* op = "kv_cache_update";
  check_kv_cache_update(op, k_cache, v_cache, k, v, slots);
  Tensor new_k = k_cache.clone(at::MemoryFormat::Contiguous), new_v = v_cache.clone(at::MemoryFormat::Contiguous);
  write_rows(op, new_k, new_v, k, v, slots);
  return {new_k, new_v};
}

// ---- autocast: k and v in the caches' dtypes. A cache is never cast: the write would go to a copy. ----

constexpr char kInPlace[] = "openreg::kv_cache_update_", kFunctional[] = "openreg::kv_cache_update";

template <auto kernel, const char* name>
auto in_cache_dtype(
    const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots) {
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const auto as = [](const Tensor& x, const Tensor& cache) {
    return x.is_floating_point() && cache.is_floating_point() ? x.to(cache.scalar_type()) : x;
  };
  return op<kernel>(name).call(k_cache, v_cache, as(k, k_cache), as(v, v_cache), slots);
}

// A cache with a lazy conjugation or negation is written through a view without one. torch's fallback for these bits
// reads the returns of an operator that writes. This one has none, so the fallback would write beyond the stack. Dtypes
// are compared before: PyTorch calls itself without end for the values of a quantized tensor with such a bit.
void kv_cache_update_lazy(
    const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots) {
  const auto memory = [](Tensor cache) {
    if (cache.is_conj()) cache = cache.conj();
    return cache.is_neg() ? cache._neg_view() : cache;
  };
  const auto value = [](Tensor x, const Tensor& cache) {
    if (cache.is_conj()) x = x.conj();
    if (cache.is_neg()) x = x._neg_view();
    return x.resolve_conj().resolve_neg();
  };
  check_kv_cache_update("kv_cache_update_", k_cache, v_cache, k, v, slots);
  op<kv_cache_update_>(kInPlace).call(
      memory(k_cache), memory(v_cache), value(k, k_cache), value(v, v_cache), slots.resolve_conj().resolve_neg());
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.kv_cache_update");
  m.def("kv_cache_update_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots) -> ()");
  m.def(
      "kv_cache_update(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slots) -> (Tensor new_k_cache, "
      "Tensor new_v_cache)");
  checked_by("kv_cache_update_", check_kv_cache_update);
  checked_by("kv_cache_update", check_kv_cache_update);
  autocast(m, "kv_cache_update_", in_cache_dtype<kv_cache_update_, kInPlace>);
  autocast(m, "kv_cache_update", in_cache_dtype<kv_cache_update, kFunctional>);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("kv_cache_update_", kv_cache_update_);
  m.impl("kv_cache_update", kv_cache_update);
}
TORCH_LIBRARY_IMPL(openreg, Conjugate, m) {
  m.impl("kv_cache_update_", kv_cache_update_lazy);
}
TORCH_LIBRARY_IMPL(openreg, Negative, m) {
  m.impl("kv_cache_update_", kv_cache_update_lazy);
}
// See Note [Operators that change their arguments].
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("kv_cache_update_", refuse_gradients());
  m.impl("kv_cache_update", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(openreg, ADInplaceOrView, m) {
  m.impl("kv_cache_update_", count_changes());
}
} // namespace openreg::ops
