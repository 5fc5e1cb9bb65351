// Finds out if tensors that are written to share memory, exactly, for any strides: threads would race, or a write would
// be lost.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace openreg::ops {

// Note [Overlap]
// Addresses of a strided tensor are sums of a multiple of each stride, so two tensors share memory where a sum of
// such terms equals the distance between them. We try terms from the largest stride down, and skip a multiple if the
// smaller terms cannot make up the rest. For slices, transposes and interleavings of a dense tensor, that leaves two or
// three multiples per term. A search that takes longer counts as shared.
class Sums {
 public:
  // Adds the term stride * k, first <= k <= last.
  void add(int64_t stride, int64_t first, int64_t last) {
    if (stride == 0 || (first == 0 && last == 0)) return;
    if (stride < 0) {
      stride = -stride;
      first = -std::exchange(last, -first);
    }
    const auto same = std::ranges::find(terms_, stride, &Term::stride);
    if (same == terms_.end()) return terms_.push_back({stride, first, last});
    same->first += first;
    same->last += last;
  }
  // The addresses of a tensor's bytes, counted backward if `sign` is -1. The tensor has elements.
  void add(const at::Tensor& x, int64_t sign) {
    for (int64_t d = 0; d < x.dim(); ++d) add(sign * x.stride(d) * x.element_size(), 0, x.size(d) - 1);
    add(sign, 0, x.element_size() - 1);
  }
  bool reach(int64_t target) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.stride > b.stride; });
    least_.assign(terms_.size() + 1, 0);
    most_.assign(terms_.size() + 1, 0);
    for (size_t i = terms_.size(); i-- > 0;) {
      least_[i] = least_[i + 1] + terms_[i].stride * terms_[i].first;
      most_[i] = most_[i + 1] + terms_[i].stride * terms_[i].last;
    }
    steps_ = 0;
    return reach(0, target);
  }

 private:
  struct Term {
    int64_t stride, first, last;
  };
  static constexpr int64_t kMostSteps = 100'000;

  static int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

  bool reach(size_t i, int64_t target) {
    if (target < least_[i] || target > most_[i]) return false;
    if (i == terms_.size() || ++steps_ > kMostSteps) return true;
    const auto [stride, first, last] = terms_[i];
    const int64_t from = std::max(first, floor_divide(target - most_[i + 1] + stride - 1, stride)),
                  to = std::min(last, floor_divide(target - least_[i + 1], stride));
    for (int64_t k = from; k <= to; ++k)
      if (reach(i + 1, target - k * stride)) return true;
    return false;
  }

  std::vector<Term> terms_;
  std::vector<int64_t> least_, most_; // the sums of the terms from the i-th on
  int64_t steps_ = 0;
};

// Returns true if two elements of x share memory.
inline bool overlaps_itself(const at::Tensor& x) {
  if (x.numel() < 2 || x.is_non_overlapping_and_dense()) return false;
  for (int64_t d = 0; d < x.dim(); ++d) { // two elements whose indices first differ in d
    if (x.size(d) == 1) continue;
    if (x.stride(d) == 0) return true;
    Sums between;
    const int64_t item = x.element_size();
    between.add(x.stride(d) * item, 1, x.size(d) - 1);
    for (int64_t e = d + 1; e < x.dim(); ++e) between.add(x.stride(e) * item, 1 - x.size(e), x.size(e) - 1);
    between.add(1, 1 - item, item - 1);
    if (between.reach(0)) return true;
  }
  return false;
}

// Checks the tensors that a call writes to, named for its errors: rejects one that overlaps itself, and two that share
// memory.
class WrittenTo {
 public:
  explicit WrittenTo(const char* op) : op_(op) {}
  void add(std::string_view name, const at::Tensor& x) { add(name, x, -1); }
  void add(std::string_view list, at::TensorList tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) add(list, tensors[i], static_cast<int64_t>(i));
  }
  void check() {
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (size_t i = 0; i < spans_.size(); ++i)
      for (size_t j = i + 1; j < spans_.size() && spans_[j].begin < spans_[i].end; ++j)
        TORCH_CHECK(!share(spans_[i], spans_[j]), op_, ": ", spans_[i].name(), " and ", spans_[j].name(),
            " share memory, and both are written to; clone one of them");
  }

 private:
  struct Span {
    std::string_view list;
    int64_t i; // in the list, or -1
    const at::Tensor* x;
    bool dense;
    const char *begin, *end;
    std::string name() const { return std::string(list) + (i < 0 ? "" : "[" + std::to_string(i) + "]"); }
  };

  void add(std::string_view list, const at::Tensor& x, int64_t i) {
    if (x.numel() == 0) return;
    const bool dense = x.is_non_overlapping_and_dense();
    int64_t last = 0;
    for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
    const char* begin = static_cast<const char*>(x.const_data_ptr());
    spans_.push_back({list, i, &x, dense, begin, begin + (last + 1) * x.element_size()});
    TORCH_CHECK(dense || !overlaps_itself(x), op_, ": ", spans_.back().name(),
        " is expanded or overlaps itself, and is written to; make it contiguous first");
  }
  static bool share(const Span& a, const Span& b) {
    if (a.begin == b.begin || (a.dense && b.dense)) return true;
    Sums sums;
    sums.add(*a.x, 1);
    sums.add(*b.x, -1);
    return sums.reach(b.begin - a.begin);
  }

  const char* op_;
  std::vector<Span> spans_;
};

} // namespace openreg::ops
