// The runtime alone, without torch: every byte of memory that streams share is checked, from many
// threads, in every launch mode. `stress [seconds]`; tests/runtime/test_stress.py runs it under sanitizers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "../../csrc/runtime/device.h"
#include "../../csrc/runtime/process/error.h"
#include "../../csrc/runtime/stream/event.h"
#include "../../csrc/runtime/memory/memory.h"
#include "../../csrc/runtime/memory/contents.h"
#include "../../csrc/runtime/memory/stats.h"
#include "../../csrc/runtime/stream/profile.h"
#include "../../csrc/runtime/stream/launch.h"
#include "../../csrc/runtime/stream/queue.h"
#include "../../csrc/runtime/stream/stream.h"
#include "../../csrc/runtime/process/interrupts.h"

using namespace openreg;
using Clock = std::chrono::steady_clock;

namespace {

std::atomic<std::uint64_t> wrong{0}, checked{0};

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      ++wrong;                                                                      \
    }                                                                               \
  } while (false)

void check_bytes(const unsigned char* data, std::size_t bytes, unsigned char value) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (data[i] != value) {
      ++wrong;
      return;
    }
  checked += bytes;
}

struct Block {
  unsigned char* data;
  std::size_t bytes;
  unsigned char value;
  Stream stream;
};

// Allocates, fills on a stream, checks there or on another stream behind an event, and frees while all
// of it may still be queued.
void work(unsigned seed, Clock::time_point until) {
  std::mt19937 random(seed);
  const int devices = device_count();
  std::vector<Stream> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(new_stream(i % devices, i % 2 ? -1 : 0));
  std::vector<Block> blocks;
  while (Clock::now() < until) {
    const Stream stream = streams[random() % streams.size()];
    const std::size_t bytes = random() % 4 ? random() % 5000 + 1 : random() % 300000 + 1;
    const auto value = static_cast<unsigned char>(random());
    auto* data = static_cast<unsigned char*>(allocate(stream, bytes));
    EXPECT(reinterpret_cast<std::uintptr_t>(data) % 64 == 0 && device_of(data) == stream.device);
    launch(stream, [=] { std::memset(data, value, bytes); });
    blocks.push_back({data, bytes, value, stream});
    if (blocks.size() < 16) continue;
    std::swap(blocks[random() % blocks.size()], blocks.back());
    const Block block = blocks.back();
    blocks.pop_back();
    const auto check = [=] { check_bytes(block.data, block.bytes, block.value); };
    if (random() % 3 == 0) { // on another stream of the device
      const Stream other = new_stream(block.stream.device, 0);
      Event event(block.stream.device, false);
      event.record(block.stream);
      event.block(other);
      launch(other, check);
      record_stream(block.data, other);
    } else if (random() % 7 == 0) {
      run(block.stream, check);
    } else {
      launch(block.stream, check);
    }
    deallocate(block.data);
    if (random() % 500 == 0) empty_cache(block.stream.device);
    if (random() % 100 == 0) sleep_on(stream, 100000);
  }
  for (const Block& block : blocks) {
    run(block.stream, [&] { check_bytes(block.data, block.bytes, block.value); });
    deallocate(block.data);
  }
}

// Restarts a profile all the time, beside the threads that work.
void keep_profiling(Clock::time_point until) {
  while (Clock::now() < until) {
    start_profile();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (const auto& each : stop_profile()) EXPECT(each.begin <= each.end && !each.name.empty());
  }
}

void stress(double seconds) {
  for (const LaunchMode mode : {LaunchMode::kInline, LaunchMode::kAsync, LaunchMode::kSync}) {
    set_launch_mode(mode);
    const auto until =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds / 3));
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 4; ++i) threads.emplace_back(work, 10 * static_cast<unsigned>(mode) + i, until);
    threads.emplace_back(keep_profiling, until);
    for (auto& thread : threads) thread.join();
    for (int device = 0; device < device_count(); ++device) {
      synchronize_device(device);
      empty_cache(device);
      EXPECT(memory_stats(device).bytes[MemoryStats::kAll].current == 0);
    }
  }
  set_launch_mode(LaunchMode::kInline);
}

