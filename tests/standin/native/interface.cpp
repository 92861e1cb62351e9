// What the Python side calls by ctypes: no interface of torch reaches it.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "generators.h"
#include "memory.h"
#include "streams.h"
#include "waits.h"

namespace {

c10::DeviceIndex index_of(int device) { return static_cast<c10::DeviceIndex>(device); }

c10::intrusive_ptr<c10::TensorImpl> as_tensor(const char* bytes, int length) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), length, c10::GetCPUAllocator(), false);
  std::memcpy(storage.mutable_data(), bytes, length);
  auto tensor = c10::make_intrusive<c10::TensorImpl>(std::move(storage),
                                                     c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                     caffe2::TypeMeta::Make<uint8_t>());
  tensor->set_sizes_contiguous({length});
  return tensor;
}

}  // namespace

extern "C" {

int standin_device() { return standin::current_device(); }
void standin_set_device(int device) { standin::set_current_device(index_of(device)); }
void standin_drain(int device) { standin::drain_device(index_of(device)); }
void standin_set_delay(int mean_us) { standin::set_delay_us(mean_us); }

// The current stream does nothing more until what this returns is passed to standin_let_go.
void* standin_hold(int device) {
  auto signal = std::make_shared<standin::Signal>();
  standin::wait_in_stream(standin::current_stream(index_of(device)), signal);
  return new standin::SignalPtr(std::move(signal));
}

void standin_let_go(void* held) {
  auto* signal = static_cast<standin::SignalPtr*>(held);
  (*signal)->set();
  delete signal;
}

int64_t standin_allocated_bytes(int device) { return standin::allocated_bytes(index_of(device)); }
int64_t standin_peak_bytes(int device) { return standin::peak_bytes(index_of(device)); }
void standin_reset_peak(int device) { standin::reset_peak(index_of(device)); }

void standin_seed(int device, uint64_t seed) {
  at::Generator generator = standin::generator_of(index_of(device));
  generator.set_current_seed(seed);
}

// Writes a generator's state, if it has at most `size` bytes, and returns its length.
int standin_random_state(int device, char* state, int size) {
  auto found = standin::generator_of(index_of(device)).unsafeGetGeneratorImpl()->get_state();
  auto length = static_cast<int>(found->numel());
  if (length <= size) std::memcpy(state, found->data(), length);
  return length;
}

void standin_set_random_state(int device, const char* state, int length) {
  at::Generator generator = standin::generator_of(index_of(device));
  generator.unsafeGetGeneratorImpl()->set_state(*as_tensor(state, length));
}

void standin_set_wait_hook(standin::WaitHook hook) { standin::set_wait_hook(hook); }

// Writes the counts, as far as `size` allows, and returns their length.
int standin_wait_counts(char* text, int size, int reset) {
  std::string counts = standin::wait_counts(reset != 0);
  std::snprintf(text, size, "%s", counts.c_str());
  return static_cast<int>(counts.size());
}

}  // extern "C"
