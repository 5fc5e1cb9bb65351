// linear_cross_entropy: cross_entropy of x weight^T + bias, without the matrix of logits.
// Works on chunks of rows, as in Hsu et al. 2024, arXiv:2410.10989. Forward computes a chunk's logits and, if gradients
// are needed, immediately turns them in place into the logits' gradient, and that into its part of the gradients.
// Backward only multiplies by the gradient of the loss. A separate operator does this, so that compilers see it.
// Rows with ignore_index are left out of all products.
// bfloat16 uses products of pairs if the processor has them (gemm.h), but not for the gradients of few rows. The
// logits' gradient is then rounded to bfloat16, as it is in eager mode.
#include "backend/functorch.h"
#include "kernels/cross_entropy.h"
#include "kernels/gemm.h"
#include "ops/autograd.h"
#include "ops/checks.h"

namespace openreg::ops {
namespace {
using namespace kernels;

// Rows of a chunk, whose logits are held for all classes; classes of a tile, whose weights a thread holds in cache;
// classes of a block, whose logits and weights all threads hold in theirs.
constexpr int64_t kRows = 512, kClasses = 96, kClassBlock = 16 * kClasses;
// Up to this many rows, gradients spend more time on packing the weights in pairs than products of pairs save.
constexpr int64_t kFewRows = 32;
// Columns of grad_x that a thread computes at a time, from this many classes.
template <class A>
constexpr int64_t kColumns = 4 * kPanel<A>;
constexpr int64_t kDepth = 256;
constexpr int64_t kBlockRow = kClassBlock + 32; // not a power of 2

// The type that gradients are rounded to: T, but float for float16, because gradients of a mean over rows may be out of
// its range.
template <class T>
using Grad = std::conditional_t<std::is_same_v<T, at::Half>, float, T>;

template <class T>
struct Arguments {
  int64_t rows, width, classes;
  const T *x, *weight, *bias; // bias may be null
  const int64_t* target;
  const Acc<T>* grad_loss; // of the loss, or of each row's loss; null for 1
  CrossEntropy options;
};

template <class T>
struct Results {
  Acc<T>* losses; // of each row
  Acc<T>* loss; // null without a reduction
  Grad<T>* x; // the gradients; null if not needed
  Acc<T>*weight, *bias;
};

// A chunk of rows that count. Logits are stored transposed, one row of memory per class: maxima and sums over classes
// are then elementwise, and products use weight in its own layout.
template <class T>
class Chunk {
  using A = Acc<T>;
  using V = at::vec::Vectorized<A>;
  using Pair = c10::BFloat16;
  static constexpr bool kHasPairs = std::is_same_v<T, Pair>;

 public:
  Chunk(const Arguments<T>& in, const Results<T>& out, bool gradients, A* memory)
      : in_(in), out_(out), gradients_(gradients) {
    lay_out(memory);
  }

  // Elements of memory that a chunk takes.
  static int64_t size(const Arguments<T>& in, bool gradients) {
    Chunk chunk(in, {}, gradients, nullptr);
    return chunk.size_;
  }

  // rows: n rows of x that count; scale: the factor for their losses.
  void run(const int64_t* rows, int64_t n, double scale, bool first) {
    rows_ = rows;
    n_ = n;
    first_ = first;
    take_rows();
    split(tiles_, kClasses * n_ * in_.width, [&](int64_t begin, int64_t end) { exponentials(begin, end); });
    for (int64_t t = 0; t < row_; t += V::size()) combine(t);
    for (int64_t t = 0; t < n_; ++t) finish_row(t, scale);
    if (!gradients_) return;
    for (int64_t v = 0; v < in_.classes; v += kClassBlock) {
      const int64_t end = std::min(in_.classes, v + kClassBlock);
      split(at::divup(end - v, kClasses), kClasses * n_ * in_.width,
          [&](int64_t first, int64_t last) { gradients_of_logits(v / kClasses + first, v / kClasses + last); });
      if (out_.x != nullptr) multiply_by_weight(v, end);
    }
    if (out_.x == nullptr) return;
    parallel_each(n_, in_.width,
        [&](int64_t t) { narrow(grad_x_ + t * in_.width, A(1), in_.width, out_.x + rows_[t] * in_.width, 1); });
  }

