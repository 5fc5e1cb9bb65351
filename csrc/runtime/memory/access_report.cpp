// The message of an access that isolation does not permit. Only async-signal-safe code: it runs in a signal handler.

#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "runtime/memory/contents.h"
#include "runtime/process/isolation.h"

namespace openreg {
namespace {

// Text of bounded length, built without allocating.
class Text {
 public:
  Text& operator<<(const char* text) {
    while (*text && size_ < sizeof text_) text_[size_++] = *text++;
    return *this;
  }
  Text& operator<<(std::uint64_t number) { return digits(number, 10); }
  Text& operator<<(const void* address) {
    return (*this << "0x").digits(reinterpret_cast<std::uintptr_t>(address), 16);
  }
  void print() const {
    if (write(STDERR_FILENO, text_, size_) < 0) return; // there is no one left to report to
  }

 private:
  Text& digits(std::uint64_t number, unsigned base) {
    char reversed[20];
    int count = 0;
    do reversed[count++] = "0123456789abcdef"[number % base];
    while (number /= base);
    while (count && size_ < sizeof text_) text_[size_++] = reversed[--count];
    return *this;
  }
  char text_[1024];
  std::size_t size_ = 0;
};

void report_access(const char* address, const char* verb) {
  Text text;
  const MemoryOwner owner = find_owner(address);
  text << "openreg: the host " << verb << " device memory: address " << static_cast<const void*>(address) << " on "
       << device_name() << ":" << static_cast<std::uint64_t>(owner.device);
  const MemoryBlock& block = owner.block;
  if (owner.busy) {
    text << ", in an allocation that cannot be told, because the allocator is busy";
  } else if (!block.size) {
    text << ", in memory that has been freed or was never allocated";
  } else {
    const auto offset = static_cast<std::uint64_t>(address - static_cast<const char*>(block.address));
    text << ", byte " << offset << " of "
         << (block.state == MemoryBlock::kAllocated ? "an allocation" : "a freed allocation") << " of "
         << static_cast<std::uint64_t>(block.requested) << " bytes at " << block.address << ", made on stream "
         << static_cast<std::uint64_t>(owner.stream);
  }
  text << ".\nOn a real accelerator the host cannot reach it. Copy the tensor with .cpu() or .to(\"cpu\"), or do the "
          "work in a kernel, through openreg::launch(). (OPENREG_ISOLATION=off permits it.)\n";
  text.print();
}

const bool reports = [] {
  set_report_access(&report_access);
  return true;
}();

} // namespace
} // namespace openreg
