// Python bindings of schedules, for openreg_ops/schedules/explore.py.
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
constexpr Named<Parked> kParked[] = {{Parked::kTimedOut, "timed out"}, {Parked::kWoken, "woken"},
    {Parked::kOver, "over"}, {Parked::kDeadlocked, "deadlocked"}};

using Numbers = std::tuple<int, std::uint32_t, std::uint32_t>;

Step step_of(const Numbers& numbers) {
  return {std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)};
}

} // namespace

void bind_schedules(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> waits;
  m.def(
      "begin_order",
      [](bool random, std::uint64_t seed, std::uint64_t length,
          const std::vector<std::tuple<Numbers, Numbers, bool, std::uint64_t>>& late,
          const std::vector<std::tuple<Numbers, int>>& switches, bool located, bool others, double patience) {
        Order order{random, seed, length, {}, {}, located, others,
            std::chrono::milliseconds(static_cast<std::int64_t>(patience * 1000))};
        for (const auto& [item, after, needed, rank] : late)
          order.late.push_back({step_of(item), step_of(after), needed, rank});
        for (const auto& [after, to] : switches) order.switches.push_back({step_of(after), to});
        const py::gil_scoped_release may_wait;
        begin_schedule(order);
      },
      py::arg("random") = false, py::arg("seed") = 0, py::arg("length") = 1, py::arg("late") = py::list(),
      py::arg("switches") = py::list(), py::arg("located") = false, py::arg("others") = false,
      py::arg("patience") = 30.0);
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
      waits);
  m.def("order_on", [] { return detail::scheduled(); });
  m.def("next_streams", &next_streams);
  m.def("set_next_streams", &set_next_streams);
  m.def("order_thread", &number_in_order);
  m.def("live_threads", &live_threads);
  py::class_<ThreadOfOrder>(m, "ThreadOfOrder");
  m.def("this_thread", &this_thread);
  m.def("add_thread", &add_thread);
  m.def("drop_thread", &drop_thread);
  m.def("enter_thread", &enter_thread, waits);
  m.def("leave_thread", &leave_thread, waits);
  m.def("pass_point", [](const std::string& name) { pass_point(name.c_str()); });
  m.def("try_point", [](const std::string& name) { ask(name.c_str(), Question::kLock); });
  m.def(
      "ask_point", [](const std::string& name, double seconds) { return ask(name.c_str(), Question::kAsks, seconds); },
      py::arg("name"), py::arg("seconds") = 0.0);
  m.def("skipped_seconds", &skipped_seconds);
  m.def("park_thread", [](double timeout) { return name_of(park_thread(timeout), kParked); }, waits);
  m.def("wake_thread", &wake_thread);
}

} // namespace openreg
