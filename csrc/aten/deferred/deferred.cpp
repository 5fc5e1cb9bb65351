#include "aten/deferred/deferred.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>

#include "aten/deferred/arguments.h"
#include "aten/deferred/plan.h"
#include "aten/deferred/structured.h"
#include "aten/deferred/trial.h"
#include "aten/traits/host_scalars.h"
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

// ---- the task ----

// A new result of a captured call that is copied from what the kernel returns, and its memory in the graph.
struct CopiedResult {
  size_t index; // among the tensors that the kernel returns
  at::Tensor host;
  bool shared; // its memory is an earlier result's
};

// What a worker, or each replay, runs: the CPU kernel of an operator on raw memory.
struct OperatorTask {
  c10::OperatorHandle op;
  Stack arguments;
  Check* check = nullptr; // a check of values in tensors, or null
  std::vector<CopiedResult> results{};
  std::vector<std::pair<size_t, at::Generator>> generators{}; // the inner ones, by argument
  at::Generator lent{};                  // the device's, for an operator without such an argument
  std::optional<Stream> copies_on{}; // where a copy may be corrupted: see Note [Faults]

  void operator()() const {
    Stack stack = arguments;
    for (const auto& [i, generator] : generators) stack[i] = generator;
    {
      const LendGenerator lend(lent);
      if (check) check(op, stack);
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    }
    if (!results.empty()) copy_results(stack);
    if (copies_on && copy_corrupted(*copies_on, /*here=*/true)) {
      const at::Tensor& to = arguments[0].toTensor();
      if (to.numel()) flip_byte(to.mutable_data_ptr(), to.scalar_type());
    }
  }

  void copy_results(const Stack& stack) const {
    size_t index = 0;
    auto next = results.begin();
    for (const c10::IValue& value : stack)
      visit_tensors(value, [&](const at::Tensor& y) {
        if (next == results.end() || index++ != next->index) return;
        const auto& [_, to, shared] = *next++;
        const size_t bytes = to.storage().nbytes();
        const bool same = y.defined() && y.sizes() == to.sizes() && y.strides() == to.strides() &&
            y.storage_offset() == to.storage_offset() && y.scalar_type() == to.scalar_type() &&
            storage_of(y)->nbytes() == bytes;
        TORCH_CHECK(same, op.schema().name(), ": a replay gave a result of shape ",
            y.defined() ? y.sizes() : at::IntArrayRef(), " and dtype ", y.scalar_type(), ", but the capture had ",
            to.sizes(), " and ", to.scalar_type(), ": the shape depends on values, and cannot be captured");
        if (!shared && bytes) std::memcpy(storage_of(to)->mutable_data(), storage_of(y)->data(), bytes);
      });
  }
};

// Puts the results of a call in place of its arguments.
void give_results(Stack* stack, size_t arguments, Stack results) {
  torch::jit::drop(*stack, arguments);
  std::move(results.begin(), results.end(), std::back_inserter(*stack));
}

// ---- the queue ----

bool is_integral(const at::Tensor& x) {
  return c10::isIntegralType(x.scalar_type(), /*includeBool=*/true);
}

// The arguments of a call that may be queued.
struct QueuedCall {
  explicit QueuedCall(const void* op) : signature(op) {
    signature.add(at::globalContext().deterministicAlgorithms()); // some kernels then raise
  }

  Arguments arguments;
  Signature signature;
  int scalars = 0; // 0-dim CPU tensors among the arguments
  int device = -1;

