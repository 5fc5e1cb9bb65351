// nms: greedy non-maximum suppression; returns the boxes that stay, by decreasing score; forward only.
// A box is removed if a box that stays has a higher score and overlaps it with
//   inter / (area + area' - inter) > iou_threshold.
// Ties, NaN and rounding are the same as in torchvision's kernel (torchvision/csrc/ops/cpu/nms_kernel.cpp): equal
// scores keep their order, NaN is the highest score, and a NaN coordinate removes no box.
// It is also torchvision::nms on the device. It does not need torchvision: the libraries can load in either order,
// because the dispatcher keeps the kernel until the schema is defined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off") // a fused area - w * h rounds once, which could change a box at the threshold
#endif
#include "kernels/loops.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "runtime/graph/graph.h"

#include <cmath>
#include <numeric>
#include <vector>

namespace openreg::ops {
namespace {
using namespace kernels;

// Number of boxes that are decided one by one, before the other boxes are compared with the ones that are kept.
constexpr int64_t kBlock = 256;

// Indices by decreasing score.
template <class T>
std::vector<int64_t> by_score(const T* scores, int64_t n) {
  std::vector<std::pair<Acc<T>, int64_t>> keys(n);
  for (int64_t i = 0; i < n; ++i) keys[i] = {static_cast<Acc<T>>(scores[i]), i};
  std::stable_sort(keys.begin(), keys.end(),
      [](const auto& a, const auto& b) { return a.first > b.first || (std::isnan(a.first) && !std::isnan(b.first)); });
  std::vector<int64_t> order(n);
  std::transform(keys.begin(), keys.end(), order.begin(), [](const auto& key) { return key.second; });
  return order;
}

// The boxes in the order of their scores, one array for each coordinate, padded to whole vectors.
template <class T>
class Boxes {
 public:
  using A = Acc<T>;
  using V = Vec<T>;

  Boxes(const T* boxes, const std::vector<int64_t>& order, double iou_threshold)
      : n_(static_cast<int64_t>(order.size())), stride_(at::divup(n_, kLanes<T>) * kLanes<T>), data_(6 * stride_) {
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t c = 0; c < 4; ++c) column(c)[i] = static_cast<A>(boxes[4 * order[i] + c]);
      column(kArea)[i] = (column(2)[i] - column(0)[i]) * (column(3)[i] - column(1)[i]);
    }
    // The threshold is a double: for x of type A, x > threshold means x > the greatest A that is not above it.
    threshold_ = static_cast<A>(iou_threshold);
    if (threshold_ > iou_threshold) threshold_ = std::nextafter(threshold_, -std::numeric_limits<A>::infinity());
  }

  bool gone(int64_t i) const { return data_[kGone * stride_ + i] != A(0); }

  // Decides boxes [begin, end) among themselves; appends those that stay.
  void settle(int64_t begin, int64_t end, std::vector<int64_t>& stay) {
    for (int64_t i = begin; i < end; ++i) {
      if (gone(i)) continue;
      suppress(&i, &i + 1, i + 1, end);
      stay.push_back(i);
    }
  }

  // Removes, among boxes [begin, end), those that overlap one that stays.
  void suppress(const int64_t* stay, const int64_t* stay_end, int64_t begin, int64_t end) {
    // Starts at a full vector: its boxes before `begin` are already decided and not checked again.
    for (int64_t j = begin / kLanes<T> * kLanes<T>; j < end; j += kLanes<T>) {
      const V x1 = load(0, j), y1 = load(1, j), x2 = load(2, j), y2 = load(3, j), area = load(kArea, j);
      const V zero(0), threshold(threshold_);
      V gone = load(kGone, j);
      if (gone.zero_mask() == 0) continue;
      for (const int64_t* i = stay; i != stay_end; ++i) {
        const V w = greater(zero, less(all(2, *i), x2) - greater(all(0, *i), x1));
        const V h = greater(zero, less(all(3, *i), y2) - greater(all(1, *i), y1));
        const V inter = w * h;
        gone = gone | ((inter / (all(kArea, *i) + area - inter) > threshold) & V(1));
      }
      gone.store(column(kGone) + j);
    }
  }