void order() {
  for (const LaunchMode mode : {LaunchMode::kInline, LaunchMode::kAsync, LaunchMode::kSync}) {
    set_launch_mode(mode);
    const Stream a = new_stream(0, 0), b = new_stream(0, 0);
    std::vector<int> seen;
    sleep_on(a, 100'000'000);
    EXPECT(stream_idle(a) == (mode == LaunchMode::kSync));
    launch(a, [&] { seen.push_back(1); });
    Event event(0, true);
    event.record(a);
    event.block(b);
    launch(b, [&] { seen.push_back(2); });
    EXPECT(stream_idle(b) == (mode == LaunchMode::kSync));
    EXPECT(run(b, [&] { return seen.size(); }) == 2);
    EXPECT((seen == std::vector<int>{1, 2}) && event.query());
  }
  set_launch_mode(LaunchMode::kInline);
}

void turns() { // Note [Turns]: several threads on one stream, nested work, and a wait inside work
  for (const LaunchMode mode : {LaunchMode::kInline, LaunchMode::kAsync, LaunchMode::kSync}) {
    set_launch_mode(mode);
    const Stream stream = new_stream(0, 0), other = new_stream(0, 0);
    long count = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread)
      threads.emplace_back([&, thread] {
        for (int i = 0; i < 500; ++i) {
          if (i % 100 == 0) sleep_on(stream, 10000); // what follows is queued
          if ((i + thread) % 3 == 0) launch(stream, [&] { ++count; });
          else if ((i + thread) % 3 == 1) run(stream, [&] { run(other, [&] { run(stream, [&] { ++count; }); }); });
          else
            run(stream, [&] {
              ++count;
              if (i % 50 == 0) synchronize_stream(stream);
            });
        }
      });
    for (auto& thread : threads) thread.join();
    synchronize_device(0);
    EXPECT(count == 2000);
  }
  set_launch_mode(LaunchMode::kInline);
}

void errors() {
  const Stream stream = new_stream(0, 0);
  set_launch_mode(LaunchMode::kAsync);
  launch(stream, [] { throw std::runtime_error("the first"); });
  launch(stream, [] { throw std::runtime_error("the second"); });
  std::string message;
  try {
    synchronize_stream(stream);
  } catch (const AsyncError& error) {
    message = error.what();
  }
  EXPECT(message.starts_with("the first") && message.find("stress.cpp:") != std::string::npos);
  synchronize_stream(stream); // told once
  set_launch_mode(LaunchMode::kSync);
  bool at_once = false;
  try {
    launch(stream, [] { throw std::logic_error("here"); });
  } catch (const std::logic_error&) {
    at_once = true;
  }
  EXPECT(at_once);
  set_launch_mode(LaunchMode::kInline);
}

void reuse() { // Note [Stream order]
  const Stream a = new_stream(0, 0), b = new_stream(0, 0);
  constexpr std::size_t kBytes = 1 << 20;
  void* first = allocate(a, kBytes);
  sleep_on(a, 300'000'000);
  deallocate(first);
  void* other = allocate(b, kBytes);
  EXPECT(other != first); // b must not have what a's work may still use
  void* same = allocate(a, kBytes);
  EXPECT(same == first); // a itself may
  deallocate(same);
  synchronize_stream(a);
  deallocate(other);
  void* recorded = allocate(a, kBytes);
  sleep_on(b, 300'000'000);
  record_stream(recorded, b);
  deallocate(recorded);
  const auto pending = [] {
    int count = 0;
    for (const auto& segment : memory_snapshot(0))
      for (const auto& block : segment.blocks) count += block.state == MemoryBlock::kPending;
    return count;
  };
  EXPECT(pending() == 1);
  void* meanwhile = allocate(a, kBytes);
  EXPECT(meanwhile != recorded && pending() == 1);
  deallocate(meanwhile);
  synchronize_stream(b);
  deallocate(allocate(a, kBytes));
  EXPECT(pending() == 0);
}