  // Adds a tensor; returns false if it cannot take part in queued work.
  bool add(const at::Tensor& x, bool written) {
    constexpr size_t kMost = 64; // looking up more takes longer than running the operator
    if (!x.defined()) return signature.add(0), true;
    scalars += x.is_cpu();
    auto& all = arguments.all();
    if (Argument* known = arguments.find(x)) {
      known->written |= written;
      signature.add(static_cast<uint64_t>(known - all.data()) + 1);
      return true;
    }
    if (all.size() == kMost) return false;
    if (!(x.is_cpu() ? is_number(x) && !written : is_plain(x))) return false;
    arguments.add(x, x, written);
    if (x.is_cpu()) {
      Arguments::keep_value(all.back());
      if (!add_number(x)) return false;
    }
    signature.add_tensor(x, 2 * (all.size() - 1) + x.unsafeGetTensorImpl()->is_wrapped_number());
    return true;
  }

  // Adds any argument of a boxed call; `number`: of type Scalar or float.
  bool add(const c10::IValue& value, bool written, bool number) {
    if (holds_tensors(value)) {
      size_t count = 0;
      bool added = true;
      visit_tensors(value, [&](const at::Tensor& x) { ++count, added = added && add(x, written); });
      signature.add(count);
      return added;
    }
    if (!number || !(value.isInt() || value.isDouble())) return signature.add_value(value);
    signature.add(value.isInt());
    signature.add_number(value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble());
    return true;
  }

  // Returns false if a written tensor shares memory with another: the kernel's own overlap check must see both.
  bool apart() const {
    const auto& all = arguments.all();
    for (const Argument& a : all)
      for (const Argument& b : all)
        if (a.written && &a != &b && a.given.is_alias_of(b.given)) return false;
    return true;
  }

 private:
  static bool is_number(const at::Tensor& x) {
    return x.dim() == 0 && x.layout() == at::kStrided && x.has_storage() && !x.is_conj() && !x.is_neg() &&
        !x._is_zerotensor();
  }
  // Returns true for a dense tensor on the call's device that is only its memory.
  bool is_plain(const at::Tensor& x) {
    constexpr DispatchKeySet kRefused(
        {DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor, DispatchKey::Python});
    const DispatchKeySet keys = x.key_set();
    if (!keys.has(identity.dense) || keys.has_any(kRefused) || !x.has_storage()) return false;
    const auto& data = storage_of(x)->data_ptr();
    if (c10::impl::cow::is_cow_data_ptr(data) || (!data.get() && x.numel())) return false;
    const auto offset = static_cast<size_t>(x.storage_offset());
    if (at::detail::computeStorageNbytes(x.sizes(), x.strides(), x.itemsize(), offset) > x.storage().nbytes())
      return false; // the storage was shrunk
    if (device >= 0 && device != x.get_device()) return false;
    device = x.get_device();
    return true;
  }
  // Adds the value of a 0-dim CPU tensor.
  bool add_number(const at::Tensor& x) {
    const auto type = x.scalar_type();
    if (type == at::kDouble) signature.add_number(*x.const_data_ptr<double>());
    else if (type == at::kLong) signature.add_number(static_cast<double>(*x.const_data_ptr<int64_t>()));
    else if (x.is_floating_point() || is_integral(x)) signature.add_number(x.item().toDouble());
    else if (x.is_complex()) return signature.add_value(x.item().toComplexDouble());
    else return false;
    return true;
  }
};

// Returns true if the kernel may convert its arguments to another dtype. It would use the default dtype at the time it
// runs, and on the CPU the layout of a result then follows the layout of the converted arguments.
bool may_convert(const QueuedCall& call, const c10::IValue* first, size_t count, const Stack& results) {
  bool integral = false, other = false;
  std::optional<at::ScalarType> type;
  for (const Argument& each : call.arguments.all()) {
    const at::Tensor& x = each.given;
    (is_integral(x) ? integral : other) = true;
    if (x.dim() == 0) continue;
    if (type && *type != x.scalar_type()) return true;
    type = x.scalar_type();
  }
  other |=
      std::any_of(first, first + count, [](const auto& each) { return each.isDouble() || each.isComplexDouble(); });
  for (const c10::IValue& y : results) other |= !is_integral(y.toTensor());
  return (type ? c10::isIntegralType(*type, /*includeBool=*/true) : integral) && other;
}

