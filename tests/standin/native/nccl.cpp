// A backend "nccl" over gloo, with NCCL's rules: tensors of the device only, one rank on a device,
// messages in their order without tags, streams of its own, connections when first used.
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
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

  WorkPtr send(Tensors& tensors, int target, int) override {
    return message(c10d::OpType::SEND, tensors, target, [target](Backend& gloo, Tensors& data) {
      return gloo.send(data, target, kGlooTag);
    });
  }

  WorkPtr recv(Tensors& tensors, int source, int) override {
    return message(c10d::OpType::RECV, tensors, source, [source](Backend& gloo, Tensors& data) {
      return gloo.recv(data, source, kGlooTag);
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
    auto run = [on_gloo, divisor = is_mean ? size_ : 1](Backend& gloo, Tensors& data) {
      gloo.allreduce(data, on_gloo)->wait();
      if (divisor > 1)
        data[0].div_(divisor, at::isIntegralType(data[0].scalar_type(), true)
                                  ? std::optional<std::string_view>("trunc")
                                  : std::nullopt);
      return WorkPtr();
    };
    return collective(c10d::OpType::ALLREDUCE, tensors, run);
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

  WorkPtr message(c10d::OpType kind, Tensors& tensors, int peer, OnGloo run) {
    std::string key =
        std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer));
    return queue(kind, key, {rank_, peer}, {tensors.at(0)}, std::move(run));
  }

  WorkPtr collective(c10d::OpType kind, const Tensors& tensors, OnGloo run) {
    std::vector<int> everyone(size_);
    std::iota(everyone.begin(), everyone.end(), 0);
    return queue(kind, "all", everyone, tensors, std::move(run));
  }

  // Queues work behind what the current stream has to do until now.
  WorkPtr queue(c10d::OpType kind, const std::string& key, const std::vector<int>& ranks,
                const Tensors& tensors, OnGloo run) {
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(on_device(tensor), "No backend type associated with device type ",
                  tensor.device().type());
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    }
    c10::Device device = tensors.at(0).device();
    c10::DeviceGuard guard(device);
    c10::Stream stream = connected(key, ranks, device.index());
    wait_in_stream(stream, record(current_stream(device.index())));
    std::vector<Alias> aliases(tensors.begin(), tensors.end());
    enqueue(stream, "nccl", Kind::kWork, [gloo = gloo_, aliases, run = std::move(run)] {
      Tensors data;
      for (const Alias& alias : aliases) data.push_back(alias.on_host());
      if (WorkPtr work = run(*gloo, data)) work->wait();
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
  std::mutex mutex_;
  std::map<std::string, c10::Stream> streams_;  // by the ranks of a communicator
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
