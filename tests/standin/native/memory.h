// Memory of devices, and pinned memory of the host: reused in the order of streams, as CUDA's.
#pragma once

#include <c10/core/Allocator.h>

#include "streams.h"

namespace standin {

c10::Allocator& device_allocator();  // on the current device, for its current stream
c10::Allocator& pinned_allocator();

bool is_pinned(const void* pointer);

// Pinned memory that holds `pointer`, if any does, is not reused before the signal is set.
void keep_pinned_until(const void* pointer, SignalPtr signal);

// Memory of a device is not reused before what is queued on the stream now has run.
void record_use(const c10::DataPtr& data, c10::Stream stream);

int64_t allocated_bytes(c10::DeviceIndex device);
int64_t peak_bytes(c10::DeviceIndex device);  // since the last reset
void reset_peak(c10::DeviceIndex device);

}  // namespace standin