// Returns true if a fill writes a real number to each element once.
bool fits(const QueuedCall& call, const c10::IValue* first, size_t count) {
  const auto& all = call.arguments.all();
  const at::Tensor& self = all.front().given;
  return self.is_floating_point() && at::has_internal_overlap(self) == at::MemOverlap::No &&
      std::none_of(first, first + count, [](const auto& value) { return value.isComplexDouble(); }) &&
      std::all_of(all.begin(), all.end(),
          [&](const Argument& each) { return each.written || (each.given.dim() == 0 && !each.given.is_complex()); });
}

// Runs `op` on zeros and returns true if it accepts them; `results` come from the Meta kernel, for an out= form.
bool try_out(const c10::OperatorHandle& op, const Traits& traits, Arguments& arguments, const c10::IValue* first,
    size_t count, const Stack& results) {
  constexpr size_t kTrialBytes = 1 << 20; // a trial of more takes too long
  const LendDeviceMemory none(-1);
  size_t bytes = arguments.bytes();
  for (const c10::IValue& value : results) bytes += value.toTensor().nbytes();
  const bool small = traits.fills || bytes > kTrialBytes;
  if (small) arguments.make_small_scratch();
  else arguments.make_scratch(Values::kZeros);
  Stack stack = arguments.view(first, count, &Argument::scratch);
  for (const c10::IValue& value : results) {
    const at::Tensor& y = value.toTensor();
    stack.emplace_back(small ? zeros_like_strided(y, {0}, {1}) : zeros_like_strided(y, y.sizes(), y.strides()));
  }
  return accepts([&] {
    if (Check* check = check_of_values(traits_of(op), stack, op.schema().arguments().size())) check(op, stack);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  });
}

// Queues a task on the device's current stream, with the caller's number of threads: OpenMP keeps one per thread.
void queue_task(int device, const char* name, Site site, OperatorTask task) {
  auto work = [name, task = std::move(task), threads = at::get_num_threads()] {
    if (at::get_num_threads() != threads) omp_set_num_threads(threads);
    c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
    try {
      task();
    } catch (const std::exception& error) { // the launch site is here; only this says which operator
      const std::string_view what = error.what();
      throw std::runtime_error(std::string(what.substr(0, what.find("\nException raised from"))) + "\nIn " + name);
    }
  };
  launch(current_stream(device), std::move(work), site);
}

} // namespace

