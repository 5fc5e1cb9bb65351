// Philox4x32-10, a counter-based random generator, for dropout: Salmon et al. 2011, doi:10.1145/2063384.2063405.
#pragma once

#include "kernels/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstring>
#include <mutex>

#include "backend/generator.h"
#include "runtime/graph/graph.h"

namespace openreg::kernels {

inline void check_generator(const char* op, const at::Tensor& x, const at::Generator& generator) {
  TORCH_CHECK(generator.device() == x.device(), op, ": x is on ", x.device(), " but generator is on ",
      generator.device(), "; make it with torch.Generator(device=...)");
}

// Two numbers from a generator, from which a random operator derives all its own: the key and the counter's start. They
// are drawn when the operator is called; in a graph, at each replay. Work calls this once.
class Drawn {
 public:
  Drawn() = default; // zeros
  Drawn(const at::Generator& generator, bool later) {
    if (later) inner_ = inner_generator(generator);
    else numbers_ = draw(inner_generator(generator));
  }
  std::array<uint64_t, 2> operator()() const { return inner_.defined() ? draw(inner_) : numbers_; }

 private:
  static std::array<uint64_t, 2> draw(const at::Generator& inner) {
    auto* engine = at::check_generator<at::CPUGeneratorImpl>(inner);
    std::lock_guard lock(engine->mutex_);
    const uint64_t first = engine->random64();
    return {first, engine->random64()};
  }
  std::array<uint64_t, 2> numbers_{};
  at::Generator inner_;
};

// Draws from `generator`, by default the generator of x's device. The CPU's generator does not advance.
inline Drawn draw(const char* op, const at::Tensor& x, const std::optional<at::Generator>& generator) {
  const at::Generator& used = generator && generator->defined() ? *generator : default_generator(x.get_device());
  check_generator(op, x, used);
  const bool captured = capturing(x.get_device());
  if (captured) check_captured_generator(op, current_stream(x.get_device()), used.unsafeGetGeneratorImpl());
  return Drawn(used, captured);
}

// 64-bit lanes with a 32-bit number in the low half; the high halves hold anything. As many at a time as the
// registers take.
#ifdef __AVX512F__
constexpr int64_t kWords = 8, kGroups = 4;
#elif defined(__AVX2__)
constexpr int64_t kWords = 4, kGroups = 2;
#else
constexpr int64_t kWords = 2, kGroups = 2;
#endif
typedef uint64_t Words __attribute__((vector_size(8 * kWords)));
typedef int64_t Signed __attribute__((vector_size(8 * kWords)));

// The 64-bit products of the low halves. (The compiler would use a full 64-bit multiplication.)
inline Words multiply(Words a, uint64_t b) {
#if defined(__AVX512F__)
  return (Words)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(static_cast<int64_t>(b)));
#elif defined(__AVX2__)
  return (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(static_cast<int64_t>(b)));
#else
  return (a & 0xFFFFFFFF) * b;
#endif
}

constexpr int64_t kDrawn = 128; // elements that draw_mask takes at a time: a multiple of 4 * kWords * kGroups

// The mask of the elements from kDrawn * block on, one byte each: 1 if the element's number is at least `least`.
// Element i has word i % 4 of counter i / 4. A pair of groups holds the even and the odd counters, so that the
// eight bytes of two counters make one lane.
inline void draw_mask(uint64_t key, uint64_t counter_high, int64_t block, int64_t least, uint8_t* mask) {
  Words even;
  for (int64_t k = 0; k < kWords; ++k) even[k] = static_cast<uint64_t>(2 * k);
  for (int64_t c = 0; c < kDrawn / 4; c += kGroups * kWords) {
    Words w[kGroups][4];
#pragma GCC unroll 4
    for (int64_t g = 0; g < kGroups; ++g) {
      w[g][0] = even + static_cast<uint64_t>(block * (kDrawn / 4) + c + g / 2 * (2 * kWords) + g % 2);
      w[g][1] = w[g][0] >> 32;
      w[g][2] = Words{} + counter_high;
      w[g][3] = w[g][2] >> 32;
    }
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
#pragma GCC unroll 4
      for (auto& [w0, w1, w2, w3] : w) {
        const Words p0 = multiply(w0, 0xD2511F53), p1 = multiply(w2, 0xCD9E8D57);
        w0 = (p1 >> 32) ^ w1 ^ k0;
        w1 = p1;
        w2 = (p0 >> 32) ^ w3 ^ k1;
        w3 = p0;
      }
    }
#pragma GCC unroll 4
    for (int64_t g = 0; g < kGroups; g += 2) {
      Words bytes{};
#pragma GCC unroll 8
      for (int64_t k = 0; k < 8; ++k)
        bytes |= (Words)((Signed)(w[g + k / 4][k % 4] & 0xFFFFFFFF) >= least) & (uint64_t{1} << (8 * k));
      std::memcpy(mask + 4 * (c + g * kWords), &bytes, sizeof bytes);
    }
  }
}

} // namespace openreg::kernels
