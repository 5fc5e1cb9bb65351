// The tensor arguments of a deferred call, and what stands for them in each step. See Note [Deferred operators].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <vector>

#include "runtime/graph/graph.h"

namespace openreg {

// One tensor of a call; the same tensor in two places is one Argument.
struct Argument {
  at::Tensor given;   // on the stack
  at::Tensor real;    // the program's: what was given, or what it is an alias of
  at::Tensor host;    // a CPU tensor over the same memory, for the task
  at::Tensor meta;    // a Meta tensor
  at::Tensor scratch; // a CPU tensor in scratch memory
  bool written;
  bool constant = false; // a CPU tensor that the task has a copy of, in `host`
};

// What the scratch memory of a capture holds.
enum class Values { kZeros, kOnes, kIdentity };

class Arguments {
 public:
  // Adds a tensor, or, if it is known, that it is written.
  void add(const at::Tensor& given, const at::Tensor& real, bool written);
  // The argument for a tensor on the stack, or null.
  Argument* find(const at::Tensor& given);
  // The argument whose scratch tensor is `x`, or has this storage, or null.
  const Argument* find_scratch(const at::Tensor& x) const;
  const Argument* find_scratch(const c10::StorageImpl* storage) const;

  // Copies a CPU tensor, whose value does not change afterwards.
  static void keep_value(Argument& argument);
  // These make the tensors of one view. Arguments on one storage share one.
  void make_host();
  void make_meta();
  void make_scratch(Values values);
  // Makes scratch tensors with at most two elements in each dimension.
  void make_small_scratch();

  // A stack with one view of each argument in place of the given tensors.
  torch::jit::Stack view(const c10::IValue* first, std::size_t count, at::Tensor Argument::* view);
  // Returns how much memory make_scratch() takes.
  std::size_t bytes() const;
  // The memory that the task uses.
  std::vector<MemoryUse> uses() const;

  std::vector<Argument>& all() { return all_; }
  const std::vector<Argument>& all() const { return all_; }

 private:
  std::vector<Argument> all_;
};

c10::StorageImpl* storage_of(const at::Tensor& x);

// A CPU tensor like `x` over the memory of another storage.
at::Tensor host_tensor(const at::Tensor& x, const c10::StorageImpl* memory);

// A CPU tensor of zeros.
at::Tensor zeros_like_strided(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides);

// How a task uses a tensor's memory.
MemoryUse use_of(const at::Tensor& host, bool written);

} // namespace openreg