 private:
  // The layout and sizes of everything.
  void lay_out(A* memory) {
    const int64_t most = std::min(kRows, in_.rows);
    row_ = padded<A>(most) + kPanel<A>; // not a power of 2, to avoid cache conflicts
    tiles_ = at::divup(in_.classes, kClasses);
    const auto take = [&](int64_t n) {
      A* at = memory == nullptr ? nullptr : memory + size_;
      size_ += at::divup(n, kPanel<A>) * kPanel<A>;
      return at;
    };
    x_ = take(padded<A>(most) * in_.width);
    x_columns_ = take(padded<A>(most) * in_.width);
    x_rows_ = take(gradients_ ? padded<A>(most) * padded<A>(in_.width) : 0);
    grad_x_ = take(gradients_ ? padded<A>(most) * in_.width : 0);
    logits_ = take(gradients_ ? in_.classes * row_ : 0);
    // Its size is the same with and without pairs, because the user may enable or disable oneDNN before the work runs.
    by_row_ = take(gradients_ && kHasPairs ? row_ * kBlockRow / 2 : 0);
    for (A** array : {&tile_max_, &tile_sum_, &tile_total_}) *array = take(tiles_ * row_);
    for (A** array : {&max_, &sum_, &total_, &logsumexp_, &at_target_, &factor_, &least_, &of_target_})
      *array = take(row_);
  }

  // parallel_for over tasks that each process this many elements.
  template <class F>
  static void split(int64_t tasks, int64_t work, F f) {
    at::parallel_for(0, tasks, at::divup(kGrain, work + 1), f);
  }

  // The memory of numbers, for half as many that are kept in bfloat16.
  static Pair* halves(A* memory) { return reinterpret_cast<Pair*>(memory); }

  // x, and x as right factor in pairs of columns and of rows. Rows of zeros complete a panel, because oneDNN generates
  // code for each size and there should be few.
  void take_pairs() {
    const int64_t width = in_.width, rows = padded<A>(n_), panel = kPanel<A>;
    Pair* x = halves(x_);
    parallel_each(rows / panel, panel * width, [&](int64_t p) {
      const int64_t first = p * panel;
      for (int64_t t = first; t < first + panel; ++t) {
        if (t < n_) std::copy_n(in_.x + rows_[t] * width, width, x + t * width);
        else std::fill_n(x + t * width, width, Pair(0.f));
      }
      pack_pairs(x + first * width, 1, width, width, panel, halves(x_columns_) + 2 * first, rows);
      if (out_.weight != nullptr)
        pack_pairs(x + first * width, width, 1, panel, width, halves(x_rows_) + first * width, width);
    });
  }

  void take_rows() {
    constexpr int64_t panel = kPanel<A>;
    if constexpr (kHasPairs)
      if (pairs_) return take_pairs();
    const int64_t width = in_.width;
    parallel_each(n_, width, [&](int64_t t) { widen(in_.x + rows_[t] * width, 1, width, x_ + t * width); });
    parallel_each(at::divup(n_, panel), panel * width, [&](int64_t p) {
      const int64_t t = p * panel;
      pack(x_ + t * width, 1, width, width, std::min(panel, n_ - t), x_columns_ + t * width, width);
    });
    if (out_.weight == nullptr) return;
    parallel_each(at::divup(width, panel), panel * n_, [&](int64_t p) {
      const int64_t column = p * panel;
      pack(x_ + column, width, 1, n_, std::min(panel, width - column), x_rows_ + column * n_, n_);
    });
  }

  // f(t, class) for each row whose target is a class of the tile.
  template <class F>
  void each_target(int64_t begin, int64_t end, F f) const {
    for (int64_t t = 0; t < n_; ++t) {
      const int64_t target = in_.target[rows_[t]];
      if (begin <= target && target < end) f(t, target - begin);
    }
  }

