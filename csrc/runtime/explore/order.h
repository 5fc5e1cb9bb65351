// An order in which a program's work can happen, and what happened in it: see Note [Schedules].
#pragma once

#include <openreg/launch.h>

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

namespace openreg {

inline constexpr int kHostThread = 0;     // the thread that began the schedule
inline constexpr int kUnknown = -1; // any other thread

struct Step {
  int thread; // kHostThread or kUnknown
  std::uint32_t number, poll;
  auto operator<=>(const Step&) const = default;
};

struct Order {
  // An item that runs late: after another step, in order of `rank` if several do. `needed`: it runs only when the host
  // waits for it.
  struct Late {
    Step item, after;
    bool needed;
    std::uint64_t rank;
  };
  bool random = false; // drawn from the seed; otherwise the program's order with these exceptions
  std::uint64_t seed = 0;
  std::uint64_t length = 1; // how many things happen in the program's order
  std::vector<Late> late;
  bool located = false; // whether actions record where they are in the program
};

// What happened, in order.
struct Action {
  enum What { kLaunch, kRun, kWait, kQuery };
  What what;
  Step step; // for an item that runs: the step that launched it
  Stream stream; // the stream that it was launched on, or that is waited for
  int place; // the stream's index in the order, by first launch; -1 if it has had no work
  std::string name, where;
};

} // namespace openreg