void ahead() { // Note [Stream order]: what runs already must not have what queued work may still use
  set_launch_mode(LaunchMode::kAsync);
  for (const std::size_t bytes : {std::size_t{512}, std::size_t{1} << 20}) {
    const Stream stream = new_stream(0, 0);
    std::atomic<int> step{0};
    auto* block = static_cast<unsigned char*>(allocate(stream, bytes));
    std::thread running([&] {
      run(stream, [&] {
        step = 1;
        while (step != 2) std::this_thread::yield();
        void* temporary = allocate(stream, bytes);
        EXPECT(temporary != block);
        std::memset(temporary, 0xEE, bytes);
        deallocate(temporary);
        for (std::size_t made = 0; made < 3 * device_memory(); made += 64 << 20) // its own memory, again and again
          deallocate(allocate(stream, 64 << 20));
      });
    });
    while (step != 1) std::this_thread::yield();
    run(new_stream(0, 0), [=] { std::memset(block, 0x11, bytes); });
    launch(stream, [&, block] { check_bytes(block, bytes, 0x11); }); // waits for its turn
    deallocate(block);
    step = 2;
    running.join();
    EXPECT(memory_stats(0).reserved[MemoryStats::kAll].peak < device_memory());
    synchronize_stream(stream);
    void* again = allocate(stream, bytes);
    if (bytes == 512) EXPECT(again == block);
    deallocate(again);
  }
  const Stream stream = new_stream(0, 0), other = new_stream(0, 0); // and what is queued meanwhile may use its memory
  constexpr std::size_t bytes = 1 << 20;
  std::atomic<int> step{0};
  unsigned char* theirs = nullptr;
  empty_cache(0); // so that what one stream freed is what another gets
  std::thread running([&] {
    run(stream, [&] {
      step = 1;
      while (step != 2) std::this_thread::yield();
      auto* temporary = static_cast<unsigned char*>(allocate(stream, bytes));
      launch(stream, [=] { std::memset(temporary, 0xEE, bytes); });
      deallocate(temporary);
      theirs = static_cast<unsigned char*>(allocate(other, bytes));
      std::memset(theirs, 0x11, bytes);
    });
  });
  while (step != 1) std::this_thread::yield();
  sleep_on(stream, 50'000'000);
  step = 2;
  running.join();
  synchronize_stream(stream);
  run(other, [&] { check_bytes(theirs, bytes, 0x11); });
  deallocate(theirs);
  set_launch_mode(LaunchMode::kInline);
}

void profiles() { // Note [Profile]
  for (const LaunchMode mode : {LaunchMode::kInline, LaunchMode::kAsync, LaunchMode::kSync}) {
    set_launch_mode(mode);
    const Stream stream = new_stream(1, 0);
    start_profile();
    push_operator(7);
    sleep_on(stream, 20'000'000);
    run(stream, [&] { run(stream, [] {}); });
    pop_operator();
    pop_operator(); // ignored
    const auto log = stop_profile();
    std::vector<Activity> work, calls;
    for (const auto& each : log) (each.on == Activity::kStream ? work : calls).push_back(each);
    EXPECT(work.size() == 2 && work[0].name == "sleep kernel" && work[1].name == "profiles kernel");
    EXPECT(work[0].end - work[0].begin >= 20'000'000 && work[0].end <= work[1].begin);
    for (const auto& each : work) EXPECT(each.stream == stream && each.operation == 7);
    for (const auto& each : calls)
      EXPECT(!each.launch || each.launch == work[0].launch || each.launch == work[1].launch);
  }
  set_launch_mode(LaunchMode::kInline);
  start_profile();
  EXPECT(stop_profile().empty());
  run({0, 0}, [] {});
  EXPECT(stop_profile().empty());
}

void helpers() { // Note [Isolation]: a thread that is older than the launch it works for has no rights from it
  void* memory = allocate({0, 0}, 4096);
  std::atomic<int> step{0};
  const auto wait_for = [&](int value) {
    while (step != value) std::this_thread::yield();
  };
  std::thread helper([&] {
    for (int i = 0; i < 3; ++i) {
      wait_for(2 * i + 1);
      std::memset(memory, i, 4096);
      ++step;
    }
  });
  for (int i = 0; i < 3; ++i) {
    launch({0, 0}, [&] {
      ++step;
      wait_for(2 * i + 2);
    });
    run({0, 0}, [&] { launch({0, 0}, [&] { check_bytes(static_cast<unsigned char*>(memory), 4096, i); }); });
  }
  helper.join();
  deallocate(memory);
}

// Waits that a signal's handler ends: nothing is lost, and the work goes on. See Note [Interrupts].
struct Interrupted {};
std::atomic<int> interrupts{0};

template <class Wait>
bool interrupted(Wait&& wait) {
  interrupts = 2; // the handler returns once before it throws
  try {
    wait();
  } catch (const Interrupted&) {
    return true;
  }
  return false;
}

