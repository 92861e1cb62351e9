// Streams: queues of work, each served by a thread of its own.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace standin {

// One recording of an event: set when its stream comes to it.
class Signal {
 public:
  void set();
  void wait();
  bool is_set();
  double at_s();  // when it was set, by a steady clock

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  double at_s_ = 0;
};
using SignalPtr = std::shared_ptr<Signal>;

// Work of operators and messages takes a random time more, where delays are on; bookkeeping none.
enum class Kind { kWork, kBookkeeping };

int environment_number(const char* name, int otherwise);

int num_devices();
c10::DeviceIndex current_device();  // of the calling thread, as all that is "current"
void set_current_device(c10::DeviceIndex device);
c10::Device device_of(c10::DeviceIndex device);  // a negative index is the current device

c10::Stream current_stream(c10::DeviceIndex device);
void set_current_stream(c10::Stream stream);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream pooled_stream(c10::DeviceIndex device);  // one of 32 in turn, as CUDA's pool
c10::Stream new_stream(c10::DeviceIndex device);

void enqueue(c10::Stream stream, const char* name, Kind kind, std::function<void()> work);
SignalPtr record(c10::Stream stream);
void wait_in_stream(c10::Stream stream, SignalPtr signal);
bool is_idle(c10::Stream stream);

// Waits on the host.
void drain(c10::Stream stream);
void drain_device(c10::DeviceIndex device);

void set_delay_us(int mean_us);

}  // namespace standin