  // Logits of tiles, then their exponentials relative to the tile's maximum, and the tile's sums.
  void exponentials(int64_t first, int64_t last) {
    const int64_t weight_row = in_.width + kPanel<A>; // not a power of 2
    Scratch<A> weight(pairs_ ? 0 : kClasses * weight_row), own(gradients_ ? 0 : kClasses * row_);
    const Pairs pairs{pairs_};
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t begin = tile * kClasses, end = std::min(begin + kClasses, in_.classes), m = end - begin;
      A* logits = gradients_ ? logits_ + begin * row_ : static_cast<A*>(own);
      A *max = tile_max_ + tile * row_, *sum = tile_sum_ + tile * row_, *total = tile_total_ + tile * row_;
      if (pairs_) {
        if constexpr (kHasPairs)
          gemm_pairs(m, padded<A>(n_), in_.width, in_.weight + begin * in_.width, in_.width, halves(x_columns_),
              padded<A>(n_), logits, row_, false);
      } else {
        for (int64_t c = 0; c < m; ++c)
          widen(in_.weight + (begin + c) * in_.width, 1, in_.width, weight + c * weight_row);
        gemm<A>(m, n_, in_.width, weight, weight_row, 1, x_columns_, in_.width, logits, row_, false);
      }
      std::fill_n(max, row_, -std::numeric_limits<A>::infinity());
      std::fill_n(sum, row_, A(0));
      std::fill_n(total, row_, A(0));
      for (int64_t c = 0; c < m; ++c) {
        A* row = logits + c * row_;
        const V bias(in_.bias == nullptr ? A(0) : static_cast<A>(in_.bias[begin + c]));
        for (int64_t t = 0; t < n_; t += V::size()) {
          const V x = V::loadu(row + t) + bias;
          x.store(row + t);
          at::vec::maximum(V::loadu(max + t), x).store(max + t);
          (V::loadu(total + t) + x).store(total + t);
        }
      }
      each_target(begin, end, [&](int64_t t, int64_t c) { at_target_[t] = logits[c * row_ + t]; });
      for (int64_t c = 0; c < m; ++c) {
        A* row = logits + c * row_;
        for (int64_t t = 0; t < n_; t += V::size()) {
          const V by = V::loadu(max + t), least(-std::numeric_limits<A>::infinity());
          // If a tile is all -inf, the exponentials are 0.
          const V e = (V::loadu(row + t) - V::blendv(by, V(0), by == least)).exp_u20();
          if (gradients_) e.store(row + t);
          (V::loadu(sum + t) + e).store(sum + t);
        }
      }
    }
  }

  // Rows t to t + V::size(): the maximum and the sums over the tiles, in tile order.
  void combine(int64_t t) {
    V max(-std::numeric_limits<A>::infinity()), sum(0), total(0);
    for (int64_t i = t; i < tiles_ * row_; i += row_) max = at::vec::maximum(max, V::loadu(tile_max_ + i));
    for (int64_t i = t; i < tiles_ * row_; i += row_) {
      sum = sum + V::loadu(tile_sum_ + i) * (V::loadu(tile_max_ + i) - max).exp_u20();
      total = total + V::loadu(tile_total_ + i);
    }
    max.store(max_ + t);
    sum.store(sum_ + t);
    total.store(total_ + t);
  }

  // See cross_entropy_row and cross_entropy_backward_row.
  void finish_row(int64_t t, double scale) {
    const auto& o = in_.options;
    const double max = max_[t], lse = std::isfinite(max) ? max + std::log(static_cast<double>(sum_[t])) : max;
    const double s = o.label_smoothing, classes = static_cast<double>(in_.classes);
    double loss = lse + o.z_loss * lse * lse - (1 - s) * at_target_[t];
    if (s != 0) loss -= s * total_[t] / classes;
    out_.losses[rows_[t]] = static_cast<A>(loss);
    const double of_loss = in_.grad_loss == nullptr ? 1 : in_.grad_loss[o.reduction == Reduction::kNone ? rows_[t] : 0];
    const double g = scale * of_loss;
    // An infinite or NaN logit gives a NaN gradient, which exp_u20 would lose.
    factor_[t] =
        std::isfinite(lse) ? static_cast<A>(g * (1 + 2 * o.z_loss * lse)) : std::numeric_limits<A>::quiet_NaN();
    least_[t] = static_cast<A>(g * s / classes);
    of_target_[t] = static_cast<A>(g * (1 - s));
    logsumexp_[t] = static_cast<A>(lse);
  }

