// A backend "nccl" for the stand-in: order without tags, streams of its own, lazy connections, gloo below.
#include "fake.h"
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/python.h>
#include <map>
#include <set>
using namespace c10d; using at::Tensor; using W = c10::intrusive_ptr<Work>;
struct FakeWork : Work {
  FakeWork(OpType t, c10::Stream s, fake::SigP e, std::vector<Tensor> k) : Work(-1, t), stream(s), end(e), keep(std::move(k)) {}
  ~FakeWork() override { if (!keep.empty()) { auto k = std::make_shared<std::vector<Tensor>>(std::move(keep)); fake::push(stream, "!unstash", [k]() mutable { k->clear(); }); } }
  bool isCompleted() override { return end->query(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { fake::block(fake::current(stream.device_index()), end); keep.clear(); }
  bool wait(std::chrono::milliseconds) override { synchronize(); if (opType_ == OpType::BARRIER) { fake::count("nccl barrier", ""); end->wait(); } return true; }
  c10::Stream stream; fake::SigP end; std::vector<Tensor> keep;
};
struct FakeNccl : Backend {
  c10::intrusive_ptr<Backend> gloo; c10::intrusive_ptr<Store> store; std::map<std::string, c10::Stream> streams; std::mutex m;
  FakeNccl(c10::intrusive_ptr<Backend> g, c10::intrusive_ptr<Store> s, int r, int n) : Backend(r, n), gloo(g), store(s) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}
  c10::Stream connected(const std::string& key, std::vector<int> who, int dev) {
    std::unique_lock<std::mutex> g(m);
    auto it = streams.find(key); if (it != streams.end()) return it->second;
    g.unlock();
    std::string d = std::to_string(dev);  // all meet, on the host, as ncclCommInitRank does
    store->set("c/" + key + "/" + std::to_string(rank_), std::vector<uint8_t>(d.begin(), d.end()));
    std::set<std::string> devices;
    for (int r : who) { auto v = store->get("c/" + key + "/" + std::to_string(r)); devices.insert(std::string(v.begin(), v.end())); }
    TORCH_CHECK(devices.size() == who.size(), "NCCL error: invalid usage. Duplicate GPU detected : rank ", rank_, " both on CUDA device ", dev);
    fake::count("nccl connection", key);
    g.lock();
    return streams.emplace(key, fake::new_stream(dev)).first->second;
  }
  template <class F> W run(OpType t, const std::string& key, std::vector<int> who, std::vector<Tensor> all, F f) {
    for (auto& x : all) { TORCH_CHECK(x.device().type() == c10::kCUDA, "No backend type associated with device type cpu"); TORCH_CHECK(x.is_contiguous() || t == OpType::UNKNOWN, "Tensors must be contiguous"); }
    int dev = all.at(0).device().index(); c10::DeviceGuard guard(all[0].device());
    auto s = connected(key, who, dev);
    fake::block(s, fake::record(fake::current(dev)));
    fake::push(s, "nccl", f);
    return c10::make_intrusive<FakeWork>(t, s, fake::record(s), std::move(all));
  }
  std::vector<int> everyone() { std::vector<int> v; for (int i = 0; i < size_; i++) v.push_back(i); return v; }
  W all(OpType t, std::vector<Tensor> ts, std::function<W(std::vector<Tensor>&)> f) {
    auto a = std::make_shared<std::vector<fake::Alias>>(); for (auto& x : ts) a->push_back(fake::raw(x));
    return run(t, "all", everyone(), ts, [a, f] { std::vector<Tensor> v; for (auto& x : *a) v.push_back(x.make()); auto w = f(v); if (w) w->wait(); });
  }
  std::string pair(int peer) { return std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer)); }
  W send(std::vector<Tensor>& ts, int dst, int) override { auto a = fake::raw(ts[0]); auto g = gloo; return run(OpType::SEND, pair(dst), {rank_, dst}, ts, [a, g, dst] { std::vector<Tensor> v{a.make()}; g->send(v, dst, 7)->wait(); }); }
  W recv(std::vector<Tensor>& ts, int src, int) override { auto a = fake::raw(ts[0]); auto g = gloo; return run(OpType::RECV, pair(src), {rank_, src}, ts, [a, g, src] { std::vector<Tensor> v{a.make()}; g->recv(v, src, 7)->wait(); }); }
  W allreduce(std::vector<Tensor>& ts, const AllreduceOptions& o) override { auto g = gloo; return all(OpType::ALLREDUCE, ts, [g, o](std::vector<Tensor>& v) { return g->allreduce(v, o); }); }
  W broadcast(std::vector<Tensor>& ts, const BroadcastOptions& o) override { auto g = gloo; return all(OpType::BROADCAST, ts, [g, o](std::vector<Tensor>& v) { return g->broadcast(v, o); }); }
  W reduce(std::vector<Tensor>& ts, const ReduceOptions& o) override { auto g = gloo; return all(OpType::REDUCE, ts, [g, o](std::vector<Tensor>& v) { return g->reduce(v, o); }); }
  W allgather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& in, const AllgatherOptions& o) override {
    auto g = gloo; auto ts = outs[0]; ts.push_back(in[0]);
    return all(OpType::ALLGATHER, ts, [g, o](std::vector<Tensor>& v) { std::vector<Tensor> i{v.back()}; std::vector<std::vector<Tensor>> os{std::vector<Tensor>(v.begin(), v.end() - 1)}; return g->allgather(os, i, o); });
  }
  W _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& o) override { auto g = gloo; return all(OpType::_ALLGATHER_BASE, {out, in}, [g, o](std::vector<Tensor>& v) { return g->_allgather_base(v[0], v[1], o); }); }
  W alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const AllToAllOptions& o) override {
    auto g = gloo; auto a = os, b = is; return all(OpType::ALLTOALL_BASE, {out, in}, [g, a, b, o](std::vector<Tensor>& v) { auto x = a, y = b; return g->alltoall_base(v[0], v[1], x, y, o); });
  }
  W barrier(const BarrierOptions&) override { auto t = at::zeros({1}, at::TensorOptions().device(c10::Device(c10::kCUDA, fake_current()))); std::vector<Tensor> v{t}; auto w = allreduce(v, AllreduceOptions()); w->wait(); return w; }
  static int fake_current() { return fake::current(-1).device_index(); }
};
PYBIND11_MODULE(standin_nccl, m) {
  m.def("create", [](c10::intrusive_ptr<Backend> g, c10::intrusive_ptr<Store> s, int r, int n) -> c10::intrusive_ptr<Backend> { return c10::make_intrusive<FakeNccl>(g, s, r, n); }, py::call_guard<py::gil_scoped_release>());
}
