// The device from C++, without PyTorch: openreg/openreg.h.
#include <openreg/openreg.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

int wrong = 0;

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      ++wrong;                                                                      \
    }                                                                               \
  } while (false)

// The call throws an Error whose message contains this text.
template <class Error, class Call>
void throws(const std::string& words, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (std::string(error.what()).find(words) != std::string::npos) return;
    std::fprintf(stderr, "expected \"%s\" in \"%s\"\n", words.c_str(), error.what());
    ++wrong;
    return;
  }
  std::fprintf(stderr, "expected an error: %s\n", words.c_str());
  ++wrong;
}

int calls = 0; // that the device has run; run() waits for those before it
void count_call() {
  ++calls;
}

struct OwnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Work that throws an E when it runs, or when it is copied to be queued.
template <class E>
struct Throws {
  E error;
  bool copied = false;
  explicit Throws(E error, bool copied = false) : error(std::move(error)), copied(copied) {}
  Throws(const Throws& other) : error(other.error), copied(other.copied) {
    if (copied) throw error;
  }
  void operator()() const { throw error; }
};

// The status of a call of the table, and the exception that throw_error() throws then.
template <class E, class Call>
void expect_thrown(openreg_status expected, Call&& call) {
  const openreg_status status = call();
  EXPECT(status == expected);
  if (status == OPENREG_OK) return;
  try {
    openreg::impl::interface().throw_error();
  } catch (const E&) {
    return;
  } catch (...) {
  }
  std::fprintf(stderr, "expected another type of exception: %s\n", openreg::impl::interface().last_error());
  ++wrong;
}

// What work throws is its own error, whatever its type says where the device throws it.
template <class E>
void throws_its_own(openreg::Stream stream, bool runs_here, E error) {
  const auto& table = openreg::impl::interface();
  const openreg_stream own{stream.device, stream.id};
  const openreg::Site site("its own");
  const Throws<E> thrower(error);
  static constexpr auto& work = openreg::impl::WorkOf<const Throws<E>&>::table;
  void* const context = openreg::impl::context_of(thrower);
  openreg::synchronize(stream);
  expect_thrown<E>(OPENREG_ERROR_OTHER, [&] { return table.run(own, &site, &work, context); });
  if (runs_here) expect_thrown<E>(OPENREG_ERROR_OTHER, [&] { return table.launch(own, &site, &work, context); });
  // By work in work, with an error of its own before it.
  const auto outer = [&] {
    EXPECT(table.set_device(99) == OPENREG_ERROR_ARGUMENT);
    expect_thrown<E>(OPENREG_ERROR_OTHER, [&] { return table.run(own, &site, &work, context); });
    openreg::run(stream, thrower);
  };
  expect_thrown<E>(OPENREG_ERROR_OTHER, [&] {
    auto inner = outer;
    return table.run(own, &site, &openreg::impl::WorkOf<decltype(inner)&>::table, &inner);
  });
  EXPECT(table.set_device(99) == OPENREG_ERROR_ARGUMENT); // as before
  if (runs_here) return;
  const Throws<E> copied(error, /*copied=*/true);
  expect_thrown<E>(
      OPENREG_ERROR_OTHER, [&] { return table.enqueue(own, &site, &work, openreg::impl::context_of(copied)); });
}

void add_one(double* x, int n) {
  for (int i = 0; i < n; ++i) x[i] += 1;
}

} // namespace

