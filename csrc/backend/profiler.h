// What torch's profiler learns of the device.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace openreg {

// For profile_memory=True; each costs a look at a thread's state while nobody profiles.
void report_allocation(void* pointer);
void report_free(void* pointer); // while the memory is still allocated
void report_out_of_memory(c10::DeviceIndex device, std::size_t bytes);

// Ranges of the calling thread, as record_function makes them; they nest.
void range_push(const char* name);
void range_pop();

// While on, every operator is a range on the device as well, named as torch.autograd.profiler.emit_nvtx names them.
void emit_ranges(bool on, bool record_shapes);

} // namespace openreg
