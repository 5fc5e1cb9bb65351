// Streams, and the only way to run work on a device: launch(), run() and enqueue(). See Note [Launch mode].
//
//     openreg::launch(openreg::current_stream(device), [=] { for (int i = 0; i < n; ++i) y[i] = 2 * x[i]; });
//
// Work owns what it uses, because it may run after launch() has returned. Only work may touch device memory. The
// device, not the work, takes care of stream order, isolation, faults and profiles.
//
// Header-only: there is nothing to link. The first call looks the device up in the process, so a library with kernels
// for it can be loaded where openreg_ops is not installed. A standalone program defines OPENREG_LINKED and links with
// libopenreg_ops.so.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "c_api.h"

namespace openreg {
inline namespace v1 {

// Stream 0 of a device is its default stream.
struct Stream {
  int device;
  std::int64_t id;
  bool operator==(const Stream&) const = default;
};

// A launch, for errors, profiles and faults: where it is, and the name of its work, by default the function that
// launches it. `name` is not copied. `bytes`: the size of a copy.
struct Site : openreg_site {
  enum Kind { kKernel = OPENREG_KERNEL, kCopy = OPENREG_COPY, kWait = OPENREG_WAIT };
  Site(std::source_location where) noexcept : Site(nullptr, kKernel, 0, where) {} // not explicit: for default arguments
  Site(const char* name, Kind kind = kKernel, std::size_t bytes = 0,
      std::source_location where = std::source_location::current()) noexcept
      : openreg_site{name, where.function_name(), where.file_name(), where.line(), kind, bytes} {}
};

namespace impl {

inline const openreg_interface& find_interface() {
#ifdef OPENREG_LINKED
  const auto get = &openreg_get_interface;
#else
  void* library = dlopen("libopenreg_ops.so", RTLD_LAZY | RTLD_NOLOAD);
  const auto get =
      library ? reinterpret_cast<decltype(&openreg_get_interface)>(dlsym(library, "openreg_get_interface")) : nullptr;
  if (!get)
    throw std::runtime_error(
        "openreg: this process has no such device; `import torch` with openreg_ops installed, or "
        "define OPENREG_LINKED and link with libopenreg_ops.so (openreg_ops.library_paths())");
#endif
  const char* error = nullptr;
  const openreg_interface* found = get(OPENREG_MAJOR, OPENREG_MINOR, &error);
  if (!found) throw std::runtime_error(error);
  return *found;
}

inline const openreg_interface& interface() {
  static const openreg_interface& found = find_interface();
  return found;
}

inline void check(openreg_status status) {
  if (status != OPENREG_OK) [[unlikely]]
    interface().throw_error();
}

// Work of type W, which lies on the caller's stack until it is queued.
template <class W>
struct WorkOf {
  using Kept = std::decay_t<W>;
  static const char* run(void* context) {
    (*static_cast<Kept*>(context))();
    return nullptr;
  }
  static void* keep(void* context) { return new Kept(static_cast<W&&>(*static_cast<Kept*>(context))); }
  static void drop(void* context) { delete static_cast<Kept*>(context); }
  static constexpr openreg_work table{&run, &keep, &drop};
};
template <class W>
void* context_of(W& work) {
  return const_cast<std::remove_const_t<W>*>(std::addressof(work));
}

// Calls `call` with work that keeps the result of `work`, and returns that result.
template <class Work, class Call>
decltype(auto) with_result(Work&& work, Call&& call) {
  using Result = std::invoke_result_t<Work>;
  if constexpr (std::is_void_v<Result>) {
    auto inner = [&] { std::forward<Work>(work)(); };
    call(inner);
  } else if constexpr (std::is_reference_v<Result>) {
    std::remove_reference_t<Result>* result = nullptr;
    auto inner = [&] {
      result = std::addressof(static_cast<std::remove_reference_t<Result>&>(std::forward<Work>(work)()));
    };
    call(inner);
    return static_cast<Result>(*result);
  } else {
    std::optional<Result> result;
    auto inner = [&] { result.emplace(std::forward<Work>(work)()); };
    call(inner);
    return Result(*std::move(result));
  }
}
// Work of type W that runs before its caller continues, so it is never queued.
template <class W>
constexpr openreg_work run_only{[](void* context) -> const char* {
                                  (*static_cast<W*>(context))();
                                  return nullptr;
                                },
    nullptr, nullptr};

} // namespace impl

// The calling thread's current stream on a device.
inline Stream current_stream(int device) {
  const auto found = impl::interface().current_stream(device);
  return {found.device, found.id};
}

// Runs `work`, which owns what it uses, in the order of `stream`, now or later. Throws what `work` throws if it runs
// now, or the pending error of earlier work.
template <class Work>
void launch(Stream stream, Work&& work, Site site = std::source_location::current()) {
  if constexpr (std::is_function_v<std::remove_reference_t<Work>>) launch(stream, &work, site);
  else
    impl::check(impl::interface().launch(
        {stream.device, stream.id}, &site, &impl::WorkOf<Work>::table, impl::context_of(work)));
}

// Like launch(), for work that takes so long that the host should run ahead even in inline mode.
template <class Work>
void enqueue(Stream stream, Work&& work, Site site = std::source_location::current()) {
  if constexpr (std::is_function_v<std::remove_reference_t<Work>>) enqueue(stream, &work, site);
  else
    impl::check(impl::interface().enqueue(
        {stream.device, stream.id}, &site, &impl::WorkOf<Work>::table, impl::context_of(work)));
}

// Runs `work` in the order of `stream` on the calling thread, before it returns, and returns the result of `work`.
template <class Work>
decltype(auto) run(Stream stream, Work&& work, Site site = std::source_location::current()) {
  return impl::with_result(std::forward<Work>(work), [&](auto& inner) {
    static constexpr auto& table = impl::run_only<std::remove_reference_t<decltype(inner)>>;
    impl::check(impl::interface().run({stream.device, stream.id}, &site, &table, &inner));
  });
}

} // namespace v1
} // namespace openreg
