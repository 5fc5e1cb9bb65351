// Streams and events between c10 and the runtime.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>

#include "runtime/stream/event.h"

namespace openreg {

// Returns the stream that a c10 stream names. Throws if there is none, because any number can be made into a c10
// stream.
Stream checked_stream(const c10::Stream& stream);

// The flag of an event that other processes can open; see Note [Shared events] in csrc/runtime/stream/ipc_event.h.
// PyTorch has no flag for this, passes flags to the guard unchanged, and never creates an event with this one.
inline constexpr c10::EventFlag kInterprocess = c10::EventFlag::INVALID;

// Creates the backend's part of an event: with kInterprocess, the event that `handle` names, or a new one; otherwise a
// new one for graphs, see Note [External events] in csrc/runtime/graph/external_event.h.
void open_event(c10::Event& event, c10::DeviceIndex device, const std::string& handle);
// Returns the handle with which another process opens an event. Creates the event's part on the current device if it
// has none yet.
std::string event_handle(c10::Event& event);

// Makes `event` the backend's part of the next event that this thread records for the first time.
void record_as(std::unique_ptr<Event> event);
// Returns true, once, if a future has taken this stream for a callback that it is about to run on this thread.
bool is_callback_stream(Stream stream) noexcept;

} // namespace openreg