  // Turns the tiles' exponentials into the gradients of their logits, and computes the gradients of weight and bias.
  void gradients_of_logits(int64_t first, int64_t last) {
    Scratch<A> by(row_);
    Scratch<Pair> rounded(pairs_ ? kClasses * row_ : 0);
    const Pairs pairs{pairs_};
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t begin = tile * kClasses, end = std::min(begin + kClasses, in_.classes), m = end - begin;
      A *logits = logits_ + begin * row_, *max = tile_max_ + tile * row_;
      for (int64_t t = 0; t < n_; t += V::size())
        (V::loadu(factor_ + t) * (V::loadu(max + t) - V::loadu(logsumexp_ + t)).exp_u20()).store(by + t);
      for (int64_t c = 0; c < m; ++c) {
        A* row = logits + c * row_;
        for (int64_t t = 0; t < n_; t += V::size())
          at::vec::fmsub(V::loadu(row + t), V::loadu(by + t), V::loadu(least_ + t)).store(row + t);
      }
      each_target(begin, end, [&](int64_t t, int64_t c) { logits[c * row_ + t] -= of_target_[t]; });
      if constexpr (kHasPairs)
        if (pairs_) multiply_pairs_by_x(begin, m, rounded);
      if (out_.weight != nullptr && !pairs_)
        gemm<A>(m, in_.width, n_, logits, row_, 1, x_rows_, n_, out_.weight + begin * in_.width, in_.width, !first_);
      for (int64_t c = 0; out_.bias != nullptr && c < m; ++c) {
        const double total = sum<A>(n_, [](V x) { return x; }, logits + c * row_);
        out_.bias[begin + c] = static_cast<A>(total + (first_ ? 0 : out_.bias[begin + c]));
      }
    }
  }

  // grad_weight (+)= gradients of the logits of m classes from `begin` on, rounded, times x. Keeps them for grad_x too.
  void multiply_pairs_by_x(int64_t begin, int64_t m, Pair* rounded) {
    const int64_t rows = padded<A>(n_), block = begin % kClassBlock;
    for (int64_t c = 0; c < m; ++c) {
      narrow(logits_ + (begin + c) * row_, A(1), n_, rounded + c * row_, 1);
      std::fill(rounded + c * row_ + n_, rounded + c * row_ + rows, Pair(0.f));
    }
    if (m % 2 == 1) std::fill_n(rounded + m * row_, rows, Pair(0.f)); // completes a pair
    if (out_.x != nullptr) transpose(rounded, row_, at::divup(m, 2) * 2, rows, halves(by_row_) + block, kBlockRow);
    if (out_.weight != nullptr)
      gemm_pairs(m, in_.width, rows, rounded, row_, halves(x_rows_), in_.width, out_.weight + begin * in_.width,
          in_.width, !first_);
  }

  // grad_x (+)= gradients of the logits of classes [begin, end) times their weights.
  void multiply_by_weight(int64_t begin, int64_t end) {
    // Threads share blocks of columns and, of those, rows; pairs are multiplied with whole panels of rows.
    const int64_t unit = pairs_ ? kPanel<A> : 1, units = at::divup(n_, unit);
    const int64_t blocks = at::divup(in_.width, kColumns<A>), pair_depth = at::divup(end - begin, 2) * 2;
    const int64_t parts = std::min(at::divup(at::get_num_threads(), blocks), at::divup(n_, pairs_ ? unit : kTile));
    split(blocks * parts, kColumns<A> * n_ / parts * (end - begin), [&](int64_t first, int64_t last) {
      Scratch<A> weight((pairs_ ? pair_depth / 2 : kDepth) * kColumns<A>);
      const Pairs pairs{pairs_};
      for (int64_t task = first; task < last; ++task) {
        const int64_t column = task / parts * kColumns<A>, columns = std::min(kColumns<A>, in_.width - column);
        const int64_t row = task % parts * units / parts * unit, rows = (task % parts + 1) * units / parts * unit - row;
        A* to = grad_x_ + row * in_.width + column;
        if constexpr (kHasPairs) {
          if (pairs_) {
            pack_pairs(
                in_.weight + begin * in_.width + column, in_.width, 1, end - begin, columns, halves(weight), columns);
            gemm_pairs(rows, columns, pair_depth, halves(by_row_) + row * kBlockRow, kBlockRow, halves(weight), columns,
                to, in_.width, begin > 0);
            continue;
          }
        }
        for (int64_t v = begin; v < end; v += kDepth) {
          const int64_t depth = std::min(kDepth, end - v);
          pack(in_.weight + v * in_.width + column, in_.width, 1, depth, columns, weight, depth);
          gemm<A>(rows, columns, depth, logits_ + v * row_ + row, 1, row_, weight, depth, to, in_.width, v > 0);
        }
      }
    });
  }

