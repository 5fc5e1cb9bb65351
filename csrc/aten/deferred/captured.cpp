#include "aten/deferred/captured.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <omp.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "aten/deferred/queued.h"
#include "aten/deferred/structured.h"
#include "aten/deferred/trial.h"
#include "aten/traits/traits.h"
#include "backend/allocator.h"
#include "backend/generator.h"
#include "backend/identity/identity.h"
#include "backend/map_tensors.h"
#include "runtime/process/fault.h"
#include "runtime/stream/launch.h"

namespace openreg {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using torch::jit::Stack;

StorageImpl* storage_of(const at::Tensor& x) {
  return x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// `x` with another storage.
at::Tensor on_storage(const at::Tensor& x, c10::Storage storage) {
  auto impl = x.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false);
  impl->set_storage_keep_dtype(std::move(storage));
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return at::Tensor(std::move(impl));
}

c10::Storage storage_over(const void* data, size_t bytes) {
  return c10::Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(const_cast<void*>(data), c10::kCPU), nullptr, /*resizable=*/false));
}

// Zeros, which take up memory only when they are first written to.
c10::Storage scratch_storage(size_t bytes) {
  void* data = std::calloc(1, std::max<size_t>(bytes, 64));
  TORCH_CHECK_WITH(
      OutOfMemoryError, data, "openreg: out of host memory for the scratch buffer of a capture, ", bytes, " bytes");
  return c10::Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(data, data, &std::free, c10::kCPU), c10::GetAllocator(c10::kCPU), /*resizable=*/true));
}

// What a run on the scratch buffer reads.
enum class Values { kZeros, kOnes, kIdentity };

// The arguments of a call: what replaces each of them on the scratch buffer and in the node.
struct CallArgument {
  at::Tensor alias, real; // as in CpuCall; a CPU tensor is both
  at::Tensor scratch, host;
  bool device, written;
};

class CallArguments {
 public:
  CallArguments(const CapturedCall& captured, const Stack& stack) : captured_(captured) {
    const auto& schema = captured.op.schema().arguments();
    for (size_t i = 0, first = stack.size() - schema.size(); i < schema.size(); ++i) {
      const bool written = schema[i].alias_info() && schema[i].alias_info()->isWrite();
      visit_tensors(stack[first + i], [&](const at::Tensor& x) { add(x, written); });
    }
  }

  std::vector<CallArgument>& all() { return all_; }
  CallArgument* find(const at::Tensor& alias) {
    for (CallArgument& each : all_)
      if (each.alias.is_same(alias)) return &each;
    return nullptr;
  }
  CallArgument* find_scratch(const at::Tensor& x) {
    for (CallArgument& each : all_)
      if (each.scratch.is_same(x)) return &each;
    return nullptr;
  }
  // The argument whose scratch tensor has this storage.
  CallArgument* find_scratch(const StorageImpl* storage) {
    for (CallArgument& each : all_)
      if (each.scratch.has_storage() && storage_of(each.scratch) == storage) return &each;
    return nullptr;
  }

  // Creates the scratch tensors, filled with `values`.
  void make_scratch(Values values) {
    std::vector<std::pair<const StorageImpl*, c10::Storage>> made;
    for (CallArgument& each : all_) {
      if (!each.device && !captured_.copies) { // a constant
        each.scratch = each.host;
        continue;
      }
      const StorageImpl* storage = storage_of(each.alias);
      auto known = std::find_if(made.begin(), made.end(), [&](const auto& pair) { return pair.first == storage; });
      if (known == made.end()) known = made.insert(made.end(), {storage, scratch_storage(storage->nbytes())});
      each.scratch = on_storage(each.alias, known->second);
      if (values == Values::kOnes) each.scratch.fill_(1);
      if (values == Values::kIdentity && each.scratch.dim() > 1) each.scratch.diagonal(0, -2, -1).fill_(1);
    }
  }

  // Gives out= tensors the shape and the lazy conjugation that they ended up with on the scratch buffer.
  void resize_results() {
    for (CallArgument& each : all_) {
      const at::Tensor &now = each.scratch, &real = each.real;
      if (each.written && now.is_conj() != real.is_conj()) real._set_conj(now.is_conj());
      if (!each.written || (now.sizes() == real.sizes() && now.strides() == real.strides())) continue;
      real.resize_(now.sizes());
      real.unsafeGetTensorImpl()->set_sizes_and_strides(now.sizes(), now.strides(), now.storage_offset());
    }
  }