void interrupting() {
  set_check_signals([] {
    if (interrupts == 0) return false;
    if (--interrupts == 0) throw Interrupted();
    return true;
  });
  const Stream stream = new_stream(0, 0), other = new_stream(0, 0);
  std::atomic<bool> open{false};
  const auto gate = [&] {
    open = false;
    enqueue(stream, [&] {
      while (!open) std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  };
  int ran = 0;
  gate();
  Event event(0, true);
  event.record(stream);
  EXPECT(interrupted([&] { synchronize_stream(stream); }));
  EXPECT(interrupted([&] { synchronize_device(0); }));
  EXPECT(interrupted([&] { event.synchronize(); }));
  EXPECT(interrupted([&] { event.time(); }));
  EXPECT(interrupted([&] { run(stream, [&] { ++ran; }); }));
  set_launch_mode(LaunchMode::kSync);
  EXPECT(interrupted([&] { launch(stream, [&] { ++ran; }); }));
  set_launch_mode(LaunchMode::kInline);
  EXPECT(interrupted([&] { run(other, [&] { synchronize_stream(stream); }); })); // which has a turn before and after
  run(other, [&] { ++ran; });
  EXPECT(ran == 1 && !stream_idle(stream) && !event.query());
  open = true;
  synchronize_stream(stream);
  EXPECT(event.query());

  // Memory that the stream may still use, the rest of what is allowed.
  const auto before = memory_stats(0);
  const std::size_t limit = memory_limit(0);
  gate();
  set_memory_limit(0, before.bytes[MemoryStats::kAll].current + 4 * kMemoryPage);
  deallocate(allocate(stream, 4 * kMemoryPage));
  EXPECT(interrupted([&] { deallocate(allocate(other, 4 * kMemoryPage)); }));
  EXPECT(memory_stats(0).bytes[MemoryStats::kAll].current == before.bytes[MemoryStats::kAll].current);
  open = true;
  deallocate(allocate(other, 4 * kMemoryPage)); // waits
  set_memory_limit(0, limit);

  // Of a thread that handles none, they are in one piece; dropped work leaves its error.
  gate();
  event.record(stream);
  event.block(other);
  sleep_on(other, std::int64_t{1} << 62);
  launch(other, [&] { ++ran; });
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    open = true;
  });
  detail::drop_queued();
  opener.join();
  EXPECT(stream_idle(stream) && stream_idle(other) && ran == 1);
  try {
    synchronize_device(0);
    EXPECT(false);
  } catch (const AsyncError& error) {
    EXPECT(std::string_view(error.what()).find("queued work was dropped") != std::string_view::npos);
  }
  run(other, [&] { ++ran; });
  EXPECT(ran == 2);
  set_check_signals(nullptr);
}

void bounded() {
  for (int i = 0; i < 10000; ++i) {
    const Stream stream = new_stream(0, i % 2 ? -1 : 0);
    EXPECT(is_stream(stream));
    Event event(0, true);
    event.record(stream);
    if (i % 100 == 0) sleep_on(stream, 1000);
  }
  synchronize_device(0);
  stop_workers();
}

void bench() {
  const Stream stream = new_stream(0, 0);
  std::vector<double> queueing, memory;
  set_launch_mode(LaunchMode::kAsync);
  for (int round = 0; round < 51; ++round) {
    const auto begin = Clock::now();
    for (int i = 0; i < 1000; ++i) launch(stream, [] {});
    queueing.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / 1000);
    synchronize_stream(stream);
  }
  set_launch_mode(LaunchMode::kInline);
  for (int round = 0; round < 51; ++round) {
    const auto begin = Clock::now();
    for (int i = 0; i < 1000; ++i) deallocate(allocate(stream, 256));
    memory.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / 1000);
  }
  std::sort(queueing.begin(), queueing.end());
  std::sort(memory.begin(), memory.end());
  std::printf("queueing a kernel %.0f ns, allocating and freeing %.0f ns (medians)\n", queueing[25], memory[25]);
}

} // namespace

int main(int argc, char** argv) {
  if (argc > 1 && !std::strcmp(argv[1], "bench")) {
    bench();
    return 0;
  }
  order();
  turns();
  errors();
  reuse();
  ahead();
  helpers();
  interrupting();
  profiles();
  bounded();
  stress(argc > 1 ? std::atof(argv[1]) : 3);
  std::printf("%llu bytes checked, %llu wrong\n", static_cast<unsigned long long>(checked),
      static_cast<unsigned long long>(wrong));
  return wrong != 0 || checked == 0;
}
