// The device tensors of a collective, and the CPU tensors that its engine gets for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/graph/graph.h"
#include "runtime/stream/task.h"

namespace openreg {

using Tensors = std::vector<at::Tensor>;

// The call that an error message names.
struct CollectiveName {
  const char* operation;
  int rank, size;
};

class CollectiveCall {
 public:
  explicit CollectiveCall(const CollectiveName& name) : name(name) {}

  // Takes a tensor that the engine reads, and returns what the engine gets for it.
  at::Tensor input(const at::Tensor& tensor) { return host_of(tensor, /*written=*/false); }
  // Takes a tensor that the engine writes, and returns what the engine gets for it.
  at::Tensor output(const at::Tensor& tensor);
  template <class T>
  std::vector<T> input(const std::vector<T>& list) {
    std::vector<T> hosts;
    for (const auto& tensor : list) hosts.push_back(input(tensor));
    return hosts;
  }
  template <class T>
  std::vector<T> output(const std::vector<T>& list) {
    std::vector<T> hosts;
    for (const auto& tensor : list) hosts.push_back(output(tensor));
    return hosts;
  }
  // Makes the call one of the current device, if it has no tensors.
  void choose_device();

  // Returns true if the engine works on copies.
  bool has_copies() const { return !copies_.empty(); }
  // Copies the engine's results to the device.
  void copy_back() const;
  // Copies the inputs for the engine, and its results to the device, in a node of a graph.
  void copy_to_hosts() const;
  void copy_from_hosts() const;

  const CollectiveName name;
  bool sparse = false; // sparse tensors are accepted
  c10::DeviceIndex device = -1;
  Tensors outputs;
  std::vector<MemoryUse> uses; // the memory that a captured call uses

 private:
  at::Tensor host_of(const at::Tensor& tensor, bool written);
  void check(const at::Tensor& tensor);
  bool captured() const;

  struct Copy {
    at::Tensor host, tensor;
    const void* memory; // of a dense tensor
  };
  std::vector<Copy> copies_;
  // The engine's tensors for a captured call under isolation, with CPU tensors over the device memory.
  struct Staged {
    at::Tensor host, device;
    bool written;
  };
  std::vector<Staged> staged_;
};

} // namespace openreg