  // Creates the node's tensors.
  void make_host(std::vector<MemoryUse>& uses) {
    std::vector<std::pair<const StorageImpl*, c10::Storage>> made;
    for (CallArgument& each : all_) {
      if (each.device) {
        // A tensor that is only read may be a lazy clone: only its alias has its memory.
        const StorageImpl* storage = storage_of(each.real);
        if (storage->has_materializer()) storage = storage_of(each.alias);
        auto known = std::find_if(made.begin(), made.end(), [&](const auto& pair) { return pair.first == storage; });
        if (known == made.end())
          known = made.insert(made.end(), {storage, storage_over(storage->data(), storage->nbytes())});
        each.host = on_storage(each.alias, known->second);
        if (each.written)
          each.host.unsafeGetTensorImpl()->set_sizes_and_strides(
              each.real.sizes(), each.real.strides(), each.real.storage_offset());
      } else if (captured_.copies) {
        // The graph keeps the block of pinned memory even if the program resizes the tensor.
        const StorageImpl* storage = storage_of(each.alias);
        each.host = on_storage(each.alias, storage_over(storage->data(), storage->nbytes()));
      }
      add_use(uses, each.host, each.written);
    }
  }

  static void add_use(std::vector<MemoryUse>& uses, const at::Tensor& x, bool written) {
    if (!x.numel()) return;
    size_t bytes = x.itemsize();
    for (int64_t d = 0; d < x.dim(); ++d) bytes += static_cast<size_t>((x.size(d) - 1) * x.stride(d)) * x.itemsize();
    uses.push_back({x.const_data_ptr(), bytes, written});
  }

