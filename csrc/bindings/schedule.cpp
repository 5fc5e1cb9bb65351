// Python bindings of schedules, for openreg_ops/schedules.
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/names.h"
#include "runtime/explore/schedule.h"
#include "runtime/memory/memory.h"

namespace openreg {
namespace {

constexpr Named<Action::What> kActions[] = {
    {Action::kLaunch, "launch"}, {Action::kRun, "run"}, {Action::kWait, "wait"}, {Action::kQuery, "query"}};

using Numbers = std::tuple<int, std::uint32_t, std::uint32_t>;

Step step_of(const Numbers& numbers) {
  return {std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)};
}

} // namespace

void bind_schedules(py::module_& m) {
  m.def(
      "begin_order",
      [](bool random, std::uint64_t seed, std::uint64_t length,
          const std::vector<std::tuple<Numbers, Numbers, bool, std::uint64_t>>& late, bool located) {
        Order order{random, seed, length, {}, located};
        for (const auto& [item, after, needed, rank] : late)
          order.late.push_back({step_of(item), step_of(after), needed, rank});
        const py::gil_scoped_release may_wait;
        begin_schedule(order);
      },
      py::arg("random") = false, py::arg("seed") = 0, py::arg("length") = 1, py::arg("late") = py::list(),
      py::arg("located") = false);
  m.def("end_order", [] {
    std::vector<Action> actions;
    {
      const py::gil_scoped_release may_wait;
      actions = end_schedule();
    }
    py::list out;
    for (const Action& action : actions)
      out.append(py::make_tuple(name_of(action.what, kActions),
          py::make_tuple(action.step.thread, action.step.number, action.step.poll),
          py::make_tuple(action.stream.device, action.stream.id), action.place, action.name, action.where));
    return out;
  });
  m.def(
      "abandon_order",
      [] {
        if (detail::scheduled()) detail::schedule_watcher.abandon();
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("order_on", [] { return detail::scheduled(); });
  m.def("next_streams", &next_streams);
  m.def("set_next_streams", &set_next_streams);
  m.def("pass_point", [](const std::string& name) { pass_point(name.c_str()); });
}

} // namespace openreg
