// Rows of tensors that need not be contiguous.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <array>

namespace openreg::kernels {

// A tensor whose rows are contiguous; there may be gaps between them.
inline at::Tensor with_dense_rows(const at::Tensor& x) {
  return x.dim() > 0 && x.size(-1) > 1 && x.stride(-1) != 1 ? x.contiguous() : x;
}

// The start of a row in each of several tensors, which have the same sizes except in the last dimension.
template <size_t count>
class RowOffsets {
 public:
  RowOffsets() = default; // of tensors that are a single row
  explicit RowOffsets(const std::array<at::Tensor, count>& tensors)
      : sizes_(tensors[0].sizes().slice(0, tensors[0].dim() - 1)), index_(sizes_.size(), 0) {
    for (size_t k = 0; k < count; ++k) strides_[k] = tensors[k].strides();
  }
  void seek(int64_t row) {
    offset = {};
    for (size_t dim = sizes_.size(); dim-- > 0;) {
      index_[dim] = row % sizes_[dim];
      row /= sizes_[dim];
      for (size_t k = 0; k < count; ++k) offset[k] += index_[dim] * strides_[k][dim];
    }
  }
  void next() {
    for (size_t dim = sizes_.size(); dim-- > 0;) {
      const bool carry = ++index_[dim] == sizes_[dim];
      const int64_t steps = carry ? 1 - sizes_[dim] : 1;
      for (size_t k = 0; k < count; ++k) offset[k] += steps * strides_[k][dim];
      if (!carry) return;
      index_[dim] = 0;
    }
  }
  std::array<int64_t, count> offset{};

 private:
  at::DimVector sizes_, index_;
  std::array<at::DimVector, count> strides_;
};

} // namespace openreg::kernels