 private:
  void add(const at::Tensor& x, bool written) {
    if (!x.defined()) return;
    if (CallArgument* known = find(x)) {
      known->written |= written;
      return;
    }
    const char* name = captured_.op.operator_name().name.c_str();
    if (x.layout() != at::kStrided || x.is_quantized() || x.is_nested() || !x.has_storage())
      detail::refuse_capture(captured_.stream, name,
          "it takes a sparse, quantized or nested tensor, and graphs capture operators on strided tensors. Move it out "
          "of the capture, or convert the tensor before.");
    const at::Tensor real = captured_.call.passed(x) ? captured_.call.result(x) : x; // of a list; nothing else holds it
    CallArgument each{x, real, {}, {}, on_device(real), written};
    if (!each.device && !captured_.copies) {
      if (x.dim() && !traits_of(captured_.op).captures_host_tensors)
        detail::refuse_capture(captured_.stream, name,
            "it takes a tensor in pageable host memory, which would be copied to the device. Move the tensor there "
            "before the capture.");
      each.host = x.detach().clone();
      if (x.unsafeGetTensorImpl()->is_wrapped_number()) each.host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    all_.push_back(std::move(each));
  }

  const CapturedCall& captured_;
  std::vector<CallArgument> all_;
};

// Sets arguments of a call on scratch memory that must fit a size: repeats, lengths, or a last offset.
void fit_sizes(const c10::OperatorHandle& op, Stack& scratch) {
  const auto place = [&](const char* name) { return op.schema().argumentIndexWithName(name); };
  const auto tensor = [&](std::optional<int> i) {
    return i && scratch[static_cast<size_t>(*i)].isTensor() ? scratch[static_cast<size_t>(*i)].toTensor()
                                                            : at::Tensor();
  };
  const auto set_last = [&](std::optional<int> i, int64_t last) {
    at::Tensor zeros = at::zeros_like(tensor(i), at::MemoryFormat::Contiguous);
    if (zeros.dim() && zeros.numel()) zeros.select(-1, -1).fill_(last);
    scratch[static_cast<size_t>(*i)] = std::move(zeros);
  };
  if (const at::Tensor repeats = tensor(place("repeats")); repeats.defined())
    set_last(place("repeats"), scratch[static_cast<size_t>(*place("output_size"))].toInt());
  if (const at::Tensor lengths = tensor(place("lengths")), data = tensor(place("data")); // of a segment reduction
      lengths.defined() && data.defined() && 0 < lengths.dim() && lengths.dim() <= data.dim())
    set_last(place("lengths"), data.size(lengths.dim() - 1));
  if (const at::Tensor grad = tensor(place("grad")), offsets = tensor(place("offsets")); // of embedding bags
      grad.defined() && offsets.defined() && place("indices") && grad.dim() && offsets.numel() == grad.size(0) + 1)
    set_last(place("offsets"), tensor(place("indices")).numel());
}

// Runs the kernel on the scratch buffer; returns its results.
Stack try_on_scratch(const CapturedCall& captured, CallArguments& arguments, const Stack& stack, Values values) {
  LendDeviceMemory none(-1);
  at::DisableRecordFunctionGuard unseen;
  std::optional<SavedHostGenerator> saved;
  if (captured.draws) saved.emplace();
  arguments.make_scratch(values);
  const size_t count = captured.op.schema().arguments().size();
  Stack scratch;
  for (size_t i = stack.size() - count; i < stack.size(); ++i)
    scratch.push_back(
        map_tensors(stack[i], [&](const at::Tensor& x) { return x.defined() ? arguments.find(x)->scratch : x; }));
  for (const auto& [i, _] : captured.generators) scratch[i] = at::detail::createCPUGenerator();
  fit_sizes(captured.op, scratch);
  const Traits& traits = traits_of(captured.op);
  for (Check* check : {traits.check_shapes, check_of_values(traits, scratch, count)})
    if (check) check(captured.op, scratch);
  captured.op.redispatchBoxed(DispatchKeySet(captured.target), &scratch);
  return scratch;
}

Stack try_on_scratch(const CapturedCall& captured, CallArguments& arguments, const Stack& stack) {
  KeptWarnings warnings;
  Stack results;
  std::exception_ptr first;
  for (const Values values : {Values::kZeros, Values::kOnes, Values::kIdentity}) {
    warnings.all.clear();
    const c10::WarningUtils::WarningHandlerGuard keep(&warnings);
    try {
      results = try_on_scratch(captured, arguments, stack, values);
      first = nullptr;
      break;
    } catch (const std::exception&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  for (const c10::Warning& each : warnings.all) c10::warn(each);
  return results;
}

// A new result, and its memory in the graph.
struct Fixed {
  size_t index; // among the tensors of the results
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  at::ScalarType type;
  void* memory;
  size_t bytes;
  bool copied; // by an earlier entry for the same storage
};

struct Node {
  c10::OperatorHandle op;
  DispatchKey target;
  Stack arguments;
  std::vector<Fixed> results;
  std::vector<std::pair<size_t, at::Generator>> generators; // the inner ones
  at::Generator lent; // the device's, for an operator without such an argument
  bool copies;
  Stream stream;
  Check* check = nullptr;

  void operator()() const {
    Stack stack = arguments;
    for (const auto& [i, generator] : generators) stack[i] = generator;
    {
      LendGenerator lend(lent);
      if (check) check(op, stack);
      op.redispatchBoxed(DispatchKeySet(target), &stack);
    }
    if (!results.empty()) copy_results(stack);
    if (copies && copy_corrupted(stream, /*here=*/true)) {
      const at::Tensor& to = arguments[0].toTensor();
      if (to.numel()) static_cast<unsigned char*>(to.mutable_data_ptr())[0] ^= to.scalar_type() == at::kBool ? 1 : 0xFF;
    }
  }

  void copy_results(const Stack& stack) const {
    size_t index = 0;
    auto next = results.begin();
    for (const c10::IValue& value : stack)
      visit_tensors(value, [&](const at::Tensor& y) {
        if (next == results.end() || index++ != next->index) return;
        const Fixed& to = *next++;
        const bool same = y.defined() && y.sizes() == to.sizes && y.strides() == to.strides &&
            y.storage_offset() == to.offset && y.scalar_type() == to.type && storage_of(y)->nbytes() == to.bytes;
        TORCH_CHECK(same, op.schema().name(), ": a replay gave a result of shape ",
            y.defined() ? y.sizes() : at::IntArrayRef(), " and dtype ", y.scalar_type(), ", but the capture had ",
            at::IntArrayRef(to.sizes), " and ", to.type, ": the shape depends on values, and cannot be captured");
        if (!to.copied && to.bytes) std::memcpy(to.memory, storage_of(y)->data(), to.bytes);
      });
  }
};

// The device tensor for a result on the scratch buffer. New memory belongs to the graph.
at::Tensor to_device(CpuCall& call, CallArguments& arguments, const at::Tensor& y) {
  if (!y.defined()) return y;
  if (const CallArgument* same = arguments.find_scratch(y)) return same->real;
  StorageImpl* storage = storage_of(y);
  if (const CallArgument* viewed = arguments.find_scratch(storage)) {
    if (!viewed->device) return y;
    y.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(viewed->real.storage()));
  } else if (storage->device_type() == c10::kCPU) {
    replace_memory(storage, allocate_on(call.device(), storage->nbytes()));
    storage->set_allocator(device_allocator());
  }
  return call.result(y);
}

} // namespace

void capture_call(const CapturedCall& captured, Stack* stack) {
  const LendDeviceMemory none(-1); // except results, which say where they are
  const c10::OperatorHandle& op = captured.op;
  const char* name = op.operator_name().name.c_str();
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  const Traits& traits = traits_of(op);
  const bool dynamic = traits.has_dynamic_shape && traits.has_dynamic_shape(&(*stack)[first]);
  if (dynamic || op.hasTag(at::Tag::data_dependent_output))
    detail::refuse_capture(captured.stream, name,
        dynamic
            ? "the shape of its result depends on values in device memory. Use an operator of a fixed shape, such as "
              "torch.where() or a mask, or move it out of the capture."
            : "its result depends on values in device memory that the host would have to read. Move it out of the "
              "capture.");
  if (captured.target != DispatchKey::CPU)
    detail::refuse_capture(captured.stream, name,
        "graphs capture operators on strided tensors, and this is one for another layout. Move it out of the capture, "
        "or convert the tensor before.");
  for (const auto& [i, generator] : captured.generators)
    check_captured_generator(name, captured.stream, generator.unsafeGetGeneratorImpl());

  CallArguments arguments(captured, *stack);
  captured.call.run_on_host([] {}); // a lazy clone that the call reads first and writes later gets its own memory
  Stack results = try_on_scratch(captured, arguments, *stack);
  arguments.resize_results();
  std::vector<MemoryUse> uses;
  arguments.make_host(uses);
  Node node{op, captured.target, {}, {}, {}, {}, captured.copies, captured.stream};
  for (const auto& [i, generator] : captured.generators) node.generators.emplace_back(i, inner_generator(generator));
  if (captured.draws)
    node.lent = inner_generator(default_generator(static_cast<c10::DeviceIndex>(captured.call.device())));
  for (size_t i = 0; i < count; ++i)
    node.arguments.push_back(map_tensors(
        (*stack)[first + i], [&](const at::Tensor& x) { return x.defined() ? arguments.find(x)->host : x; }));
  node.check = check_of_values(traits, node.arguments, count);

  // New results, before they become the device's.
  bool plain = true; // each is a tensor with its own storage, and nothing else is returned
  size_t index = 0;
  std::vector<at::Tensor> fresh;
  for (const c10::IValue& value : results) {
    plain &= value.isTensor() && value.toTensor().defined();
    visit_tensors(value, [&](const at::Tensor& y) {
      const size_t at = index++;
      if (!y.defined()) return;
      if (y.layout() != at::kStrided || y.is_quantized() || y.is_nested() || !y.has_storage())
        detail::refuse_capture(captured.stream, name,
            "it gives a sparse, quantized or nested tensor, and graphs capture operators on strided tensors. Move it "
            "out "
            "of the capture.");
      if (const CallArgument* argument = arguments.find_scratch(storage_of(y))) {
        plain &= argument->scratch.is_same(y) && argument->written;
        return;
      }
      bool shared = false;
      for (const at::Tensor& other : fresh) shared |= storage_of(other) == storage_of(y);
      plain &= !shared;
      node.results.push_back({at, y.sizes().vec(), y.strides().vec(), y.storage_offset(), y.scalar_type(), nullptr,
          storage_of(y)->nbytes(), shared});
      fresh.push_back(y);
    });
  }
  for (c10::IValue& value : results)
    value = map_tensors(value, [&](const at::Tensor& y) { return to_device(captured.call, arguments, y); });
  std::vector<at::Tensor> outputs; // over the memory of the new results
  for (size_t i = 0; i < fresh.size(); ++i) {
    const StorageImpl* storage = storage_of(fresh[i]);
    Fixed& to = node.results[i];
    to.memory = const_cast<void*>(storage->data());
    at::Tensor output = at::detail::make_tensor<c10::TensorImpl>(
        storage_over(to.memory, to.bytes), DispatchKeySet(DispatchKey::CPU), c10::scalarTypeToTypeMeta(to.type));
    output.unsafeGetTensorImpl()->set_sizes_and_strides(to.sizes, to.strides, to.offset);
    CallArguments::add_use(uses, output, true);
    outputs.push_back(std::move(output));
  }

  std::optional<c10::OperatorHandle> out;
  plain &= !captured.draws && captured.generators.empty();
  if (plain && outputs.size() == results.size()) out = structured_out(op);
  if (out) {
    node.op = *out;
    node.results.clear();
    for (const at::Tensor& each : outputs) node.arguments.emplace_back(each);
  }
  std::vector<at::Tensor> written = outputs;
  if (outputs.empty())
    for (const CallArgument& each : arguments.all())
      if (each.written) written.push_back(each.host);
  std::optional<detail::Task> fixed;
  if (plain && !node.check) fixed = fixed_call(node.op, node.arguments, std::move(written));
  detail::capture(
      captured.stream, Site(name), fixed ? std::move(*fixed) : detail::Task(std::move(node)), std::move(uses));
  torch::jit::drop(*stack, count);
  std::move(results.begin(), results.end(), std::back_inserter(*stack));
}

namespace {

// Nodes run below autograd, with the number of threads of the launching thread: OpenMP keeps one number per thread.
const bool around = [] {
  set_around_replay([](void (*walk)(void*), void* argument) {
    // The caller's modes and transforms see the replay, not the calls in it.
    const c10::impl::ForceDispatchKeyGuard usual_keys(
        c10::default_included_set, c10::default_excluded_set | kAboveBackend);
    c10::InferenceMode normal(false);
    LendDeviceMemory none(-1);
    at::DisableRecordFunctionGuard unseen;
    walk(argument);
  });
  return true;
}();

} // namespace
} // namespace openreg
