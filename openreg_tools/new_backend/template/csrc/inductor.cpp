// What the code that Inductor generates calls: a kernel as a function of one struct of arguments. Rung 10.
// torch_acme/inductor.py generates that code.
#include <string>
#include <vector>

#include "common.h"

extern "C" void acme_launch_generated(
    int64_t device, void (*kernel)(const void*), const void* arguments, size_t bytes, const char* name) {
  const auto* first = static_cast<const char*>(arguments);
  acme::launch(acme::native_stream(acme::checked_index(device)), name,
      [kernel, owned = std::vector<char>(first, first + bytes)] { kernel(owned.data()); });
}
