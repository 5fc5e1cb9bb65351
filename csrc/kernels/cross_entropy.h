// One row of softmax cross entropy and its gradient, which cross_entropy and linear_cross_entropy share.
#pragma once

#include "kernels/exp.h"
#include "kernels/loops.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <string_view>

namespace openreg::kernels {

enum class Reduction { kNone, kMean, kSum };

struct CrossEntropy {
  int64_t ignore_index;
  double label_smoothing, z_loss;
  Reduction reduction;
};

inline CrossEntropy options_of(
    int64_t ignore_index, double label_smoothing, double z_loss, std::string_view reduction) {
  return {ignore_index, label_smoothing, z_loss,
      reduction == "none"      ? Reduction::kNone
          : reduction == "sum" ? Reduction::kSum
                               : Reduction::kMean};
}

// Returns the number of targets that count; throws for a target that is not a class. Runs in a launch, before the
// targets are used to read anything.
inline int64_t count_targets(const char* op, const int64_t* target, int64_t rows, int64_t classes, int64_t ignore) {
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) {
    if (target[i] == ignore) continue;
    TORCH_CHECK_INDEX(target[i] >= 0 && target[i] < classes, op, ": expected targets in [0, ", classes,
        "), the classes, or ignore_index ", ignore, ", but got ", target[i], " in row ", i);
    ++count;
  }
  return count;
}

// The factor for the loss of a row that counts.
inline double row_scale(const CrossEntropy& options, int64_t count) {
  return options.reduction == Reduction::kMean ? 1 / static_cast<double>(count) : 1;
}

// The sum or the mean of the rows' losses, in one order for any number of threads.
template <class A>
A reduce_losses(const CrossEntropy& options, const A* losses, int64_t rows, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < rows; ++i) total += losses[i];
  return static_cast<A>(options.reduction == Reduction::kMean ? total / static_cast<double>(count) : total);
}

template <class T>
Acc<T> logsumexp_row(const T* x, int64_t n) {
  const Acc<T> max = max_of(x, n);
  if (!std::isfinite(max)) return max;
  const double total = sum<T>(n, [m = Vec<T>(max)](Vec<T> x) { return exp_in_sum(x - m); }, x);
  return static_cast<Acc<T>>(max + std::log(total));
}

// lse - (1 - s) * x[target] - s * mean(x) + z * lse^2, for a row that counts.
template <class T>
Acc<T> cross_entropy_row(const CrossEntropy& options, const T* x, int64_t target, double lse, int64_t n) {
  const double s = options.label_smoothing;
  double loss = lse + options.z_loss * lse * lse - (1 - s) * static_cast<double>(x[target]);
  if (s != 0) loss -= s * sum<T>(n, [](Vec<T> x) { return x; }, x) / static_cast<double>(n);
  return static_cast<Acc<T>>(loss);
}

// dx = w * exp(x - lse) - g * ((1 - s) * [class == target] + s / n) with w = g * (1 + 2 * z * lse) + h, where
// g and h are the gradients of the row's loss and logsumexp; g is 0 for a row that does not count.
// dx may be x.
template <class T>
void cross_entropy_backward_row(
    const CrossEntropy& options, const T* x, int64_t target, double lse, double g, double h, T* dx, int64_t n) {
  using V = Vec<T>;
  using A = Acc<T>;
  if (g == 0 && h == 0) {
    std::fill_n(dx, n, T(0));
    return;
  }
  const double s = options.label_smoothing, w = g * (1 + 2 * options.z_loss * lse) + h;
  const double at_target =
      g == 0 ? 0 : w * std::exp(static_cast<double>(x[target]) - lse) - g * (1 - s + s / static_cast<double>(n));
  const V l(static_cast<A>(lse)), scale(static_cast<A>(w)), least(static_cast<A>(g * s / static_cast<double>(n)));
  // exp_u20 loses NaN, but x - lse is NaN for an infinite logit.
  if (std::isfinite(lse)) map([=](V x) { return scale * (x - l).exp_u20() - least; }, dx, n, x);
  else map([=](V x) { return scale * exp(x - l) - least; }, dx, n, x);
  if (g != 0) dx[target] = static_cast<T>(at_target);
}

} // namespace openreg::kernels
