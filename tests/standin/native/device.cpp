// What torch asks of a type of devices: a guard with streams and events, and CUDA's hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <string>
#include <vector>

#include "generators.h"
#include "memory.h"
#include "streams.h"
#include "waits.h"

namespace standin {

const at::Generator& generator_of(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < num_devices(); ++index) {
      made->push_back(at::make_generator<at::CPUGeneratorImpl>(index));
    }
    return made;
  }();
  return all->at(device_of(device).index());
}

at::Generator seeded_by(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto* seeds = at::check_generator<at::CPUGeneratorImpl>(generator);
  return at::make_generator<at::CPUGeneratorImpl>(seeds->random64());
}

namespace {

void synchronize_device(c10::DeviceIndex device) {
  count_wait("synchronize device");
  drain_device(device);
}

// An event's last recording, which torch holds as void*.
struct Event {
  SignalPtr recording;
};

Event& as_event(void* event) { return *static_cast<Event*>(event); }

bool is_recorded(void* event) { return event != nullptr && as_event(event).recording; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }

  c10::Device getDevice() const override { return device_of(-1); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    set_current_device(device.index());
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return pooled_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return pooled_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("synchronize stream");
    drain(stream);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    as_event(*event).recording = standin::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (is_recorded(event)) wait_in_stream(stream, as_event(event).recording);
  }
  bool queryEvent(void* event) const override {
    return !is_recorded(event) || as_event(event).recording->is_set();
  }
  void synchronizeEvent(void* event) const override {
    count_wait("synchronize event");
    if (is_recorded(event)) as_event(event).recording->wait();
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(start) && queryEvent(end), "CUDA error: device not ready");
    return 1e3 * (as_event(end).recording->at_s() - as_event(start).recording->at_s());
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream);
  }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  std::string showConfig() const override { return "  - CUDA by the stand-in for GPUs\n"; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(num_devices());
  }
  int getNumGPUs() const override { return num_devices(); }
  c10::DeviceIndex current_device() const override { return standin::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return standin::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex before = standin::current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }

  c10::Device getDeviceFromPtr(void*) const override { return device_of(-1); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
};

c10::impl::DeviceGuardImplRegistrar guard_registered(c10::kCUDA, new Guard);
const bool allocator_registered = [] {
  c10::SetAllocator(c10::kCUDA, &device_allocator());
  return true;
}();

}  // namespace

}  // namespace standin

namespace at {

using standin::CUDAHooks;  // torch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
