// Calls of compiled graphs that are replays: see Note [Compiled graphs in device graphs] in
// openreg_ops/inductor/graphs.py.
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "backend/allocator.h"
#include "backend/graph.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/memory/contents.h"
#include "runtime/stream/event.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

using Dims = c10::SmallVector<int64_t, 5>;

// Returns where a tensor's elements are, or would be if it is empty.
const char* address_of(const at::Tensor& x) {
  return static_cast<const char*>(x.storage().data()) + x.storage_offset() * static_cast<int64_t>(x.itemsize());
}

// Returns the number of bytes from the first to the last element.
size_t span_of(const at::Tensor& x) {
  if (!x.numel()) return 0;
  int64_t elements = 1;
  for (int64_t d = 0; d < x.dim(); ++d) elements += (x.size(d) - 1) * x.stride(d);
  return static_cast<size_t>(elements) * x.itemsize();
}

// Returns a view with one element of each expanded dimension.
at::Tensor without_expanded(at::Tensor x) {
  for (int64_t d = 0; d < x.dim(); ++d)
    if (x.stride(d) == 0 && x.size(d) > 1) x = x.narrow(d, 0, 1);
  return x;
}

// An input as the capture had it.
struct Input {
  bool tensor = false, fixed = false; // fixed: it must keep its address, and is not copied
  py::object value;                   // the number, if it is not a tensor
  Dims sizes, strides;
  at::ScalarType type{};
  c10::Device device{c10::kCPU};
  const char* address = nullptr; // where the tensor, or the buffer that it is copied into, begins
  at::Tensor buffer;
  size_t bytes = 0; // to copy at once; 0: element by element, as most of what lies between the elements is not its own

  bool fits(PyObject* given) const {
    if (!tensor)
      return Py_TYPE(given) == Py_TYPE(value.ptr()) && PyObject_RichCompareBool(given, value.ptr(), Py_EQ) == 1;
    if (!THPVariable_Check(given)) return false;
    const at::Tensor& x = THPVariable_Unpack(given);
    return x.scalar_type() == type && x.sizes() == sizes && x.strides() == strides && x.device() == device &&
        !x.is_conj() && !x.is_neg();
  }
  bool moved(PyObject* given) const { return fixed && address_of(THPVariable_Unpack(given)) != address; }
};

// A result: a value, an input or a view of one, or in memory of the graph.
struct Result {
  enum { kValue, kInput, kViewOfInput, kMemory, kSame } kind = kValue;
  py::object value;
  size_t index = 0; // which input, memory or other result it is
  Dims sizes, strides;
  int64_t offset = 0; // in bytes from the input's address, or in elements from where the memory begins
  at::ScalarType type{};
  bool conj = false, neg = false; // lazy conjugation and negation

  at::Tensor marked(at::Tensor x) const {
    if (conj) x._set_conj(true);
    if (neg) x._set_neg(true);
    return x;
  }
};

// Memory of the graph with results.
struct ResultMemory {
  c10::Storage storage;
  bool saved; // only for the backward pass
  c10::weak_intrusive_ptr<c10::StorageImpl> lent; // the storage that results of the last call got
};

void release_owner(void* owner) {
  delete static_cast<c10::Storage*>(owner);
}

// A storage over the memory of `owner`, which it keeps.
c10::Storage lend(const c10::Storage& owner) {
  auto* context = new c10::Storage(owner);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), owner.nbytes(),
      c10::DataPtr(const_cast<void*>(owner.data()), context, &release_owner, owner.device()), device_allocator(),
      /*resizable=*/true));
}

bool is_lent(const at::Tensor& x) {
  return x.has_storage() && x.storage().data_ptr().get_deleter() == &release_owner;
}

at::Tensor tensor_on(const c10::Storage& storage, const Result& like) {
  auto x = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(identity.dense), c10::scalarTypeToTypeMeta(like.type));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes, like.strides, like.offset);
  return like.marked(std::move(x));
}

const int kMisfits = 16; // calls that find saved results still alive, before all results are copied

