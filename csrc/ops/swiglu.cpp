// swiglu: y = silu(gate) * up, silu(g) = g * sigmoid(g).
// Shazeer 2020, arXiv:2002.05202.
// Backward recomputes silu(gate) from the arguments; forward saves no extra tensor.
#include "kernels/exp.h"
#include "kernels/loops.h"
#include "kernels/strided_rows.h"
#include "ops/autograd.h"
#include "ops/checks.h"

#include <unistd.h>

namespace openreg::ops {
namespace {
using namespace kernels;

// A result of at least this many bytes does not stay in cache: the size of the last-level cache.
int64_t far_size() {
  static const int64_t bytes = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 8 << 20);
  return bytes;
}

template <class V>
C10_ALWAYS_INLINE V sigmoid(V g) {
  return V(1) / (V(1) + exp(g.neg()));
}

// Arguments as rows of `width` elements; contiguous ones are a single row.
template <class T, size_t count>
struct Rows {
  std::array<const T*, count> data;
  RowOffsets<count> offsets;
  int64_t width;

  // `kept` holds copies of arguments whose rows are not contiguous, or so short that a copy of them takes less time
  // than the start and the end of each.
  static Rows of(std::array<Tensor, count>& kept) {
    const bool is_short = kept[0].dim() > 0 && kept[0].size(-1) < 4 * kChunk<T>;
    for (Tensor& x : kept) x = is_short ? x.contiguous() : with_dense_rows(x);
    Rows rows{{}, {}, kept[0].numel()};
    if (!std::all_of(kept.begin(), kept.end(), [](const Tensor& x) { return x.is_contiguous(); })) {
      rows.width = kept[0].size(-1);
      rows.offsets = RowOffsets<count>(kept);
    }
    for (size_t k = 0; k < count; ++k) rows.data[k] = kept[k].template const_data_ptr<T>();
    return rows;
  }
  // f(i, size, pointers) for each part of a row from element `begin` to `end`.
  template <class F>
  void each(int64_t begin, int64_t end, F f) const {
    RowOffsets<count> row = offsets;
    row.seek(begin / width);
    for (int64_t i = begin, next; i < end; i = next, row.next()) {
      next = std::min(end, (i / width + 1) * width);
      std::array<const T*, count> at = data;
      for (size_t k = 0; k < count; ++k) at[k] += row.offset[k] + i % width;
      f(i, next - i, at);
    }
  }
};

// Stores past the caches, for results too large to stay there: memory is not read first. `p` is aligned to a register.
template <class T>
void stream(const at::vec::Vectorized<T>& values, T* p) {
#if defined(CPU_CAPABILITY_AVX512)
  alignas(64) T lanes[kChunk<T>];
  values.store(lanes);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_load_si512(lanes));
#else
  values.store(p);
#endif
}

// dg = dy * u * sigma * (1 + g * (1 - sigma)), du = dy * g * sigma with sigma = sigmoid(g), for one chunk.
template <class T, class Write>
void swiglu_backward_chunk(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up, Write write) {
  const auto dy = read_chunk(grad_y), g = read_chunk(gate), u = read_chunk(up),
             sigma = for_each<T>([](Vec<T> g) { return sigmoid(g); }, g);
  const auto to_gate = [one = Vec<T>(1)](Vec<T> dy, Vec<T> g, Vec<T> u, Vec<T> sigma) {
    return dy * u * sigma * (one + g * (one - sigma));
  };
  write(pack<T>(for_each<T>(to_gate, dy, g, u, sigma)), grad_gate);
  write(pack<T>(for_each<T>([](Vec<T> dy, Vec<T> g, Vec<T> sigma) { return dy * g * sigma; }, dy, g, sigma)), grad_up);
}

