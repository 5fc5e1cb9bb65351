#include "runtime/process/attention.h"

namespace openreg {

constinit std::atomic<std::uint32_t> detail::attention{0};

} // namespace openreg