 private:
  enum { kArea = 4, kGone = 5 };
  A* column(int64_t c) { return data_.data() + c * stride_; }
  V load(int64_t c, int64_t j) const { return V::loadu(data_.data() + c * stride_ + j); }
  V all(int64_t c, int64_t i) const { return V(data_[c * stride_ + i]); }
  // std::max and std::min, which return the first argument if neither is larger.
  static V greater(V a, V b) { return V::blendv(a, b, a < b); }
  static V less(V a, V b) { return V::blendv(a, b, b < a); }

  int64_t n_, stride_;
  std::vector<A> data_;
  A threshold_;
};

template <class T>
std::vector<int64_t> nms_loop(const T* boxes, const T* scores, int64_t n, double iou_threshold) {
  const auto order = by_score(scores, n);
  Boxes<T> sorted(boxes, order, iou_threshold);
  std::vector<int64_t> stay;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    const size_t settled = stay.size();
    sorted.settle(begin, end, stay);
    const int64_t *first = stay.data() + settled, *last = stay.data() + stay.size();
    // In full vectors, so that no two threads write to the same one. There is a barrier per block, so a share must be
    // large enough.
    at::parallel_for(0, at::divup(n - end, kLanes<T>), at::divup(16 * kGrain, kLanes<T> * (last - first) + 1),
        [&](int64_t from, int64_t to) {
          sorted.suppress(first, last, end + from * kLanes<T>, std::min(n, end + to * kLanes<T>));
        });
  }
  for (int64_t& i : stay) i = order[i];
  return stay;
}

void check_nms(const char* op, const Tensor& boxes, const Tensor& scores) {
  check_floating(op, "boxes", boxes);
  check_kind_like(op, "scores", scores, "boxes", boxes);
  TORCH_CHECK(boxes.dim() == 2 && expect(boxes.sym_size(1).sym_eq(4)), op, ": expected boxes of shape [N, 4], but got ",
      boxes.sym_sizes());
  check_shape(op, "scores", scores, rows_of(boxes), "a score for each box");
}

Tensor nms(const Tensor& boxes_, const Tensor& scores_, double iou_threshold) {
  check_nms("nms", boxes_, scores_);
  const Tensor boxes = boxes_.contiguous(), scores = scores_.contiguous();
  const Stream stream = current_stream(boxes.get_device());
  if (detail::captures(stream))
    detail::refuse_capture(stream, "openreg::nms",
        "the shape of its result depends on values in device memory. Move it out of the capture.");
  const int64_t n = boxes.size(0);
  std::vector<int64_t> stay;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, boxes.scalar_type(), "nms", [&] {
    using T = scalar_t;
    stay = run(stream, [=, boxes = boxes.const_data_ptr<T>(), scores = scores.const_data_ptr<T>()] {
      return nms_loop(boxes, scores, n, iou_threshold);
    });
  });
  Tensor out = at::empty({static_cast<int64_t>(stay.size())}, boxes.options().dtype(at::kLong));
  launch(stream,
      [stay = std::move(stay), out = out.mutable_data_ptr<int64_t>()] { std::copy(stay.begin(), stay.end(), out); });
  return out;
}

// ---- autograd: the result is integers, which have no derivative on any path ----

void nms_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.nms");
  m.def("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor");
  checked_by("nms", check_nms);
  autocast(m, "nms", Cast::kFloat32);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("nms", nms);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("nms", torch::CppFunction::makeFromBoxedFunction<&nms_autograd>());
}
OPENREG_LIBRARY_IMPL(torchvision, dense, m) {
  m.impl("nms", nms);
}
OPENREG_LIBRARY_IMPL(torchvision, autograd, m) {
  m.impl("nms", torch::CppFunction::makeFromBoxedFunction<&nms_autograd>());
}
OPENREG_LIBRARY_IMPL(torchvision, autocast, m) {
  m.impl("nms", autocast(Cast::kFloat32, identity.type)); // as torchvision does on its devices
}

} // namespace openreg::ops
