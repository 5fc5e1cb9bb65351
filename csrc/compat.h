// Differences between the supported versions of torch (2.13, 2.14, 2.15); one comment per gate.
#pragma once

#include <torch/headeronly/version.h>

#define OPENREG_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