  const Arguments<T> in_;
  const Results<T> out_;
  const bool gradients_;
  const bool pairs_ = kHasPairs && in_.width > 0 && in_.width % 2 == 0 && (!gradients_ || in_.rows > kFewRows) &&
      has_bfloat16_products();
  const int64_t* rows_ = nullptr;
  int64_t n_ = 0, row_ = 0, tiles_ = 0, size_ = 0; // rows in this chunk, elements from one class to the next
  bool first_ = true;
  A *x_, *x_columns_, *x_rows_, *grad_x_, *logits_; // x itself, and packed as right factors
  A* by_row_; // with pairs: a block's gradients of the logits, one row of memory per row
  A *tile_max_, *tile_sum_, *tile_total_; // [tile][row_]
  A *max_, *sum_, *total_, *logsumexp_, *at_target_, *factor_, *least_, *of_target_;
};

template <class T>
void linear_cross_entropy_loop(
    const char* op, const Arguments<T>& in, const Results<T>& out, bool gradients, Acc<T>* memory) {
  const int64_t ignored = in.options.ignore_index;
  const int64_t count = count_targets(op, in.target, in.rows, in.classes, ignored);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < in.rows; ++i) {
    if (in.target[i] != ignored) {
      rows.push_back(i);
      continue;
    }
    out.losses[i] = 0;
    if (out.x != nullptr) std::fill_n(out.x + i * in.width, in.width, Grad<T>(0));
  }
  Chunk<T> chunk(in, out, gradients, memory);
  for (int64_t begin = 0; begin < count; begin += kRows)
    chunk.run(rows.data() + begin, std::min(kRows, count - begin), row_scale(in.options, count), begin == 0);
  if (count == 0 && out.weight != nullptr) std::fill_n(out.weight, in.classes * in.width, Acc<T>(0));
  if (count == 0 && out.bias != nullptr) std::fill_n(out.bias, in.classes, Acc<T>(0));
  if (out.loss != nullptr) *out.loss = reduce_losses(in.options, out.losses, in.rows, count);
}

// ---- torch ----

void check_linear_cross_entropy(const char* op, const Tensor& x, const Tensor& weight, const Tensor& target,
    const std::optional<Tensor>& bias, int64_t /*ignore_index*/, double label_smoothing, double /*z_loss*/,
    std::string_view reduction) {
  check_floating(op, "x", x);
  check_rows(op, "x", x);
  check_kind_like(op, "weight", weight, "x", x);
  const SymInt width = x.sym_size(-1);
  TORCH_CHECK(weight.dim() == 2 && expect(weight.sym_size(1).sym_eq(width)) && expect(weight.sym_size(0).sym_gt(0)), op,
      ": expected weight of shape [classes, ", width, "], at least one class by the last dimension of x, but got ",
      weight.sym_sizes());
  check_target(op, "x", x, target);
  if (bias) {
    check_kind_like(op, "bias", *bias, "x", x);
    check_shape(op, "bias", *bias, weight.sym_sizes().slice(0, 1), "the classes of weight");
  }
  check_loss_options(op, label_smoothing, reduction);
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Gradients compute(const char* op, const Tensor& x_, const Tensor& weight_, const Tensor& target_,
    const std::optional<Tensor>& bias_, const std::optional<Tensor>& grad_loss_, const CrossEntropy& options,
    std::array<bool, 3> wanted) {
  const Tensor x = x_.contiguous(), weight = weight_.contiguous(), target = target_.to(at::kLong).contiguous(),
               bias = contiguous(bias_), grad_loss = contiguous(grad_loss_);
  const auto type = x.scalar_type(), wide = at::toOpMathType(type), rounded = type == at::kHalf ? at::kFloat : type;
  const auto options_of = [&](at::ScalarType dtype) { return x.options().dtype(dtype); };
  const bool none = options.reduction == Reduction::kNone, gradients = wanted[0] || wanted[1] || wanted[2];
  Tensor losses = at::empty(target.sizes(), options_of(wide)), loss = none ? losses : at::empty({}, options_of(wide));
  const auto result = [&](bool want, const Tensor& like, at::ScalarType dtype) {
    return want ? at::empty(like.sizes(), options_of(dtype)) : at::empty({0}, options_of(dtype));
  };
  // weight and bias are summed over chunks in the wide type; x is written once.
  Tensor grad_x = result(wanted[0], x, rounded), grad_weight = result(wanted[1], weight, wide),
         grad_bias = bias.defined() ? result(wanted[2], bias, wide) : result(false, x, wide);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "linear_cross_entropy", [&] {
    using T = scalar_t;
    using A = Acc<T>;
    const Arguments<T> in{target.numel(), x.size(-1), weight.size(0), x.const_data_ptr<T>(), weight.const_data_ptr<T>(),
        bias.defined() ? bias.const_data_ptr<T>() : nullptr, target.const_data_ptr<int64_t>(),
        grad_loss.defined() ? grad_loss.const_data_ptr<A>() : nullptr, options};
    const Results<T> out{losses.mutable_data_ptr<A>(), none ? nullptr : loss.mutable_data_ptr<A>(),
        wanted[0] ? grad_x.mutable_data_ptr<Grad<T>>() : nullptr,
        wanted[1] ? grad_weight.mutable_data_ptr<A>() : nullptr,
        wanted[2] && bias.defined() ? grad_bias.mutable_data_ptr<A>() : nullptr};
    const Tensor memory = at::empty({Chunk<T>::size(in, gradients)}, options_of(wide));
    launch(current_stream(x.get_device()), [op, in, out, gradients, memory = memory.mutable_data_ptr<A>()] {
      linear_cross_entropy_loop(op, in, out, gradients, memory);
    });
  });
  return {loss, grad_x, grad_weight.to(rounded), grad_bias.to(rounded)};
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
    const std::optional<Tensor>& bias, int64_t ignore_index, double label_smoothing, double z_loss,
    std::string_view reduction) {
  constexpr const char* op = "linear_cross_entropy";
  check_linear_cross_entropy(op, x, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction);
  const auto options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  return std::get<0>(compute(op, x, weight, target, bias, std::nullopt, options, {}));
}

