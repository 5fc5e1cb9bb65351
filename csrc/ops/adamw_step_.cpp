// adamw_step_: one step of AdamW on many tensors at once, in place; forward only.
// With g = -grad if maximize else grad, and t the step from 1:
//   m = m + (g - m) (1 - beta1),  v = beta2 v + (1 - beta2) g^2,  and v = max of all v so far, for amsgrad
//   p = p (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
// Loshchilov & Hutter 2019, arXiv:1711.05101; in the order of torch.optim.AdamW, with which it agrees to rounding.
// The threads share the elements of all tensors laid end to end, so that neither a small tensor nor a large one
// keeps a thread waiting.
#include "kernels/loops.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/overlap.h"

#include <ATen/ops/empty_strided.h>

#include <cmath>
#include <vector>

namespace openreg::ops {
namespace {
using namespace kernels;

struct Options {
  double beta1, beta2, weight_decay, eps;
  bool amsgrad, maximize;
};

// A step's factors, the same for all elements of a tensor. Divisors are inverted: a division takes as long as
// everything else that an element needs.
template <class A>
struct Factors {
  A decay, scale, beta1, beta2, step_size, root, eps;
  Factors(const Options& o, double lr, double step, double grad_scale)
      : decay(static_cast<A>(1 - lr * o.weight_decay)), scale(static_cast<A>((o.maximize ? -1 : 1) / grad_scale)),
        beta1(static_cast<A>(1 - o.beta1)), beta2(static_cast<A>(o.beta2)),
        step_size(static_cast<A>(lr / (1 - std::pow(o.beta1, step)))),
        root(static_cast<A>(1 / std::sqrt(1 - std::pow(o.beta2, step)))), eps(static_cast<A>(o.eps)) {}
};

// One parameter: the memory of its tensors, which all have the same layout.
struct Update {
  void (*run)(const Update&, const Options&, double lr, double grad_scale, int64_t begin, int64_t end);
  int64_t first; // of its elements, with all tensors laid end to end
  int64_t n;
  void* param;
  const void* grad;
  void *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  float* step;
};

// A chunk of elements of T or, if the state S is wider, of T or S. All chunks have the same order: that of Note [Order
// in a chunk], or that of memory where the state is wider.
template <class T, class S, class P>
C10_ALWAYS_INLINE Chunk<T> load(const P* p) {
  if constexpr (std::is_same_v<T, S>) return read_chunk(p);
  else return {read(p), read(p + kLanes<T>)};
}
template <class T, class S, class P>
C10_ALWAYS_INLINE void store(const Chunk<T>& values, P* p) {
  if constexpr (std::is_same_v<T, S>) pack<T>(values).store(p);
  else if constexpr (std::is_same_v<T, P>) write(values.data(), p);
  else
    for (size_t k = 0; k < values.size(); ++k) values[k].store(p + k * kLanes<T>);
}

template <class T, class S, bool amsgrad>
C10_ALWAYS_INLINE void update_chunk(
    const Factors<Acc<T>>& f, T* param, const T* grad, S* exp_avg, S* exp_avg_sq, S* max_exp_avg_sq) {
  using V = Vec<T>;
  Chunk<T> p = load<T, S>(param), m = load<T, S>(exp_avg), v = load<T, S>(exp_avg_sq), top = v;
  const Chunk<T> grads = load<T, S>(grad);
  if constexpr (amsgrad) top = load<T, S>(max_exp_avg_sq);
  for (size_t k = 0; k < p.size(); ++k) {
    const V g = grads[k] * V(f.scale), one_minus_beta2(1 - f.beta2);
    m[k] = m[k] + (g - m[k]) * V(f.beta1);
    v[k] = v[k] * V(f.beta2) + one_minus_beta2 * g * g;
    if constexpr (amsgrad) top[k] = at::vec::maximum(top[k], v[k]);
    const V denominator = (amsgrad ? top[k] : v[k]).sqrt() * V(f.root) + V(f.eps);
    p[k] = p[k] * V(f.decay) - V(f.step_size) * m[k] / denominator;
  }
  store<T, S>(p, param);
  store<T, S>(m, exp_avg);
  store<T, S>(v, exp_avg_sq);
  if constexpr (amsgrad) store<T, S>(top, max_exp_avg_sq);
}

// Elements [begin, end), anywhere in the tensor: the last ones go through a chunk on the stack, so that an element's
// result does not depend on where a thread's share ends.
template <class T, class S, bool amsgrad>
void update_loop(const Factors<Acc<T>>& f, const Update& u, int64_t begin, int64_t end) {
  constexpr int64_t chunk = kChunk<T>;
  T* param = static_cast<T*>(u.param);
  const T* grad = static_cast<const T*>(u.grad);
  S *m = static_cast<S*>(u.exp_avg), *v = static_cast<S*>(u.exp_avg_sq), *top = static_cast<S*>(u.max_exp_avg_sq);
  int64_t i = begin;
  for (; i + chunk <= end; i += chunk)
    update_chunk<T, S, amsgrad>(f, param + i, grad + i, m + i, v + i, amsgrad ? top + i : nullptr);
  if (i < end)
    on_copies<chunk>(
        end - i, [&](auto*... p) { update_chunk<T, S, amsgrad>(f, p...); }, param + i, grad + i, m + i, v + i,
        amsgrad ? top + i : nullptr);
}

template <class T, class S>
void update(const Update& u, const Options& o, double lr, double grad_scale, int64_t begin, int64_t end) {
  const Factors<Acc<T>> f(o, lr, static_cast<double>(*u.step) + 1, grad_scale);
  if (o.amsgrad) update_loop<T, S, true>(f, u, begin, end);
  else update_loop<T, S, false>(f, u, begin, end);
}

void update_all(const std::vector<Update>& updates, const Options& o, double lr, double grad_scale) {
  const int64_t total = updates.empty() ? 0 : updates.back().first + updates.back().n;
  at::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
    auto u = std::upper_bound(updates.begin(), updates.end(), begin, [](int64_t element, const Update& each) {
      return element < each.first;
    }) - 1;
    for (; u != updates.end() && u->first < end; ++u) {
      const int64_t from = std::max(begin, u->first), to = std::min(end, u->first + u->n);
      if (from < to) u->run(*u, o, lr, grad_scale, from - u->first, to - u->first);
    }
  });
  for (const Update& u : updates) *u.step += 1;
}