bool queue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const Plan& plan = plan_of(op);
  if (!plan.possible) return false;
  const Traits& traits = *plan.traits;
  const size_t count = plan.written.size();
  const c10::IValue* first = stack->data() + stack->size() - count;
  QueuedCall call(&plan);
  Arguments& arguments = call.arguments;
  for (size_t i = 0; i < count; ++i)
    if (!call.add(first[i], plan.written[i], plan.number[i])) return false;
  if (call.device < 0 || !call.apart()) return false;
  if (call.scalars) // operators that may raise are called immediately
    if (const auto accepted = cpu_scalars(op.operator_name().name);
        accepted != CpuScalars::kAny && (accepted != CpuScalars::kOne || call.scalars > 1))
      return false;

  if (traits.check_shapes) traits.check_shapes(op, *stack);
  c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  Stack meta;
  KeptWarnings warnings; // if the call is not queued, its kernel warns
  if (traits.fills) {
    if (op.operator_name().name != "aten::zero_" && !fits(call, first, count)) return false;
  } else {
    arguments.make_meta();
    meta = arguments.view(first, count, &Argument::meta);
    try {
      const c10::WarningUtils::WarningHandlerGuard keep(&warnings);
      if (plan.meta) plan.meta->callBoxed(op, DispatchKeySet(DispatchKey::Meta), &meta);
      else op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &meta);
    } catch (const c10::Error& error) {
      if (error.msg().find("Meta") != std::string::npos) return false; // a message about the replacements
      throw;
    }
    if (!traits.takes_indices && may_convert(call, first, count, meta)) return false;
    if (!plan.out)
      for (const Argument& each : arguments.all()) // an out= tensor that must be resized waits
        if (each.written && each.meta.sizes() != each.given.sizes()) return false;
  }
  const c10::OperatorHandle& queued = plan.out ? *plan.out : op;
  const Stack made = plan.out ? std::move(meta) : Stack();
  if (!is_accepted(call.signature, [&] { return try_out(queued, traits, arguments, first, count, made); }))
    return false;

  arguments.make_host();
  OperatorTask task{queued, arguments.view(first, count, &Argument::host)};
  Stack results;
  for (const c10::IValue& value : made) {
    const at::Tensor& y = value.toTensor();
    const c10::Device here(identity.type, static_cast<c10::DeviceIndex>(call.device));
    results.emplace_back(at::empty_strided(y.sizes(), y.strides(), y.options().device(here)));
    const at::Tensor& result = results.back().toTensor();
    task.arguments.emplace_back(host_tensor(result, storage_of(result)));
  }
  for (size_t i = 0; i < count && !plan.out; ++i)
    if (plan.written[i]) results.push_back(first[i]);
  task.check = check_of_values(traits, task.arguments, queued.schema().arguments().size());
  const char* name = op.operator_name().name.c_str();
  queue_task(call.device, name, Site(name), std::move(task));
  warnings.warn_again();
  give_results(stack, count, std::move(results));
  return true;
}

bool queue_copy(const at::Tensor& from, const at::Tensor& to, Site site) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  QueuedCall call(&op);
  if (!on_device(from) || !on_device(to) || !call.add(from, false) || !call.add(to, true) || !call.apart() ||
      from.is_same(to) || !at::is_expandable_to(from.sizes(), to.sizes()) ||
      at::has_internal_overlap(to) == at::MemOverlap::Yes || (from.is_complex() && !to.is_complex()))
    return false;
  // The shapes are known to match, so only the dtypes can be rejected.
  Signature dtypes(&op);
  dtypes.add(static_cast<uint64_t>(from.scalar_type()) << 8 | static_cast<uint64_t>(to.scalar_type()));
  const auto trial = [&] {
    const LendDeviceMemory none(-1);
    return accepts([&] {
      for (const auto& strides : {std::array<int64_t, 2>{2, 1}, std::array<int64_t, 2>{1, 2}}) {
        at::Tensor written = zeros_like_strided(to, {2, 2}, {2, 1});
        const at::Tensor read = zeros_like_strided(from, {2, 2}, strides);
        at::_ops::copy_::redispatch(DispatchKeySet(DispatchKey::CPU), written, read, /*non_blocking=*/false);
      }
    });
  };
  if (!is_accepted(dtypes, trial)) return false;
  call.arguments.make_host();
  const auto host = [&](const at::Tensor& x) { return call.arguments.find(x)->host; };
  queue_task(call.device, "aten::copy_", site, {op, {host(to), host(from), false}});
  return true;
}

// ---- captures ----

