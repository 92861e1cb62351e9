#include "waits.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

namespace standin {

namespace {

std::atomic<WaitHook> wait_hook{nullptr};

struct Counts {
  std::mutex mutex;
  std::map<std::string, int64_t> by_cause;
};

Counts& counts() {
  static auto* all = new Counts;  // never destroyed: streams run until the process ends
  return *all;
}

}  // namespace

void count_wait(const std::string& cause, const std::string& operator_name) {
  {
    std::lock_guard<std::mutex> lock(counts().mutex);
    ++counts().by_cause[cause];
  }
  if (WaitHook hook = wait_hook) hook(cause.c_str(), operator_name.c_str());
}

void set_wait_hook(WaitHook hook) { wait_hook = hook; }

std::string wait_counts(bool reset) {
  std::lock_guard<std::mutex> lock(counts().mutex);
  std::string lines;
  for (const auto& [cause, number] : counts().by_cause) {
    lines += cause + "\t" + std::to_string(number) + "\n";
  }
  if (reset) counts().by_cause.clear();
  return lines;
}

}  // namespace standin