// ---- checks ----

std::string name_of(const char* list, size_t i) {
  return std::string(list) + "[" + std::to_string(i) + "]";
}

void check_count(const char* list, size_t count, size_t expected) {
  TORCH_CHECK(
      count == expected, "adamw_step_: expected ", expected, " ", list, ", one for each of params, but got ", count);
}

void check_scalar(const char* op, const char* name, const Tensor& x, at::TensorList params, bool double_too = false) {
  if (!params.empty()) check_same_device(op, "params[0]", params[0], name, x);
  TORCH_CHECK((x.scalar_type() == at::kFloat || (double_too && x.scalar_type() == at::kDouble)) && x.dim() == 0, op,
      ": expected ", name, " of float32", double_too ? " or float64" : "", " and no dimension, but got ",
      dtype_name(x.scalar_type()), " of shape ", x.sym_sizes());
}

// lr is a number or a tensor.
void check_adamw_step_(const char* op, at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, at::TensorList state_steps, const c10::IValue& lr,
    double /*beta1*/, double /*beta2*/, double /*weight_decay*/, double /*eps*/, bool amsgrad, bool /*maximize*/,
    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf) {
  if (lr.isTensor()) check_scalar(op, "lr", lr.toTensor(), params, /*double_too=*/true);
  const size_t n = params.size();
  check_count("grads", grads.size(), n);
  check_count("exp_avgs", exp_avgs.size(), n);
  check_count("exp_avg_sqs", exp_avg_sqs.size(), n);
  TORCH_CHECK(amsgrad || max_exp_avg_sqs.empty(), op, ": expected no max_exp_avg_sqs without amsgrad, but got ",
      max_exp_avg_sqs.size());
  if (amsgrad) check_count("max_exp_avg_sqs", max_exp_avg_sqs.size(), n);
  check_count("state_steps", state_steps.size(), n);
  for (size_t i = 0; i < n; ++i) {
    const Tensor &param = params[i], &exp_avg = exp_avgs[i];
    const std::string name = name_of("params", i);
    check_floating(op, name.c_str(), param);
    check_same_device(op, "params[0]", params[0], name.c_str(), param);
    const auto fits = [&](const char* list, const Tensor& x) {
      if (x.device() == param.device() && same(x.sym_sizes(), param.sym_sizes())) return;
      check_same_device(op, name.c_str(), param, name_of(list, i).c_str(), x);
      check_shape(op, name_of(list, i).c_str(), x, param.sym_sizes(), ("the same as " + name).c_str());
    };
    const auto type = param.scalar_type(), wide = at::toOpMathType(type);
    fits("grads", grads[i]);
    if (grads[i].scalar_type() != type) check_dtype(op, name_of("grads", i).c_str(), grads[i], type, name.c_str());
    fits("exp_avgs", exp_avg);
    TORCH_CHECK(exp_avg.scalar_type() == type || exp_avg.scalar_type() == wide, op, ": expected ",
        name_of("exp_avgs", i), " of ", dtype_name(type), ", the dtype of ", name, wide == type ? "" : " (or float32)",
        ", but got ", dtype_name(exp_avg.scalar_type()), "; convert one with .to()");
    const auto like_exp_avg = [&](const char* list, const Tensor& x) {
      fits(list, x);
      if (x.scalar_type() != exp_avg.scalar_type())
        check_dtype(op, name_of(list, i).c_str(), x, exp_avg.scalar_type(), name_of("exp_avgs", i).c_str());
    };
    like_exp_avg("exp_avg_sqs", exp_avg_sqs[i]);
    if (amsgrad) like_exp_avg("max_exp_avg_sqs", max_exp_avg_sqs[i]);
    check_scalar(op, name_of("state_steps", i).c_str(), state_steps[i], params);
  }
  if (n > 0 && grad_scale) check_scalar(op, "grad_scale", *grad_scale, params);
  if (n > 0 && found_inf) check_scalar(op, "found_inf", *found_inf, params);
}

