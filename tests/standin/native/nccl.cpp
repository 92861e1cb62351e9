// A backend "nccl" over gloo, with NCCL's rules: tensors of the device only, one rank on a device,
// messages in their order without tags, streams of its own, connections when first used. What waits
// for a rank that is gone does so until the group is aborted.
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <utility>
#include <vector>

#include "streams.h"
#include "tensors.h"
#include "waits.h"

namespace standin {

namespace {

using at::Tensor;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;

constexpr int kGlooTag = 7;  // NCCL has none
constexpr int kGlooTagOfGroups = 8;

// Streams wait in it for what gloo does. An abort lets them go on, with whatever memory has by then.
class Waiting {
 public:
  void abort() {
    std::set<WorkPtr> messages;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_aborted_ = true;
      messages = messages_;
    }
    changed_.notify_all();
    for (const WorkPtr& message : messages) message->abort();
  }

  bool is_aborted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_aborted_;
  }

  // Begins something, and waits for its end or the abort.
  void run(const std::function<WorkPtr()>& begin, bool is_message) {
    if (is_aborted()) return;
    try {
      WorkPtr work = begin();
      is_message ? wait_for_message(work) : wait_for_collective(work);
    } catch (const std::exception& error) {
      std::string text = error.what();
      bool has_gone = text.find("by peer") != text.npos || text.find("pipe") != text.npos;
      std::unique_lock<std::mutex> lock(mutex_);
      if (!has_gone && !is_aborted_) throw;
      changed_.wait(lock, [this] { return is_aborted_; });
    }
  }

 private:
  void wait_for_message(const WorkPtr& work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_aborted_) return;
      messages_.insert(work);
    }
    auto forget = [&] {
      std::lock_guard<std::mutex> lock(mutex_);
      messages_.erase(work);
    };
    try {
      work->wait();
    } catch (...) {
      forget();
      throw;
    }
    forget();
  }

  void wait_for_collective(const WorkPtr& work) {
    auto future = work->getFuture();
    future->addCallback([this](c10::ivalue::Future&) {
      std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_all();
    });
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_aborted_ || future->completed(); });
    bool is_over = future->completed();
    lock.unlock();
    if (is_over) work->wait();  // raises its error
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_aborted_ = false;
  std::set<WorkPtr> messages_;
};

// What NCCL has a type for. Of complex numbers, torch hands it the parts where it adds or broadcasts.
bool is_known(at::ScalarType type, c10d::OpType kind) {
  switch (type) {
    case at::kShort:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
      return false;
    default:
      return !at::isComplexType(type) || kind == c10d::OpType::ALLREDUCE ||
             kind == c10d::OpType::BROADCAST || kind == c10d::OpType::REDUCE;
  }
}

// Messages that run side by side, as between ncclGroupStart and ncclGroupEnd.
class SideBySide final : public Work {
 public:
  explicit SideBySide(std::vector<WorkPtr> messages) : messages_(std::move(messages)) {}

  bool wait(std::chrono::milliseconds limit) override {
    for (const WorkPtr& message : messages_) message->wait(limit);
    return true;
  }

  void abort() override {
    for (const WorkPtr& message : messages_) message->abort();
  }

 private:
  std::vector<WorkPtr> messages_;
};