void check_linear_cross_entropy_gradients(const char* op, const Tensor& x, const Tensor& weight, const Tensor& target,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& grad_loss, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction, std::array<bool, 3> wanted) {
  check_linear_cross_entropy(op, x, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction);
  TORCH_CHECK(bias || !wanted[2], op, ": wanted asks for the gradient of a bias, but got none; pass bias");
  if (!grad_loss) return;
  check_same_device(op, "x", x, "grad_loss", *grad_loss);
  check_dtype(op, "grad_loss", *grad_loss, at::toOpMathType(x.scalar_type()), "its loss");
  check_shape(
      op, "grad_loss", *grad_loss, reduction == "none" ? target.sym_sizes() : SymIntArrayRef(), "the same as its loss");
}

Gradients linear_cross_entropy_gradients(const Tensor& x, const Tensor& weight, const Tensor& target,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& grad_loss, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction, std::array<bool, 3> wanted) {
  constexpr const char* op = "linear_cross_entropy_gradients";
  check_linear_cross_entropy_gradients(
      op, x, weight, target, bias, grad_loss, ignore_index, label_smoothing, z_loss, reduction, wanted);
  const auto options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  return compute(op, x, weight, target, bias, grad_loss, options, wanted);
}

// ---- autograd: see Note [Derivatives] ----

const auto& gradients_op() {
  return op<linear_cross_entropy_gradients>("openreg::linear_cross_entropy_gradients");
}

[[noreturn]] void no_second_derivative() {
  TORCH_CHECK(false,
      "linear_cross_entropy: has no second derivative, because forward computes the first and keeps no logits; use "
      "cross_entropy of torch.nn.functional.linear");
}

// The gradients from forward, for a recorded backward: differentiating them is an error.
struct Computed {
  static constexpr bool kOpaque = true; // its error does not come from an operator
  static auto forward(AutogradContext*, at::TensorList gradients, at::TensorList /*inputs*/) {
    variable_list out;
    for (const Tensor& x : gradients) out.push_back(at::alias(x));
    return saving(out);
  }
  static Tensor backward(AutogradContext*, const variable_list&) { no_second_derivative(); }
};

struct LinearCrossEntropyGradients {
  static constexpr bool kOpaque = true;
  static auto forward(AutogradContext*, const Tensor& x, const Tensor& weight, const Tensor& target,
      const std::optional<Tensor>& bias, const std::optional<Tensor>& grad_loss, int64_t ignore_index,
      double label_smoothing, double z_loss, std::string_view reduction, std::array<bool, 3> wanted) {
    return saving(gradients_op().call(
        x, weight, target, bias, grad_loss, ignore_index, label_smoothing, z_loss, reduction, wanted));
  }
  static Tensor backward(AutogradContext*, const variable_list&) { no_second_derivative(); }
};