int main(int argc, char** argv) try {
  const bool sync = argc > 1 && std::string(argv[1]) == "sync";
  using openreg::Stream;
  EXPECT(openreg::device_count() == 2);
  openreg::set_device(1);
  EXPECT(openreg::current_device() == 1);
  throws<std::invalid_argument>("there is no device 3", [] { openreg::set_device(3); });

  constexpr int n = 4096;
  std::vector<double> host(n);
  std::iota(host.begin(), host.end(), 0);
  const Stream stream = openreg::new_stream(1);
  const openreg::StreamGuard guard(stream);
  EXPECT(openreg::current_stream(1) == stream && openreg::current_stream(0) == (Stream{0, 0}));
  auto* x = static_cast<double*>(openreg::allocate(stream, n * sizeof(double)));
  EXPECT(openreg::device_of(x) == 1);
  openreg::copy(x, host.data(), n * sizeof(double), stream);

  // All that can be called: a function, by name and by pointer, a lambda, const or not, with state of its own, a
  // std::function.
  void (*const pointer)() = count_call;
  openreg::launch(stream, count_call);
  openreg::launch(stream, pointer);
  openreg::enqueue(stream, count_call);
  openreg::run(stream, count_call);
  EXPECT(calls == 4);
  const auto constant = [x] { add_one(x, n); };
  openreg::launch(stream, constant);
  openreg::launch(stream, [x, count = 0]() mutable { add_one(x, n + 0 * ++count); }, "add_one");
  openreg::enqueue(stream, std::function<void()>(constant));
  const std::vector<double> more(n, 1.0);
  openreg::launch(stream, [x, more] {
    for (int i = 0; i < n; ++i) x[i] += more[static_cast<std::size_t>(i)];
  });
  const double sum = openreg::run(stream, [x] { return std::accumulate(x, x + n, 0.0); });
  EXPECT(sum == n * (n - 1) / 2.0 + 4 * n);
  double& element = openreg::run(stream, [x]() -> double& { return x[7]; });
  EXPECT(&element == x + 7);

  // Work that throws: here with its own type, queued with the next wait.
  throws<OwnError>("by itself", [&] { openreg::run(stream, [] { throw OwnError("by itself"); }); });
  const auto fail = [&] { openreg::enqueue(stream, [] { throw OwnError("queued"); }); };
  if (sync) throws<OwnError>("queued", fail);
  else {
    fail();
    throws<std::runtime_error>("queued", [&] { openreg::synchronize(stream); });
  }

  throws_its_own(stream, sync, std::invalid_argument("mine"));
  throws_its_own(stream, sync, std::bad_alloc());
  throws_its_own(stream, sync, OwnError("mine"));
  throws_its_own(stream, sync, std::string("mine"));
  // Errors of the device that pass through work are the work's, too.
  const auto too_much = [&] { openreg::allocate(stream, std::size_t(1) << 60); };
  throws<std::runtime_error>("out of memory", [&] { openreg::run(stream, too_much); });
  throws<std::invalid_argument>("there is no device 9", [&] { openreg::run(stream, [] { openreg::set_device(9); }); });

  // Order between streams.
  const Stream other = openreg::new_stream(1, -1);
  openreg::Event first(1, true), second(1, true);
  first.record(stream);
  openreg::enqueue(stream, constant);
  second.record(stream);
  second.block(other);
  openreg::record_stream(x, other);
  openreg::launch(other, constant);
  openreg::synchronize(other);
  EXPECT(openreg::query(other) && second.query() && first.elapsed_time(second) >= 0);
  openreg::Event moved = std::move(second);
  moved.synchronize();
  openreg::copy(host.data(), x, n * sizeof(double), stream);
  openreg::synchronize(1);
  for (int i = 0; i < n; ++i) EXPECT(host[static_cast<std::size_t>(i)] == i + 6);

  // Wrong addresses, streams and sizes.
  openreg::check_address(x, stream);
#ifndef NDEBUG
  throws<std::invalid_argument>("but got a host address", [&] { openreg::check_address(host.data(), stream); });
  throws<std::invalid_argument>("one of device 1; copy it", [&] { openreg::check_address(x, {0, 0}); });
#endif
  throws<std::invalid_argument>("there is no stream 99 on device 1", [&] { openreg::launch({1, 99}, constant); });
  throws<std::runtime_error>("out of memory", [&] { openreg::allocate(stream, std::size_t(1) << 60); });
  {
    openreg::Fault fault("allocation", 1);
    throws<std::runtime_error>("This was injected", [&] { openreg::allocate(stream, 8); });
    EXPECT(fault.stop() == 1);
  }
  openreg::deallocate(x);
  std::puts(wrong ? "wrong" : "all right");
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
