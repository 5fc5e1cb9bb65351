// Attention over packed sequences of unequal lengths, or a dense batch, as _flash_attention_* and
// _efficient_attention_* take them: the checks, and the work. The results have the semantics and layouts of CUDA's
// kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <openreg/launch.h>

#include <optional>

#include "backend/tensor_checks.h"
#include "kernels/attention.h"

namespace openreg::packed {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeInt = std::optional<int64_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();

inline bool given(const MaybeTensor& x) {
  return x && x->defined(); // autograd saves None as an undefined tensor
}

// [batch, length, heads, width] or [total, heads, width].
template <class T>
kernels::Heads<T> heads_of(const Tensor& x) {
  return {kernels::data_of<T>(x), x.dim() == 4 ? x.stride(0) : 0, x.stride(-2), x.stride(-3), x.stride(-1)};
}

// ---- arguments ----

// The arguments of forward and backward of both families, without tensors: the launched work reads the offsets.
struct Call {
  const char* op;
  const char *offsets_q_name, *offsets_k_name;
  int64_t batch = 0, heads = 0, kv_heads = 0, width = 0, value_width = 0;
  int64_t queries = 0, keys = 0;                   // rows of a dense batch, or of all packed sequences together
  int64_t longest = 0;                             // number of queries
  const int32_t *offsets_q = nullptr, *offsets_k = nullptr; // of packed sequences, batch + 1 of them
  const int32_t* used_keys = nullptr;              // of each sequence
  const int32_t* pages = nullptr;                  // of each sequence, pages_each of them
  int64_t page_count = 0, page_size = 0, pages_each = 0;
  int64_t left = -1, right = -1; // the window; -1 is unlimited
  bool from_end = true;          // whether the last query is at the last key, or the first at the first
  double scale = 1, dropout_p = 0;

  bool packed() const { return offsets_q != nullptr; }
};

// Checks that x is a tensor on query's device.
void check_on_device(const Call& c, const char* name, const Tensor& x, const Tensor& query);

// Returns the address of x, which is contiguous, of int32 and of this shape.
const int32_t* check_integers(
    const Call& c, const char* name, const Tensor& x, const Tensor& query, at::IntArrayRef shape, const char* what);

// Takes the offsets of packed sequences; `k_optional` where key is in pages.
void check_offsets(Call& c, const Tensor& query, const MaybeTensor& q, const MaybeTensor& k, bool k_optional);

// Checks the shapes of query, key and value of `dim` dimensions, [(batch,) length, heads, width], and takes their
// sizes. With `pages`, key and value are [pages, page size, heads, width].
void check_inputs(Call& c, const Tensor& query, const Tensor& key, const Tensor& value, int64_t dim, bool pages);

void check_dropout(Call& c, double p);

// Sets the scale, by default 1 / sqrt(width).
void set_scale(Call& c, std::optional<double> scale);

// Rejects inputs that require grad: PyTorch does not pass the argument `name` to the backward operator, which therefore
// cannot compute the gradient.
void check_inference(const Call& c, const char* name, std::initializer_list<const Tensor*> inputs);

// Returns two numbers from the device's generator if there is dropout, else zeros.
kernels::Drawn draw(const Call& c, const Tensor& query);

// Checks an output of forward, or its gradient, which backward gets.
void check_like(
    const Call& c, const char* name, const Tensor& x, const Tensor& query, at::ScalarType type, at::IntArrayRef shape);

// Returns the address of the numbers from which backward draws dropout again.
const uint64_t* check_random(const Call& c, const char* name, const Tensor& x, const Tensor& query, int64_t count);

// ---- work ----

// The memory of a call's inputs.
template <class T>
struct Inputs {
  kernels::Heads<const T> q, k, v, bias;
  kernels::Rows<const float> slopes;
  const uint64_t* random; // two numbers, of dropout
};

template <class T>
struct Outputs {
  kernels::Heads<T> out;
  kernels::Rows<float> logsumexp; // may be null
  bool by_total;
  int64_t spare_rows;         // the rows of each head, if logsumexp is by batch
  T* debug = nullptr;
  int64_t debug_rows = 0, debug_columns = 0;
};

// T is float, Half or BFloat16.
template <class T>
void forward(const Call& c, const Inputs<T>& in, const Outputs<T>& to);

// The gradient of bias may be null. T is float, Half or BFloat16.
template <class T>
void backward(const Call& c, const Inputs<T>& in, const kernels::Gradients<T>& to, bool by_total);

// Calls f with a value of query's dtype.
template <class F>
void dispatch(const Call& c, const Tensor& query, bool float32, F f) {
  switch (query.scalar_type()) {
    case at::kHalf:
      return f(at::Half());
    case at::kBFloat16:
      return f(at::BFloat16());
    case at::kFloat:
      if (float32) return f(float());
      [[fallthrough]];
    default:
      TORCH_CHECK(false, c.op, ": expected query of ", float32 ? "float32, " : "", "float16 or bfloat16, but got ",
          dtype_name(query.scalar_type()), "; convert it with .to()");
  }
}

} // namespace openreg::packed
