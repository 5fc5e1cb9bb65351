// swiglu: y = silu(gate) * up, silu(g) = g * sigmoid(g). Shazeer 2020, arXiv:2002.05202.
// The derivative, the fake kernels and everything else are in src/stable_operators/swiglu.py.
#include "kernels.h"

#include <bit>
#include <cmath>
#include <tuple>

namespace stable_operators {
namespace {

double exponential(double x) {
  return std::exp(x);
}

// In float without branches, so that compilers vectorize it: 2^n * e^r, n integer, |r| <= log(2) / 2, with the
// polynomial of Cephes (Moshier), to 2 ulp. Infinite from 88.38 on, 1e-38 below -87.3.
float exponential(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -87.3f ? -87.3f : x;
  constexpr float kRound = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, which its last bits hold
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound) + 127;
  return p * std::bit_cast<float>(exponent << 23);
}

template <class T>
T sigmoid(T x) {
  return 1 / (1 + exponential(-x));
}

template <class T>
VECTORIZED void swiglu_loop(const T* __restrict gate, const T* __restrict up, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const Wide<T> g = gate[i], u = up[i];
    y[i] = static_cast<T>(g * sigmoid(g) * u);
  }
}

// dg = dy * u * s * (1 + g * (1 - s)), du = dy * g * s with s = sigmoid(g).
template <class T>
VECTORIZED void swiglu_backward_loop(const T* __restrict grad_y, const T* __restrict gate, const T* __restrict up,
    T* __restrict grad_gate, T* __restrict grad_up, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const Wide<T> dy = grad_y[i], g = gate[i], u = up[i], s = sigmoid(g);
    grad_gate[i] = static_cast<T>(dy * u * s * (1 + g * (1 - s)));
    grad_up[i] = static_cast<T>(dy * g * s);
  }
}

Kind check_gate_up(const char* op, const Tensor& gate, const Tensor& up) {
  const Kind kind = check_floating(op, "gate", gate);
  check_like(op, "up", up, "gate", gate, kind);
  return kind;
}

std::tuple<Tensor> swiglu(Tensor gate, Tensor up) {
  const Kind kind = check_gate_up("swiglu", gate, up);
  make_contiguous(gate, up);
  Tensor y = memory(gate.sizes(), kind.dtype, kind);
  dispatch(kind, [&]<class T>(T*) {
    run(kind, "stable_operators::swiglu", [g = gate.read<T>(), u = up.read<T>(), y = y.write<T>(), n = gate.numel()] {
      parallel(n, 1, [=](int64_t begin, int64_t end) { swiglu_loop(g + begin, u + begin, y + begin, end - begin); });
    });
  });
  return {std::move(y)};
}

std::tuple<Tensor, Tensor> swiglu_backward(Tensor grad_y, Tensor gate, Tensor up) {
  constexpr const char* op = "swiglu_backward";
  const Kind kind = check_gate_up(op, gate, up);
  check_like(op, "grad_y", grad_y, "gate", gate, kind);
  make_contiguous(grad_y, gate, up);
  Tensor grad_gate = memory(gate.sizes(), kind.dtype, kind);
  Tensor grad_up = memory(gate.sizes(), kind.dtype, kind);
  dispatch(kind, [&]<class T>(T*) {
    run(kind, "stable_operators::swiglu_backward",
        [dy = grad_y.read<T>(), g = gate.read<T>(), u = up.read<T>(), dg = grad_gate.write<T>(),
            du = grad_up.write<T>(), n = gate.numel()] {
          parallel(n, 1, [=](int64_t begin, int64_t end) {
            swiglu_backward_loop(dy + begin, g + begin, u + begin, dg + begin, du + begin, end - begin);
          });
        });
  });
  return {std::move(grad_gate), std::move(grad_up)};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(stable_operators, m) {
  m.set_python_module("stable_operators.registration");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_y, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)");
}
STABLE_TORCH_LIBRARY_IMPL(stable_operators, CPU, m) {
  m.impl("swiglu", boxed<swiglu>);
  m.impl("swiglu_backward", boxed<swiglu_backward>);
}
STABLE_TORCH_LIBRARY_IMPL(stable_operators, PrivateUse1, m) {
  m.impl("swiglu", boxed<swiglu>);
  m.impl("swiglu_backward", boxed<swiglu_backward>);
}

} // namespace stable_operators