namespace {

bool is_strided(const at::Tensor& x) {
  return x.layout() == at::kStrided && !x.is_quantized() && !x.is_nested() && x.has_storage();
}

Arguments captured_arguments(const CapturedCall& captured, const c10::IValue* first) {
  Arguments arguments;
  const char* name = captured.op.operator_name().name.c_str();
  const auto add = [&](const at::Tensor& x, bool written) {
    if (!x.defined()) return;
    if (arguments.find(x)) return arguments.add(x, x, written);
    if (!is_strided(x))
      detail::refuse_capture(captured.stream, name,
          "it takes a sparse, quantized or nested tensor, and graphs capture operators on strided tensors. Move it out "
          "of the capture, or convert the tensor before.");
    const at::Tensor real = captured.call.passed(x) ? captured.call.result(x) : x;
    arguments.add(x, real, written);
    if (on_device(real) || captured.copies) return;
    if (x.dim() && !traits_of(captured.op).captures_host_tensors)
      detail::refuse_capture(captured.stream, name,
          "it takes a tensor in pageable host memory, which would be copied to the device. Move the tensor there "
          "before the capture.");
    Arguments::keep_value(arguments.all().back());
  };
  for (const c10::Argument& argument : captured.op.schema().arguments()) {
    visit_tensors(*first++, [&](const at::Tensor& x) { add(x, is_written(argument)); });
  }
  return arguments;
}

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

// Runs the kernel on scratch memory; returns its results.
Stack run_on_scratch(
    const CapturedCall& captured, Arguments& arguments, const c10::IValue* first, size_t count, Values values) {
  const LendDeviceMemory none(-1);
  at::DisableRecordFunctionGuard unseen;
  std::optional<SavedHostGenerator> saved;
  if (captured.draws) saved.emplace();
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  arguments.make_scratch(values);
  Stack scratch = arguments.view(first, count, &Argument::scratch);
  for (const auto& [i, _] : captured.generators) scratch[i] = at::detail::createCPUGenerator();
  fit_sizes(captured.op, scratch);
  const Traits& traits = traits_of(captured.op);
  for (Check* check : {traits.check_shapes, check_of_values(traits, scratch, count)})
    if (check) check(captured.op, scratch);
  captured.op.redispatchBoxed(DispatchKeySet(captured.target), &scratch);
  return scratch;
}

// Tries values until the kernel accepts them; if it accepts none, throws its first error.
Stack run_on_scratch(const CapturedCall& captured, Arguments& arguments, const c10::IValue* first, size_t count) {
  KeptWarnings warnings;
  std::optional<Stack> results;
  std::exception_ptr error;
  for (const Values values : {Values::kZeros, Values::kOnes, Values::kIdentity}) {
    warnings.all.clear();
    const c10::WarningUtils::WarningHandlerGuard keep(&warnings);
    try {
      results = run_on_scratch(captured, arguments, first, count, values);
      break;
    } catch (const std::exception&) {
      if (!error) error = std::current_exception();
    }
  }
  if (!results) std::rethrow_exception(error);
  warnings.warn_again();
  return std::move(*results);
}

// Gives out= tensors the shape and the lazy conjugation that they ended up with in scratch memory.
void resize_results(const Arguments& arguments) {
  for (const Argument& each : arguments.all()) {
    const at::Tensor &now = each.scratch, &real = each.real;
    if (each.written && now.is_conj() != real.is_conj()) real._set_conj(now.is_conj());
    if (!each.written || (now.sizes() == real.sizes() && now.strides() == real.strides())) continue;
    real.resize_(now.sizes());
    real.unsafeGetTensorImpl()->set_sizes_and_strides(now.sizes(), now.strides(), now.storage_offset());
  }
}

// The device tensor for a result in scratch memory. New memory belongs to the graph.
at::Tensor to_device(CpuCall& call, const Arguments& arguments, const at::Tensor& y) {
  if (!y.defined()) return y;
  if (const Argument* same = arguments.find_scratch(y)) return same->real;
  StorageImpl* storage = storage_of(y);
  if (const Argument* viewed = arguments.find_scratch(storage)) {
    if (!on_device(viewed->real)) return y;
    y.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(viewed->real.storage()));
  } else if (storage->device_type() == c10::kCPU) {
    replace_memory(storage, allocate_on(call.device(), storage->nbytes()));
    storage->set_allocator(device_allocator());
  }
  return call.result(y);
}

} // namespace

