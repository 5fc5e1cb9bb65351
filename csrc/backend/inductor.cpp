#include "backend/inductor.h"

#include <cstring>
#include <memory>

#include "runtime/stream/stream.h"

namespace openreg {
namespace {

// A generated kernel with its arguments. They are on the caller's stack, so running there needs no copy; queueing
// copies or moves this object, and the arguments with it.
class GeneratedKernel {
 public:
  GeneratedKernel(void (*kernel)(const void*), const void* arguments, std::size_t bytes)
      : kernel_(kernel), arguments_(arguments), bytes_(bytes) {}
  GeneratedKernel(const GeneratedKernel& other)
      : kernel_(other.kernel_), bytes_(other.bytes_), owned_(new std::byte[other.bytes_]) {
    std::memcpy(owned_.get(), other.arguments_, bytes_);
    arguments_ = owned_.get();
  }
  GeneratedKernel& operator=(const GeneratedKernel&) = delete;
  void operator()() const { kernel_(arguments_); }

 private:
  void (*kernel_)(const void*);
  const void* arguments_;
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> owned_;
};

} // namespace
} // namespace openreg

extern "C" void openreg_launch(
    std::int64_t device, void (*kernel)(const void*), const void* arguments, std::size_t bytes, const char* name) {
  const openreg::GeneratedKernel work(kernel, arguments, bytes);
  openreg::launch(openreg::current_stream(static_cast<int>(device)), work, {name});
}
