#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace standin {

namespace {

constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xff;  // NaN in every floating-point dtype

struct Block {
  void* start;
  size_t num_bytes;
  c10::Stream stream;  // whose order rules its reuse; of pinned memory without meaning
  bool is_pinned;
  std::vector<c10::Stream> used_on;  // other streams
  std::vector<SignalPtr> busy_until;
};

// What memory can be reused for: the same size, by the same stream.
struct Place {
  bool is_pinned;
  c10::DeviceIndex device;
  c10::StreamId stream;
  size_t num_bytes;
  auto operator<=>(const Place&) const = default;
};

struct Usage {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};

struct Heap {
  std::mutex mutex;
  std::map<Place, std::vector<void*>> free;
  std::map<const void*, Block*> pinned;  // in use, by first byte
  std::vector<Block*> waiting;           // released, while a stream may still read or write them
  std::map<c10::DeviceIndex, Usage> usage;
};

Heap& heap() {
  static auto* one = new Heap;  // never destroyed: streams run until the process ends
  return *one;
}

Place place_of(const Block& block) {
  if (block.is_pinned) return {true, 0, 0, block.num_bytes};
  return {false, block.stream.device_index(), block.stream.id(), block.num_bytes};
}

// Gives a block's memory back. With the heap's mutex.
void make_free(Block* block) {
  void* start = block->start;
  size_t num_bytes = block->num_bytes;
  auto poison = [start, num_bytes] { std::memset(start, kPoison, num_bytes); };
  if (block->is_pinned) {
    poison();
  } else {  // what is queued on its own stream may still use it
    enqueue(block->stream, "poison", Kind::kBookkeeping, poison);
  }
  heap().free[place_of(*block)].push_back(start);
  delete block;
}

// Gives back what no stream uses any more. With the heap's mutex.
void reclaim() {
  auto is_busy = [](const Block* block) {
    return std::any_of(block->busy_until.begin(), block->busy_until.end(),
                       [](const SignalPtr& signal) { return !signal->is_set(); });
  };
  auto& waiting = heap().waiting;
  auto done = std::stable_partition(waiting.begin(), waiting.end(), is_busy);
  std::for_each(done, waiting.end(), make_free);
  waiting.erase(done, waiting.end());
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(heap().mutex);
  for (c10::Stream stream : block->used_on) block->busy_until.push_back(record(stream));
  if (block->is_pinned) {
    heap().pinned.erase(block->start);
  } else {
    heap().usage[block->stream.device_index()].bytes -= static_cast<int64_t>(block->num_bytes);
  }
  heap().waiting.push_back(block);
  reclaim();
}

c10::DataPtr allocate(size_t num_bytes, c10::Stream stream, bool is_pinned) {
  num_bytes = (std::max<size_t>(num_bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard<std::mutex> lock(heap().mutex);
  reclaim();
  auto* block = new Block{nullptr, num_bytes, stream, is_pinned, {}, {}};
  auto& free = heap().free[place_of(*block)];
  if (free.empty()) {
    block->start = std::aligned_alloc(kAlignment, num_bytes);
    std::memset(block->start, kPoison, num_bytes);
  } else {
    block->start = free.back();
    free.pop_back();
  }
  if (is_pinned) {
    heap().pinned[block->start] = block;
    return {block->start, block, &release, c10::Device(c10::kCPU)};
  }
  Usage& usage = heap().usage[stream.device_index()];
  usage.bytes += static_cast<int64_t>(num_bytes);
  usage.peak_bytes = std::max(usage.peak_bytes, usage.bytes);
  return {block->start, block, &release, stream.device()};
}

// The pinned block in use that holds a byte. With the heap's mutex.
Block* pinned_block(const void* pointer) {
  auto& pinned = heap().pinned;
  auto after = pinned.upper_bound(pointer);
  if (after == pinned.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return pointer < static_cast<char*>(block->start) + block->num_bytes ? block : nullptr;
}

struct HostMemory : c10::Allocator {
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

struct DeviceAllocator final : HostMemory {
  c10::DataPtr allocate(size_t num_bytes) override {
    return standin::allocate(num_bytes, current_stream(current_device()), false);
  }
};

struct PinnedAllocator final : HostMemory {
  c10::DataPtr allocate(size_t num_bytes) override {
    return standin::allocate(num_bytes, default_stream(0), true);
  }
};

}  // namespace

c10::Allocator& device_allocator() {
  static auto* one = new DeviceAllocator;
  return *one;
}

c10::Allocator& pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return *one;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(heap().mutex);
  return pinned_block(pointer) != nullptr;
}

void keep_pinned_until(const void* pointer, SignalPtr signal) {
  std::lock_guard<std::mutex> lock(heap().mutex);
  if (Block* block = pinned_block(pointer)) block->busy_until.push_back(std::move(signal));
}

void record_use(const c10::DataPtr& data, c10::Stream stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block == nullptr || data.device().type() != c10::kCUDA) return;
  std::lock_guard<std::mutex> lock(heap().mutex);
  if (stream != block->stream) block->used_on.push_back(stream);
}

int64_t allocated_bytes(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(heap().mutex);
  return heap().usage[device].bytes;
}

int64_t peak_bytes(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(heap().mutex);
  return heap().usage[device].peak_bytes;
}

void reset_peak(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(heap().mutex);
  Usage& usage = heap().usage[device];
  usage.peak_bytes = usage.bytes;
}

}  // namespace standin