void capture_operator(const CapturedCall& captured, Stack* stack) {
  const LendDeviceMemory none(-1); // except results, which say where they are
  const c10::OperatorHandle& op = captured.op;
  const char* name = op.operator_name().name.c_str();
  const size_t count = op.schema().arguments().size();
  const c10::IValue* first = stack->data() + stack->size() - count;
  const Traits& traits = traits_of(op);
  const bool dynamic = traits.has_dynamic_shape && traits.has_dynamic_shape(first);
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

  Arguments arguments = captured_arguments(captured, first);
  captured.call.run_on_host([] {}); // a lazy clone that the call reads first and writes later gets its own memory
  Stack results = run_on_scratch(captured, arguments, first, count);
  resize_results(arguments);
  arguments.make_host();
  std::vector<MemoryUse> uses = arguments.uses();

  // New results, before they become the device's.
  bool plain = !captured.draws && captured.generators.empty(); // and each result is a tensor with its own storage
  size_t index = 0;
  std::vector<CopiedResult> fresh;
  for (const c10::IValue& value : results) {
    plain &= value.isTensor() && value.toTensor().defined();
    visit_tensors(value, [&](const at::Tensor& y) {
      const size_t place = index++;
      if (!y.defined()) return;
      if (!is_strided(y))
        detail::refuse_capture(captured.stream, name,
            "it gives a sparse, quantized or nested tensor, and graphs capture operators on strided tensors. Move it "
            "out of the capture.");
      if (const Argument* argument = arguments.find_scratch(storage_of(y))) {
        plain &= argument->scratch.is_same(y) && argument->written;
        return;
      }
      const bool shared =
          std::ranges::any_of(fresh, [&](const auto& each) { return storage_of(each.host) == storage_of(y); });
      plain &= !shared;
      fresh.push_back({place, y, shared});
    });
  }
  for (c10::IValue& value : results)
    value = map_tensors(value, [&](const at::Tensor& y) { return to_device(captured.call, arguments, y); });
  for (CopiedResult& each : fresh) {
    each.host = host_tensor(each.host, storage_of(each.host));
    if (each.host.numel()) uses.push_back(use_of(each.host, true));
  }

  OperatorTask task{op, arguments.view(first, count, &Argument::host)};
  task.check = check_of_values(traits, task.arguments, count);
  for (const auto& [i, generator] : captured.generators) task.generators.emplace_back(i, inner_generator(generator));
  if (captured.draws) task.lent = inner_generator(default_generator(captured.call.device()));
  if (captured.copies) task.copies_on = captured.stream;
  const Plan& plan = plan_of(op);
  std::vector<at::Tensor> outputs;
  for (const CopiedResult& each : fresh) outputs.push_back(each.host);
  if (plain && plan.possible && plan.out && fresh.size() == results.size()) {
    task.op = *plan.out;
    for (const at::Tensor& each : outputs) task.arguments.emplace_back(each);
  } else {
    task.results = std::move(fresh);
  }
  if (outputs.empty())
    for (const Argument& each : arguments.all())
      if (each.written) outputs.push_back(each.host);
  std::optional<detail::Task> prepared;
  if (plain && !task.check) prepared = structured_task(task.op, task.arguments, std::move(outputs));
  detail::capture(
      captured.stream, Site(name), prepared ? std::move(*prepared) : detail::Task(std::move(task)), std::move(uses));
  give_results(stack, count, std::move(results));
}

void capture_unary(Stream stream, const char* name, at::TensorIteratorBase& iter,
    std::function<void(at::TensorIteratorBase&)> kernel) {
  const at::Tensor &output = iter.tensor(0), &input = iter.tensor(1);
  output.mutable_data_ptr(); // copy-on-write memory becomes the tensor's own
  at::Tensor to = host_tensor(output, storage_of(output)), from = host_tensor(input, storage_of(input));
  std::vector<MemoryUse> uses{use_of(to, true), use_of(from, false)};
  detail::capture(stream, Site(name),
      detail::Task(
          [iter = at::TensorIterator::unary_op(to, from), kernel = std::move(kernel)]() mutable { kernel(iter); }),
      std::move(uses));
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
