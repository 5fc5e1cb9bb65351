// Streams and events between c10 and the runtime.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <string>

#include "../runtime/work.h"

namespace openreg {

// The stream that c10 names, which anyone can make of any number; throws if there is none.
Stream checked_stream(const c10::Stream& stream);

// The flag of an event that other processes can open; see Note [Shared events] in csrc/runtime/shared_event.h. PyTorch
// has none for it, gives the flag to the guard as it is, and makes no event with this one.
inline constexpr c10::EventFlag kInterprocess = c10::EventFlag::INVALID;

// Makes the backend's part of an event that has kInterprocess: the one that `handle` names, or a new one.
void open_event(c10::Event& event, c10::DeviceIndex device, const std::string& handle);
// Opens the event on the current device where it has no backend's part yet.
std::string event_handle(c10::Event& event);

} // namespace openreg
