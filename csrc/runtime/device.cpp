#include "runtime/device.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace openreg {
namespace {

constinit thread_local int current = 0;

// Parses "8GiB", "512 MB", "1048576"; if it cannot, prints a message and returns `otherwise`.
std::size_t bytes_from_environment(const char* name, std::size_t otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const double number = std::strtod(text, &end);
  std::string unit;
  for (; *end; ++end)
    if (!std::isspace(static_cast<unsigned char>(*end)))
      unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*end)));
  double scale = 0;
  if (unit.empty() || unit == "b") scale = 1;
  else if (unit == "k" || unit == "kb" || unit == "kib") scale = 1024.0;
  else if (unit == "m" || unit == "mb" || unit == "mib") scale = 1024.0 * 1024;
  else if (unit == "g" || unit == "gb" || unit == "gib") scale = 1024.0 * 1024 * 1024;
  else if (unit == "t" || unit == "tb" || unit == "tib") scale = 1024.0 * 1024 * 1024 * 1024;
  if (end == text || scale == 0 || !(number * scale >= 1 && number * scale < 1e15)) {
    std::fprintf(
        stderr, "openreg: %s=\"%s\" is not a size such as 8GiB or 512MiB; using %zu bytes\n", name, text, otherwise);
    return otherwise;
  }
  return static_cast<std::size_t>(number * scale);
}

bool named_cuda() noexcept {
  static const bool cuda = [] {
    const char* text = std::getenv("OPENREG_DEVICE");
    return text && std::string_view(text).substr(0, 4) == "cuda";
  }();
  return cuda;
}

int count_from_environment() {
  const char* text = std::getenv("OPENREG_DEVICE_COUNT");
  if (!text || !*text) return 2;
  char* end = nullptr;
  const long count = std::strtol(text, &end, 10);
  if (*end || count < 0 || count > 64) {
    std::fprintf(stderr, "openreg: OPENREG_DEVICE_COUNT=\"%s\" is not a number from 0 to 64; using 2\n", text);
    return 2;
  }
  return static_cast<int>(count);
}

// The number of devices that CUDA_VISIBLE_DEVICES lists before the first one that does not exist. CUDA reads it so.
int visible(const char* text, int count) {
  std::set<long> listed;
  while (*text) {
    char* end = nullptr;
    const long index = std::strtol(text, &end, 10);
    if (end == text || index < 0 || index >= count || (*end && *end != ',') || !listed.insert(index).second) break;
    text = *end ? end + 1 : end;
  }
  return static_cast<int>(listed.size());
}

} // namespace

const char* device_name() noexcept {
  return named_cuda() ? "cuda" : "openreg";
}

std::string device_name(int device) {
  return device_name() + (":" + std::to_string(device));
}

const char* vendor_name() noexcept {
  return named_cuda() ? "CUDA" : "openreg";
}

int device_count() noexcept {
  static const int count = [] {
    const int all = count_from_environment();
    const char* listed = named_cuda() ? std::getenv("CUDA_VISIBLE_DEVICES") : nullptr;
    return listed ? visible(listed, all) : all;
  }();
  return count;
}

std::size_t device_memory() noexcept {
  static const std::size_t bytes = [] {
    const std::size_t physical =
        static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
    return bytes_from_environment("OPENREG_DEVICE_MEMORY", physical);
  }();
  return bytes;
}

int current_device() noexcept {
  return current;
}

int exchange_device(int device) noexcept {
  return std::exchange(current, device);
}

} // namespace openreg