// A captured call.
class CompiledGraph {
 public:
  // `buffers`: the inputs of the capture. `fixed`: those that keep their addresses. `saved`: the first result that only
  // the backward pass gets. `backward`: results that are inputs are copied, because the graph may have written them to
  // the memory of an input that it needed no longer.
  CompiledGraph(const DeviceGraph& graph, const py::list& buffers, const std::set<size_t>& fixed,
      const py::list& results, size_t saved, bool backward)
      : graph_(graph.graph()) {
    TORCH_CHECK(graph_, "CompiledGraph: no graph has been captured; capture one first");
    std::map<const c10::StorageImpl*, size_t> of_inputs, memories;
    for (size_t i = 0; i < buffers.size(); ++i) {
      const py::object each = buffers[i];
      Input& input = inputs_.emplace_back();
      if (!THPVariable_Check(each.ptr())) {
        input.value = each;
        continue;
      }
      const at::Tensor& x = THPVariable_Unpack(each.ptr());
      TORCH_CHECK(on_device(x) && x.layout() == at::kStrided && x.has_storage(),
          "a compiled graph of one device takes a tensor in layout ", x.layout(), " on ", x.device());
      input.tensor = true;
      input.fixed = fixed.count(i);
      input.sizes = x.sizes();
      input.strides = x.strides();
      input.type = x.scalar_type();
      input.device = x.device();
      input.address = address_of(x);
      if (!input.fixed) {
        input.buffer = x;
        graph_->kept.push_back(std::make_shared<c10::Storage>(x.storage())); // until the last queued replay is done
        if (span_of(x) <= 2 * without_expanded(x).nbytes()) input.bytes = span_of(x);
      }
      if (!backward) of_inputs.emplace(x.storage().unsafeGetStorageImpl(), i);
    }
    std::vector<PyObject*> seen;
    for (size_t i = 0; i < results.size(); ++i) {
      const py::object each = results[i];
      Result& result = results_.emplace_back();
      result.value = each;
      const auto first = static_cast<size_t>(std::find(seen.begin(), seen.end(), each.ptr()) - seen.begin());
      seen.push_back(each.ptr());
      if (!THPVariable_Check(each.ptr()) || !on_device(THPVariable_Unpack(each.ptr()))) continue;
      if (first < i) {
        result.kind = Result::kSame;
        result.index = first;
        continue;
      }
      const at::Tensor& x = THPVariable_Unpack(each.ptr());
      result.sizes = x.sizes();
      result.strides = x.strides();
      result.type = x.scalar_type();
      result.conj = x.is_conj();
      result.neg = x.is_neg();
      const auto* storage = x.storage().unsafeGetStorageImpl();
      if (const auto input = of_inputs.find(storage); input != of_inputs.end()) {
        result.index = input->second;
        result.kind = buffers[result.index].ptr() == each.ptr() ? Result::kInput : Result::kViewOfInput;
        result.offset = address_of(x) - inputs_[result.index].address;
      } else {
        const auto memory = memories.emplace(storage, memories_.size()).first;
        if (memory->second == memories_.size()) memories_.push_back({x.storage(), true, nowhere()});
        memories_[memory->second].saved &= i >= saved && in_pool(storage);
        result.kind = Result::kMemory;
        result.index = memory->second;
        result.offset = x.storage_offset();
      }
      result.value = {};
    }
  }

  bool fits(PyObject* inputs) const {
    if (static_cast<size_t>(PyList_GET_SIZE(inputs)) != inputs_.size()) return false;
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (!inputs_[i].fits(PyList_GET_ITEM(inputs, static_cast<Py_ssize_t>(i)))) return false;
    return true;
  }
  // Returns the inputs that have another address than in the capture, and must keep theirs.
  std::vector<size_t> moved(PyObject* inputs) const {
    std::vector<size_t> found;
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].moved(PyList_GET_ITEM(inputs, static_cast<Py_ssize_t>(i)))) found.push_back(i);
    return found;
  }

  // Calls with inputs that fit. Returns the results, or None if the graph cannot be replayed now.
  py::object call(const py::list& inputs) {
    std::vector<at::Tensor> given(inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].tensor && !inputs_[i].fixed) given[i] = THPVariable_Unpack(inputs[i].ptr());
    std::vector<at::Tensor> made(results_.size());
    {
      const py::gil_scoped_release free;
      if (!replay(given, made)) return py::none();
    }
    py::list results(results_.size());
    for (size_t i = 0; i < results_.size(); ++i) results[i] = result(results_[i], inputs, made[i], results);
    if (PyList_SetSlice(inputs.ptr(), 0, PyList_GET_SIZE(inputs.ptr()), nullptr)) throw py::error_already_set();
    return results;
  }

 private:
  static c10::weak_intrusive_ptr<c10::StorageImpl> nowhere() {
    return c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>());
  }

  // Returns true if the graph allocated it. A replay does not write to other memory, such as a constant's.
  bool in_pool(const c10::StorageImpl* storage) const {
    for (const auto& segment : memory_snapshot(graph_->device)) {
      const auto* begin = static_cast<const char*>(segment.address);
      if (segment.pool == graph_->pool && storage->data() >= begin && storage->data() < begin + segment.size)
        return true;
    }
    return false;
  }

  bool replay(const std::vector<at::Tensor>& given, std::vector<at::Tensor>& made) {
    const Stream stream = current_stream(graph_->device);
    const std::lock_guard lock(mutex_);
    for (const auto& each : memories_) {
      if (each.lent.expired()) continue;
      if (++misfits_ > kMisfits) lends_ = false;
      return false;
    }
    if (used_ && *used_ != stream &&
        !stream_idle(*used_)) { // also behind the backward pass, which reads what was saved
      if (detail::captures(*used_)) return false;
      Event event(stream.device, /*timed=*/false);
      event.record(*used_);
      event.block(stream);
    }
    used_ = stream;

    std::vector<MemoryCopy> before, after;
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i].defined()) continue;
      expect_memory("torch.compile", given[i]);
      const Input& to = inputs_[i];
      if (to.bytes) before.push_back({const_cast<char*>(to.address), address_of(given[i]), to.bytes});
      else if (given[i].numel()) without_expanded(to.buffer).copy_(without_expanded(given[i]));
    }
    const bool lends = lends_ && !at::SavedTensorDefaultHooks::get_hooks();
    std::vector<c10::Storage> storages;
    for (auto& each : memories_) {
      if (each.saved && lends) {
        storages.push_back(lend(each.storage));
        each.lent = c10::weak_intrusive_ptr<c10::StorageImpl>(storages.back().getWeakStorageImpl());
        continue;
      }
      const size_t bytes = each.storage.nbytes();
      storages.push_back(c10::Storage(c10::Storage::use_byte_size_t(), bytes,
          allocate_on(each.storage.device().index(), bytes), device_allocator(), /*resizable=*/true));
      if (bytes) after.push_back({storages.back().mutable_data(), each.storage.data(), bytes});
    }
    openreg::replay(graph_, stream, std::move(before), std::move(after));
    for (size_t i = 0; i < results_.size(); ++i)
      if (results_[i].kind == Result::kMemory) made[i] = tensor_on(storages[results_[i].index], results_[i]);
    return true;
  }

  static py::object result(const Result& of, const py::list& inputs, const at::Tensor& made, const py::list& results) {
    switch (of.kind) {
      case Result::kValue:
        return of.value;
      case Result::kInput:
        return inputs[of.index];
      case Result::kSame:
        return results[of.index];
      case Result::kMemory:
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(made));
      case Result::kViewOfInput:
        break;
    }
    const at::Tensor& given = THPVariable_Unpack(py::object(inputs[of.index]).ptr());
    const int64_t bytes = given.storage_offset() * static_cast<int64_t>(given.itemsize()) + of.offset;
    const int64_t offset = bytes / static_cast<int64_t>(c10::elementSize(of.type));
    if (given.scalar_type() == of.type)
      return py::reinterpret_steal<py::object>(
          THPVariable_Wrap(of.marked(at::as_strided(given, of.sizes, of.strides, offset))));
    auto view = at::empty({0}, given.options().dtype(of.type));
    return py::reinterpret_steal<py::object>(
        THPVariable_Wrap(of.marked(view.set_(given.storage(), offset, of.sizes, of.strides))));
  }

  const std::shared_ptr<Graph> graph_;
  std::vector<Input> inputs_;
  std::vector<Result> results_;
  std::mutex mutex_; // one call at a time
  std::vector<ResultMemory> memories_;
  std::optional<Stream> used_; // the stream of the last call
  int misfits_ = 0;
  bool lends_ = true;
};