// ---- kernel ----

// The tensor itself if it can be traversed along with others of these strides, else a copy that can. A copy of a tensor
// that is written to is noted, to be written back.
class Walk {
 public:
  explicit Walk(const Tensor& param) : param_(param.is_non_overlapping_and_dense() ? param : param.contiguous()) {}
  Tensor operator()(const Tensor& x) const {
    if (x.strides() == param_.strides() || (x.is_contiguous() && param_.is_contiguous())) return x;
    Tensor out = at::empty_strided(param_.sizes(), param_.strides(), x.options());
    out.copy_(x);
    return out;
  }
  Tensor written(const Tensor& x, std::vector<std::pair<Tensor, Tensor>>& copies) const {
    Tensor out = (*this)(x);
    if (!out.is_same(x)) copies.emplace_back(x, out);
    return out;
  }

 private:
  Tensor param_; // or a tensor with the strides of the copies
};

// Lr is double or const Tensor&.
template <class Lr>
void adamw_step_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
    at::TensorList max_exp_avg_sqs, at::TensorList state_steps, Lr lr, double beta1, double beta2, double weight_decay,
    double eps, bool amsgrad, bool maximize, const std::optional<Tensor>& grad_scale,
    const std::optional<Tensor>& found_inf) {
  check_adamw_step_("adamw_step_", params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2,
      weight_decay, eps, amsgrad, maximize, grad_scale, found_inf);
  if (params.empty()) return;
  for (const at::TensorList list : {params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps})
    for (const Tensor& x : list) expect_memory("adamw_step_", x);
  const Options o{beta1, beta2, weight_decay, eps, amsgrad, maximize};
  WrittenTo written("adamw_step_");
  written.add("params", params);
  written.add("exp_avgs", exp_avgs);
  written.add("exp_avg_sqs", exp_avg_sqs);
  written.add("max_exp_avg_sqs", max_exp_avg_sqs);
  written.add("state_steps", state_steps);
  written.check();
  std::vector<Tensor> kept; // kept until the launch, like the copies
  std::vector<std::pair<Tensor, Tensor>> copies;
  std::vector<Update> updates;
  int64_t total = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const Walk walk(params[i]);
    Tensor param = walk.written(params[i], copies), grad = walk(grads[i]), exp_avg = walk.written(exp_avgs[i], copies),
           exp_avg_sq = walk.written(exp_avg_sqs[i], copies);
    Update u{nullptr, total, param.numel(), param.mutable_data_ptr(), grad.const_data_ptr(), exp_avg.mutable_data_ptr(),
        exp_avg_sq.mutable_data_ptr(), nullptr, state_steps[i].mutable_data_ptr<float>()};
    if (amsgrad) u.max_exp_avg_sq = walk.written(max_exp_avg_sqs[i], copies).mutable_data_ptr();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, param.scalar_type(), "adamw_step_", [&] {
      u.run =
          exp_avg.scalar_type() == param.scalar_type() ? update<scalar_t, scalar_t> : update<scalar_t, Acc<scalar_t>>;
    });
    total += u.n;
    updates.push_back(u);
    kept.push_back(std::move(grad));
  }
  const c10::IValue rate(lr);
  const Tensor lr_tensor = rate.isTensor() ? rate.toTensor().to(at::kDouble) : Tensor();
  const auto pointer = [](const std::optional<Tensor>& x) { return x ? x->const_data_ptr<float>() : nullptr; };
  launch(current_stream(params[0].get_device()),
      [updates = std::move(updates), o, number = rate.isDouble() ? rate.toDouble() : 0.0,
          lr = lr_tensor.defined() ? lr_tensor.const_data_ptr<double>() : nullptr, scale = pointer(grad_scale),
          inf = pointer(found_inf)] {
        if (inf && *inf != 0) return;
        update_all(updates, o, lr ? *lr : number, scale ? static_cast<double>(*scale) : 1.0);
      });
  for (const auto& [x, copy] : copies) x.copy_(copy);
}

} // namespace

// ---- registration ----

// Two schemas that differ in lr, as in torch's own fused optimizers. Autocast passes through: a tensor that is written
// to must not be cast.
TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.adamw_step_");
  const std::string lists =
      "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] "
      "max_exp_avg_sqs, Tensor(e!)[] state_steps, *, ";
  const std::string options =
      " lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize, Tensor? "
      "grad_scale=None, Tensor? found_inf=None) -> ()";
  m.def(("adamw_step_" + lists + "float" + options).c_str());
  m.def(("adamw_step_.tensor_lr" + lists + "Tensor" + options).c_str());
  checked_by("adamw_step_", check_adamw_step_);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("adamw_step_", adamw_step_<double>);
  m.impl("adamw_step_.tensor_lr", adamw_step_<const Tensor&>);
}
// See Note [Operators that change their arguments].
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("adamw_step_", refuse_gradients());
  m.impl("adamw_step_.tensor_lr", refuse_gradients());
}
TORCH_LIBRARY_IMPL(openreg, ADInplaceOrView, m) {
  m.impl("adamw_step_", count_changes());
  m.impl("adamw_step_.tensor_lr", count_changes());
}

} // namespace openreg::ops
