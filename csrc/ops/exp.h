// exp without a call: at::vec calls a SLEEF function per register, and the call costs more than the computation.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <initializer_list>
#include <type_traits>

namespace openreg::ops {

// Within 1 unit in the last place for float; handles infinities and NaN like std::exp.
template <class V>
V exp(V x) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<V, at::vec::Vectorized<float>>) {
    // exp(x) = 2^n exp(r), |r| <= log(2)/2; the polynomial is from Cephes' expf. NaN passes through min and max as
    // their second operand.
    x = V(_mm512_max_ps(_mm512_set1_ps(-110), _mm512_min_ps(_mm512_set1_ps(100), x)));
    const V n = (x * V(1.44269504088896341f)).round();
    V r = at::vec::fmadd(n, V(-0.693145751953125f), x); // log(2) in two parts, the first exact for all n
    r = at::vec::fmadd(n, V(-1.428606765330187e-06f), r);
    V p(1.9875691500e-4f);
    for (const float coefficient :
        {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
      p = at::vec::fmadd(p, r, V(coefficient));
    return V(_mm512_scalef_ps(at::vec::fmadd(p, r * r, r) + V(1), n));
  }
#endif
  return x.exp();
}

} // namespace openreg::ops
