// The entry for code that Inductor generates; openreg_ops/inductor/codegen.py writes the calls.
#pragma once

#include <cstddef>
#include <cstdint>

// Runs `kernel(arguments)` in the order of the current stream of `device`. `arguments` is a trivially copyable
// struct of `bytes`, which is copied if the work is queued; `name` is its name in profiles.
extern "C" __attribute__((visibility("default"))) void openreg_launch(
    std::int64_t device, void (*kernel)(const void*), const void* arguments, std::size_t bytes, const char* name);
