#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace standin {

namespace {

constexpr int kExitCode = 86;  // of a process whose stream met an error
constexpr int kPooledStreams = 32;

std::atomic<int> delay_us{environment_number("LIGHTNING_GPP_STANDIN_DELAY_US", 0)};

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Item {
  std::string name;
  Kind kind;
  std::function<void()> work;
};

class Queue {
 public:
  explicit Queue(unsigned seed) : random_(seed) {
    std::thread([this] { serve(); }).detach();
  }

  void put(Item item) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(item));
    changed_.notify_one();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return items_.empty() && !is_busy_;
  }

 private:
  [[noreturn]] void serve() {
    at::set_num_threads(1);
    at::AutoDispatchBelowAutograd no_autograd;
    for (;;) {
      Item item = take();
      if (item.kind == Kind::kWork) pause();
      run(item);
    }
  }

  Item take() {
    std::unique_lock<std::mutex> lock(mutex_);
    is_busy_ = false;
    changed_.wait(lock, [this] { return !items_.empty(); });
    Item item = std::move(items_.front());
    items_.pop_front();
    is_busy_ = true;
    return item;
  }

  void pause() {
    int mean_us = delay_us;
    if (mean_us == 0) return;
    int us = mean_us / 2 + static_cast<int>(random_() % (mean_us + 1));
    bool is_long = random_() % 16 == 0;  // so that any order can show, not only close ones
    usleep(is_long ? us * 8 : us);
  }

  static void run(const Item& item) {
    try {
      item.work();
    } catch (const c10::Error& error) {
      end_process(item, error.what_without_backtrace());
    } catch (const std::exception& error) {
      end_process(item, error.what());
    }
  }

  // Nobody waits for this stream in particular; a GPU's context would be lost, too.
  [[noreturn]] static void end_process(const Item& item, const char* error) {
    std::fprintf(stderr, "stand-in for GPUs: asynchronous error in %s: %s\n", item.name.c_str(),
                 error);
    std::fflush(stderr);
    _exit(kExitCode);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool is_busy_ = false;
  std::mt19937 random_;
};

// What follows is never destroyed: threads of queues run until the process ends.
using Queues = std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue*>;

Queues& queues() {
  static auto* all = new Queues;
  return *all;
}

std::mutex& queues_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

unsigned seed_of(c10::Stream stream) {
  return static_cast<unsigned>(stream.id() * 7 + stream.device_index() +
                               environment_number("LIGHTNING_GPP_STANDIN_SEED", 0) * 1000 +
                               environment_number("RANK", 0) * 100);
}

Queue& queue_of(c10::Stream stream) {
  std::lock_guard<std::mutex> lock(queues_mutex());
  Queue*& queue = queues()[{stream.device_index(), stream.id()}];
  if (queue == nullptr) queue = new Queue(seed_of(stream));
  return *queue;
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> these_streams;
std::atomic<c10::StreamId> next_id{1 + kPooledStreams};

}  // namespace

void Signal::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  at_s_ = now_s();
  is_set_ = true;
  changed_.notify_all();
}

void Signal::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

bool Signal::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_set_;
}

double Signal::at_s() {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_s_;
}

int environment_number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

int num_devices() {
  static int number = environment_number("LIGHTNING_GPP_STANDIN_DEVICES", 4);
  return number;
}

c10::DeviceIndex current_device() { return this_device; }

void set_current_device(c10::DeviceIndex device) {
  if (device >= 0) this_device = device;
}

c10::Device device_of(c10::DeviceIndex device) {
  return c10::Device(c10::kCUDA, device < 0 ? this_device : device);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  auto found = these_streams.find(device_of(device).index());
  return stream_of(device, found == these_streams.end() ? 0 : found->second);
}

void set_current_stream(c10::Stream stream) { these_streams[stream.device_index()] = stream.id(); }

c10::Stream default_stream(c10::DeviceIndex device) { return stream_of(device, 0); }

c10::Stream pooled_stream(c10::DeviceIndex device) {
  static std::array<std::atomic<unsigned>, 64> num_given{};
  unsigned number = num_given.at(device_of(device).index())++;
  return stream_of(device, 1 + number % kPooledStreams);
}

c10::Stream new_stream(c10::DeviceIndex device) { return stream_of(device, next_id++); }

void enqueue(c10::Stream stream, const char* name, Kind kind, std::function<void()> work) {
  queue_of(stream).put({name, kind, std::move(work)});
}

SignalPtr record(c10::Stream stream) {
  auto signal = std::make_shared<Signal>();
  enqueue(stream, "record", Kind::kBookkeeping, [signal] { signal->set(); });
  return signal;
}

void wait_in_stream(c10::Stream stream, SignalPtr signal) {
  enqueue(stream, "wait", Kind::kBookkeeping, [signal] { signal->wait(); });
}

bool is_idle(c10::Stream stream) { return queue_of(stream).is_idle(); }

void drain(c10::Stream stream) { record(stream)->wait(); }

void drain_device(c10::DeviceIndex device) {
  std::vector<c10::StreamId> ids;
  {
    std::lock_guard<std::mutex> lock(queues_mutex());
    for (const auto& [key, queue] : queues()) {
      if (key.first == device_of(device).index()) ids.push_back(key.second);
    }
  }
  for (c10::StreamId id : ids) drain(stream_of(device, id));
}

void set_delay_us(int mean_us) { delay_us = mean_us; }

}  // namespace standin