// The captured calls of one compiled graph, the one used last in front.
class CompiledGraphs {
 public:
  explicit CompiledGraphs(int device) : device_(device) {}
  // Returns a list of results; False to run the compiled code for this call; None if there is no graph for these
  // inputs.
  py::object call(const py::list& inputs) {
    if (c10::impl::TorchDispatchModeTLS::any_modes_set() || capturing(device_)) return py::bool_(false);
    for (size_t i = 0; i < graphs_.size(); ++i) {
      if (!graphs_[i]->fits(inputs.ptr()) || !graphs_[i]->moved(inputs.ptr()).empty()) continue;
      const auto graph = graphs_[i]; // another thread may change the list in the meantime
      if (i)
        std::rotate(graphs_.begin(), graphs_.begin() + static_cast<std::ptrdiff_t>(i),
            graphs_.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      auto results = graph->call(inputs);
      return results.is_none() ? py::bool_(false) : results;
    }
    return py::none();
  }
  void add(std::shared_ptr<CompiledGraph> graph) { graphs_.insert(graphs_.begin(), std::move(graph)); }
  // Drops the graph for inputs of these shapes if some have moved. Returns which have, or None without such a graph.
  std::optional<std::vector<size_t>> drop(const py::list& inputs) {
    for (size_t i = 0; i < graphs_.size(); ++i) {
      if (!graphs_[i]->fits(inputs.ptr())) continue;
      auto moved = graphs_[i]->moved(inputs.ptr());
      if (!moved.empty()) graphs_.erase(graphs_.begin() + static_cast<std::ptrdiff_t>(i));
      return moved;
    }
    return std::nullopt;
  }
  void clear() { graphs_.clear(); }

 private:
  const int device_;
  std::vector<std::shared_ptr<CompiledGraph>> graphs_;
};

} // namespace

void bind_compiled_graphs(py::module_& m) {
  py::class_<CompiledGraph, std::shared_ptr<CompiledGraph>>(m, "CompiledGraph")
      .def(py::init<const DeviceGraph&, const py::list&, const std::set<size_t>&, const py::list&, size_t, bool>());
  py::class_<CompiledGraphs>(m, "CompiledGraphs")
      .def(py::init<int>())
      .def("__call__", &CompiledGraphs::call)
      .def("add", &CompiledGraphs::add)
      .def("drop", &CompiledGraphs::drop)
      .def("clear", &CompiledGraphs::clear);
  m.def("is_lent",
      [](const py::object& x) { return THPVariable_Check(x.ptr()) && is_lent(THPVariable_Unpack(x.ptr())); });
}

} // namespace openreg