// What a stream does; the host waits for a barrier only.
class StreamWork final : public Work {
 public:
  StreamWork(c10d::OpType kind, c10::Stream stream, Tensors tensors)
      : Work(-1, kind),
        stream_(stream),
        end_(record(stream)),
        tensors_(std::move(tensors)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector{stream.device()})) {
    c10::StreamGuard guard(stream);
    future_->markCompleted(tensors_);  // whoever takes the value waits on the stream
  }

  ~StreamWork() override { keep_until_done(); }

  bool isCompleted() override { return end_->is_set(); }
  bool isSuccess() const override { return true; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void synchronize() override {
    wait_in_stream(current_stream(stream_.device_index()), end_);
    tensors_.clear();  // from here on, the current stream's order protects them
  }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (opType_ == c10d::OpType::BARRIER) {
      count_wait("barrier");
      end_->wait();
    }
    return true;
  }

 private:
  void keep_until_done() {
    if (tensors_.empty()) return;
    auto kept = std::make_shared<Tensors>(std::move(tensors_));
    enqueue(stream_, "release", Kind::kBookkeeping, [kept] { kept->clear(); });
  }

  c10::Stream stream_;
  SignalPtr end_;
  Tensors tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override { waiting_->abort(); }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { group_.emplace(); }

  // One communicator of all ranks for the whole group, as in torch.
  WorkPtr endCoalescing() override {
    auto group = std::exchange(group_, std::nullopt);
    std::vector<OnGloo> runs;
    Tensors tensors;
    for (auto& [tensor, run] : *group) {
      tensors.push_back(tensor);
      runs.push_back(std::move(run));
    }
    if (runs.empty()) return nullptr;
    auto run = [runs](Backend& gloo, Tensors& data) -> WorkPtr {
      std::vector<WorkPtr> messages;
      for (size_t index = 0; index < runs.size(); ++index) {
        Tensors one{data[index]};
        messages.push_back(runs[index](gloo, one));
      }
      return c10::make_intrusive<SideBySide>(std::move(messages));
    };
    return queue(c10d::OpType::COALESCED, "all", everyone(), tensors, run);
  }

  WorkPtr send(Tensors& tensors, int target, int) override {
    int tag = group_ ? kGlooTagOfGroups : kGlooTag;
    return message(c10d::OpType::SEND, tensors, target, [=](Backend& gloo, Tensors& data) {
      return gloo.send(data, target, tag);
    });
  }

  WorkPtr recv(Tensors& tensors, int source, int) override {
    int tag = group_ ? kGlooTagOfGroups : kGlooTag;
    return message(c10d::OpType::RECV, tensors, source, [=](Backend& gloo, Tensors& data) {
      return gloo.recv(data, source, tag);
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective(c10d::OpType::BROADCAST, tensors, [options](Backend& gloo, Tensors& data) {
      return gloo.broadcast(data, options);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    c10d::AllreduceOptions on_gloo = options;
    bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;  // which gloo has not for integers
    if (is_mean) on_gloo.reduceOp = c10d::ReduceOp::SUM;
    auto run = [on_gloo](Backend& gloo, Tensors& data) { return gloo.allreduce(data, on_gloo); };
    auto divide = [divisor = size_](Tensors& data) {
      data[0].div_(divisor, at::isIntegralType(data[0].scalar_type(), true)
                                ? std::optional<std::string_view>("trunc")
                                : std::nullopt);
    };
    return collective(c10d::OpType::ALLREDUCE, tensors, run, is_mean ? divide : AtEnd());
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return collective(c10d::OpType::REDUCE, tensors, [options](Backend& gloo, Tensors& data) {
      return gloo.reduce(data, options);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    Tensors tensors = outputs.at(0);
    tensors.push_back(inputs.at(0));
    return collective(c10d::OpType::ALLGATHER, tensors, [options](Backend& gloo, Tensors& data) {
      Tensors input{data.back()};
      std::vector<Tensors> gathered{Tensors(data.begin(), data.end() - 1)};
      return gloo.allgather(gathered, input, options);
    });
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return collective(c10d::OpType::_ALLGATHER_BASE, {output, input},
                      [options](Backend& gloo, Tensors& data) {
                        return gloo._allgather_base(data[0], data[1], options);
                      });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    return collective(c10d::OpType::ALLTOALL_BASE, {output, input},
                      [output_sizes, input_sizes, options](Backend& gloo, Tensors& data) mutable {
                        return gloo.alltoall_base(data[0], data[1], output_sizes, input_sizes,
                                                  options);
                      });
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Tensor nothing = at::zeros({1}, at::TensorOptions().device(device_of(-1)));
    auto sum = [](Backend& gloo, Tensors& data) {
      return gloo.allreduce(data, c10d::AllreduceOptions());
    };
    WorkPtr work = collective(c10d::OpType::BARRIER, {nothing}, sum);
    work->wait(std::chrono::milliseconds(0));
    return work;
  }

 private:
  using OnGloo = std::function<WorkPtr(Backend&, Tensors&)>;
  using AtEnd = std::function<void(Tensors&)>;

  WorkPtr message(c10d::OpType kind, Tensors& tensors, int peer, OnGloo run) {
    if (group_) {
      group_->emplace_back(tensors.at(0), std::move(run));
      return nullptr;
    }
    std::string key =
        std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer));
    return queue(kind, key, {rank_, peer}, {tensors.at(0)}, std::move(run));
  }

  WorkPtr collective(c10d::OpType kind, const Tensors& tensors, OnGloo run, AtEnd at_end = {}) {
    return queue(kind, "all", everyone(), tensors, std::move(run), std::move(at_end));
  }

  std::vector<int> everyone() const {
    std::vector<int> ranks(size_);
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  // Queues work behind what the current stream has to do until now.
  WorkPtr queue(c10d::OpType kind, const std::string& key, const std::vector<int>& ranks,
                const Tensors& tensors, OnGloo run, AtEnd at_end = {}) {
    TORCH_CHECK(!waiting_->is_aborted(), "NCCL communicator was aborted on rank ", rank_);
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(on_device(tensor), "No backend type associated with device type ",
                  tensor.device().type());
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      TORCH_CHECK(is_known(tensor.scalar_type(), kind),
                  "Input tensor data type is not supported for NCCL process group: ",
                  tensor.scalar_type());
    }
    c10::Device device = tensors.at(0).device();
    c10::DeviceGuard guard(device);
    c10::Stream stream = connected(key, ranks, device.index());
    wait_in_stream(stream, record(current_stream(device.index())));
    std::vector<Alias> aliases(tensors.begin(), tensors.end());
    bool is_message = key != "all" || kind == c10d::OpType::COALESCED;
    enqueue(stream, "nccl", Kind::kWork,
            [gloo = gloo_, waiting = waiting_, aliases, is_message, run, at_end] {
              Tensors data;
              for (const Alias& alias : aliases) data.push_back(alias.on_host());
              waiting->run([&] { return run(*gloo, data); }, is_message);
              if (at_end) at_end(data);
            });
    return c10::make_intrusive<StreamWork>(kind, stream, tensors);
  }

  // The stream of a communicator. When it is first used, all of its ranks meet on the host, as in
  // ncclCommInitRank.
  c10::Stream connected(const std::string& key, const std::vector<int>& ranks,
                        c10::DeviceIndex device) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = streams_.find(key);
      if (found != streams_.end()) return found->second;
    }
    auto place = [&key](int rank) { return key + "/" + std::to_string(rank); };
    std::string mine = std::to_string(device);
    store_->set(place(rank_), std::vector<uint8_t>(mine.begin(), mine.end()));
    std::set<std::vector<uint8_t>> devices;
    for (int rank : ranks) devices.insert(store_->get(place(rank)));
    TORCH_CHECK(devices.size() == ranks.size(),
                "NCCL error: invalid usage. Duplicate GPU detected : rank ", rank_,
                " both on CUDA device ", mine);
    count_wait("connection", key);
    std::lock_guard<std::mutex> lock(mutex_);
    return streams_.emplace(key, new_stream(device)).first->second;
  }

  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Waiting> waiting_ = std::make_shared<Waiting>();
  std::mutex mutex_;
  std::map<std::string, c10::Stream> streams_;  // by the ranks of a communicator
  std::optional<std::vector<std::pair<Tensor, OnGloo>>> group_;  // messages of one that is open
};

// DistributedDataParallel asks for one, and looks at its times for its own log only.
class UntimedReducer final : public c10d::Timer {
 public:
  explicit UntimedReducer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace

}  // namespace standin

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, standin::UntimedReducer);

}  // namespace c10d

PYBIND11_MODULE(standin_nccl, module) {
  auto create = [](c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
                   int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<standin::Nccl>(std::move(gloo), std::move(store), rank, size);
  };
  module.def("create", create, py::call_guard<py::gil_scoped_release>());
}