template <class T>
void swiglu_backward_loop(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t n, bool far) {
  int64_t i = 0;
  const auto store = [](const auto& values, T* p) { values.store(p); };
  const auto whole = [&](auto write) {
    for (; i + kChunk<T> <= n; i += kChunk<T>)
      swiglu_backward_chunk(grad_y + i, gate + i, up + i, grad_gate + i, grad_up + i, write);
  };
  if (far) {
    whole(stream<T>);
#if defined(CPU_CAPABILITY_AVX512)
    _mm_sfence(); // such stores are not ordered
#endif
  } else whole(store);
  if (i < n)
    on_copies<kChunk<T>>(
        n - i, [&](auto*... p) { swiglu_backward_chunk<T>(p..., store); }, grad_y + i, gate + i, up + i, grad_gate + i,
        grad_up + i);
}

void check_swiglu(const char* op, const Tensor& gate, const Tensor& up) {
  check_floating(op, "gate", gate);
  check_like(op, "up", up, "gate", gate);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_swiglu("swiglu", gate, up);
  Tensor y = at::empty(gate.sizes(), gate.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gate.scalar_type(), "swiglu", [&] {
    using T = scalar_t;
    std::array<Tensor, 2> kept{gate, up};
    launch(
        current_stream(gate.get_device()), [n = gate.numel(), x = Rows<T, 2>::of(kept), y = y.mutable_data_ptr<T>()] {
          at::parallel_for(0, n, kExpGrain, [&](int64_t begin, int64_t end) {
            x.each(begin, end, [&](int64_t i, int64_t count, const auto& at) {
              map([](Vec<T> g, Vec<T> u) { return g * sigmoid(g) * u; }, y + i, count, at[0], at[1]);
            });
          });
        });
  });
  return y;
}

void check_swiglu_backward(const char* op, const Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  check_swiglu(op, gate, up);
  check_like(op, "grad_y", grad_y, "gate", gate);
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  constexpr const char* op = "swiglu_backward";
  check_swiglu_backward(op, grad_y, gate, up);
  Tensor grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(gate.sizes(), gate.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gate.scalar_type(), op, [&] {
    using T = scalar_t;
    std::array<Tensor, 3> kept{grad_y, gate, up};
    const auto rows = Rows<T, 3>::of(kept);
    launch(current_stream(gate.get_device()),
        [n = gate.numel(), x = rows,
            far = (rows.width % kChunk<T> == 0 || rows.width == gate.numel()) &&
                gate.numel() * static_cast<int64_t>(sizeof(T)) >= far_size(),
            dg = grad_gate.mutable_data_ptr<T>(), du = grad_up.mutable_data_ptr<T>()] {
          // In chunks, so that every thread's part is aligned.
          at::parallel_for(0, (n + kChunk<T> - 1) / kChunk<T>, kExpGrain / kChunk<T>, [&](int64_t first, int64_t last) {
            x.each(first * kChunk<T>, std::min(n, last * kChunk<T>), [&](int64_t i, int64_t count, const auto& at) {
              swiglu_backward_loop(at[0], at[1], at[2], dg + i, du + i, count, far);
            });
          });
        });
  });
  return {grad_gate, grad_up};
}

// ---- autograd: see Note [Derivatives] ----

struct Swiglu {
  static auto forward(AutogradContext*, const Tensor& gate, const Tensor& up) {
    return saving(op<swiglu>("openreg::swiglu").call(gate, up), gate, up);
  }
  static auto backward(AutogradContext*, const variable_list& grad, const Tensor& gate, const Tensor& up) {
    return op<swiglu_backward>("openreg::swiglu_backward").call(grad[0], gate, up);
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.swiglu");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_y, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)");
  checked_by("swiglu", check_swiglu);
  checked_by("swiglu_backward", check_swiglu_backward);
  autocast(m, "swiglu", Cast::kPromote);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("swiglu", swiglu);
  m.impl("swiglu_backward", swiglu_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("swiglu", autograd<Swiglu, swiglu>("openreg::swiglu"));
  m.impl("swiglu_backward", differentiate_by_reference());
}

} // namespace openreg::ops