struct LinearCrossEntropy {
  static auto forward(AutogradContext*, const Tensor& x, const Tensor& weight, const Tensor& target,
      const std::optional<Tensor>& bias, int64_t ignore_index, double label_smoothing, double z_loss,
      std::string_view reduction) {
    const bool record = at::GradMode::is_enabled();
    const std::array<bool, 3> wanted{
        record && x.requires_grad(), record && weight.requires_grad(), record && bias && bias->requires_grad()};
    // Without a reduction, each row's loss has its own gradient, so backward recomputes the logits.
    const bool again = wanted == std::array<bool, 3>() || reduction == "none";
    Tensor loss;
    variable_list gradients(again ? 0 : 3);
    if (again) {
      loss = op<linear_cross_entropy>("openreg::linear_cross_entropy")
                 .call(x, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction);
    } else {
      std::tie(loss, gradients[0], gradients[1], gradients[2]) = gradients_op().call(
          x, weight, target, bias, std::nullopt, ignore_index, label_smoothing, z_loss, reduction, wanted);
    }
    const auto if_again = [&](auto value) { return again ? std::optional(value) : std::nullopt; };
    return saving(loss, x, weight, bias, gradients, if_again(target), if_again(ignore_index), if_again(label_smoothing),
        if_again(z_loss), wanted);
  }

  static Gradients backward(AutogradContext*, const variable_list& grad, const Tensor& x, const Tensor& weight,
      const std::optional<Tensor>& bias, variable_list gradients, const std::optional<Tensor>& target,
      std::optional<int64_t> ignore_index, std::optional<double> label_smoothing, std::optional<double> z_loss,
      std::array<bool, 3> wanted) {
    if (target) {
      auto [loss, grad_x, grad_weight, grad_bias] = gradients_op().call(
          x, weight, *target, bias, grad[0], *ignore_index, *label_smoothing, *z_loss, "none", wanted);
      gradients = {grad_x, grad_weight, grad_bias};
    } else if (at::GradMode::is_enabled()) {
      variable_list inputs{x, weight};
      if (bias) inputs.push_back(*bias);
      // Tensors of a transform that has ended count as the wrapped tensors, which may be unrecorded, may already
      // raise, or may have tangents.
      const bool recorded = std::any_of(inputs.begin(), inputs.end(), is_recorded);
      for (Tensor& x : gradients) x = x.view_as(x);
      const bool known = std::any_of(
          gradients.begin(), gradients.end(), [](const Tensor& x) { return x.requires_grad() || has_tangent(x); });
      if (recorded && !known)
        gradients = record<Computed>(
            "openreg::linear_cross_entropy_computed", at::TensorList(gradients), at::TensorList(inputs));
    }
    const auto scaled = [&](size_t i, const std::optional<Tensor>& input) {
      if (!wanted[i]) return Tensor();
      return (target ? gradients[i] : gradients[i] * grad[0]).to(input->scalar_type());
    };
    return {scaled(0, x), scaled(1, weight), Tensor(), scaled(2, bias)};
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.linear_cross_entropy");
  m.def(
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, int ignore_index=-100, "
      "float label_smoothing=0.0, float z_loss=0.0, str reduction=\"mean\") -> Tensor");
  m.def(
      "linear_cross_entropy_gradients(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? grad_loss, *, "
      "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, str reduction=\"mean\", "
      "bool[3] wanted=True) -> (Tensor loss, Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  checked_by("linear_cross_entropy", check_linear_cross_entropy);
  checked_by("linear_cross_entropy_gradients", check_linear_cross_entropy_gradients);
  autocast(m, "linear_cross_entropy", Cast::kLower);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy);
  m.impl("linear_cross_entropy_gradients", linear_cross_entropy_gradients);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("linear_cross_entropy", autograd<LinearCrossEntropy, linear_cross_entropy>("openreg::linear_cross_entropy"));
  m.impl("linear_cross_entropy_gradients",
      autograd<LinearCrossEntropyGradients, linear_cross_entropy_gradients>("openreg::linear_cross_entropy_gradients"));
}

} // namespace openreg::ops
