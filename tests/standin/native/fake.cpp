// A device "cuda" in a CPU-only torch: host memory behind streams that are threads.
#include "fake.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <sys/syscall.h>
#include <unistd.h>

namespace fake {
using namespace c10;
static int env(const char* n, int d) { auto e = getenv(n); return e ? atoi(e) : d; }
int device_count() { static int n = env("LIGHTNING_GPP_STANDIN_DEVICES", 4); return n; }
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static int g_delay_us = env("LIGHTNING_GPP_STANDIN_DELAY_US", 0);

void Sig::set() { std::lock_guard<std::mutex> g(m); at = now(); done = true; cv.notify_all(); }
void Sig::wait() { std::unique_lock<std::mutex> g(m); cv.wait(g, [&] { return done; }); }
bool Sig::query() { std::lock_guard<std::mutex> g(m); return done; }

// Streams ------------------------------------------------------------------------------------
struct Queue {
  std::mutex m; std::condition_variable cv; std::deque<std::pair<const char*, std::function<void()>>> q;
  bool busy = false; std::mt19937 rng; std::thread t;
  explicit Queue(int seed) : rng(seed), t([this] { run(); }) { t.detach(); }
  void run() {
    at::set_num_threads(1);
    at::AutoDispatchBelowAutograd below;
    for (;;) {
      std::pair<const char*, std::function<void()>> f;
      { std::unique_lock<std::mutex> g(m); busy = false; cv.notify_all(); cv.wait(g, [&] { return !q.empty(); }); f = std::move(q.front()); q.pop_front(); busy = true; }
      if (g_delay_us && f.first[0] != '!') {
        int us = g_delay_us / 2 + rng() % (g_delay_us + 1);
        if (rng() % 16 == 0) us *= 8;
        usleep(us);
      }
      try { f.second(); } catch (const std::exception& e) {
        fprintf(stderr, "FAKECUDA: an asynchronous error in %s: %s\n", f.first, e.what()); fflush(stderr); _exit(86);
      }
    }
  }
};
static std::mutex g_m;
static std::map<std::pair<int, int64_t>, Queue*>& queues() { static auto* m = new std::map<std::pair<int, int64_t>, Queue*>; return *m; }
static Queue* queue(Stream s) {
  std::lock_guard<std::mutex> g(g_m);
  auto& q = queues()[{s.device_index(), s.id()}];
  if (!q) q = new Queue(int(s.id() * 7 + s.device_index() + env("LIGHTNING_GPP_STANDIN_SEED", 0) * 1000 + env("RANK", 0) * 100));
  return q;
}
static thread_local int t_device = 0;
static thread_local std::map<int, int64_t> t_stream;
static std::atomic<int64_t> g_next{1};
Stream new_stream(DeviceIndex d) { return Stream(Stream::UNSAFE, Device(kCUDA, d < 0 ? t_device : d), g_next++); }
Stream current(DeviceIndex d) { if (d < 0) d = t_device; auto it = t_stream.find(d); return Stream(Stream::UNSAFE, Device(kCUDA, d), it == t_stream.end() ? 0 : it->second); }
void push(Stream s, const char* what, std::function<void()> f) { auto q = queue(s); std::lock_guard<std::mutex> g(q->m); q->q.emplace_back(what, std::move(f)); q->cv.notify_all(); }
SigP record(Stream s) { auto sig = std::make_shared<Sig>(); push(s, "!record", [sig] { sig->set(); }); return sig; }
void block(Stream s, SigP sig) { push(s, "!block", [sig] { sig->wait(); }); }
static void drain(Stream s) { record(s)->wait(); }
static void drain_device(int d) {
  std::vector<int64_t> ids;
  { std::lock_guard<std::mutex> g(g_m); for (auto& e : queues()) if (e.first.first == d) ids.push_back(e.first.second); }
  for (auto id : ids) drain(Stream(Stream::UNSAFE, Device(kCUDA, d), id));
}

// Counters ------------------------------------------------------------------------------------
static std::mutex c_m; static std::map<std::string, int64_t> g_counts; static std::function<void(const char*, const char*)>* g_hook = nullptr;
void count(const char* why, const std::string& what) {
  { std::lock_guard<std::mutex> g(c_m); g_counts[std::string(why)]++; }
  if (g_hook) (*g_hook)(why, what.c_str());
}

// Memory --------------------------------------------------------------------------------------
struct Block { void* p; size_t n; int device; Stream stream; bool pinned; std::vector<Stream> used; std::vector<SigP> sigs; };
static std::map<std::tuple<int, int64_t, size_t>, std::vector<void*>> g_free;
static std::map<void*, Block*> g_pinned; static std::vector<Block*> g_waiting;
static std::map<int, int64_t> g_bytes, g_peak;
static int64_t g_allocs = 0;
static void reclaim_locked() {
  for (size_t i = 0; i < g_waiting.size();) {
    auto b = g_waiting[i]; bool ok = true;
    for (auto& s : b->sigs) ok = ok && s->query();
    if (!ok) { ++i; continue; }
    memset(b->p, 0xff, b->n);
    g_free[{b->pinned ? -1 : b->device, b->pinned ? 0 : b->stream.id(), b->n}].push_back(b->p);
    delete b; g_waiting.erase(g_waiting.begin() + i);
  }
}
static std::mutex m_m;
static void release(void* ctx) {
  auto b = static_cast<Block*>(ctx);
  std::vector<SigP> extra;
  for (auto& s : b->used) extra.push_back(record(s));
  std::lock_guard<std::mutex> g(m_m);
  if (!b->pinned) g_bytes[b->device] -= int64_t(b->n); else g_pinned.erase(b->p);
  for (auto& s : extra) b->sigs.push_back(s);
  if (b->sigs.empty() && !b->pinned) {  // of use to its own stream at once, in the order of that stream
    void* p = b->p; size_t n = b->n;
    push(b->stream, "!poison", [p, n] { memset(p, 0xff, n); });
    g_free[{b->device, b->stream.id(), n}].push_back(p); delete b;
  } else g_waiting.push_back(b);
}
static DataPtr take(size_t n, int device, Stream s, bool pinned) {
  n = (std::max<size_t>(n, 1) + 511) / 512 * 512;
  std::lock_guard<std::mutex> g(m_m);
  reclaim_locked();
  auto& list = g_free[{pinned ? -1 : device, pinned ? 0 : s.id(), n}];
  void* p; 
  if (!list.empty()) { p = list.back(); list.pop_back(); } else { p = aligned_alloc(512, n); memset(p, 0xff, n); }
  auto b = new Block{p, n, device, s, pinned, {}, {}};
  if (pinned) g_pinned[p] = b; else { g_bytes[device] += int64_t(n); g_peak[device] = std::max(g_peak[device], g_bytes[device]); g_allocs++; }
  return DataPtr(p, b, &release, pinned ? Device(kCPU) : Device(kCUDA, device));
}
static Block* pinned_block(const void* p) {
  std::lock_guard<std::mutex> g(m_m);
  auto it = g_pinned.upper_bound(const_cast<void*>(p));
  if (it == g_pinned.begin()) return nullptr;
  auto b = (--it)->second;
  return p < static_cast<char*>(b->p) + b->n ? b : nullptr;
}
struct DevAlloc final : Allocator {
  DataPtr allocate(size_t n) override { return take(n, t_device, current(t_device), false); }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};
struct PinAlloc final : Allocator {
  DataPtr allocate(size_t n) override { return take(n, 0, Stream(Stream::UNSAFE, Device(kCUDA, 0), 0), true); }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};
static DevAlloc g_dev; static PinAlloc g_pin;

// Guard and hooks -----------------------------------------------------------------------------
struct Ev { SigP sig; };
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device d) const override { auto o = t_device; if (d.index() >= 0) t_device = d.index(); return Device(kCUDA, o); }
  Device getDevice() const override { return Device(kCUDA, t_device); }
  void setDevice(Device d) const override { if (d.index() >= 0) t_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) t_device = d.index(); }
  Stream getStream(Device d) const override { return current(d.index()); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kCUDA, d.index() < 0 ? t_device : d.index()), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return new_stream(d.index()); }
  Stream getNewStream(Device d, int) const override { return new_stream(d.index()); }
  Stream exchangeStream(Stream s) const override { auto o = current(s.device_index()); t_stream[s.device_index()] = s.id(); return o; }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Ev*>(e); }
  void record(void** e, const Stream& s, const DeviceIndex, const EventFlag) const override { if (!*e) *e = new Ev; static_cast<Ev*>(*e)->sig = fake::record(s); }
  void block(void* e, const Stream& s) const override { if (e && static_cast<Ev*>(e)->sig) fake::block(s, static_cast<Ev*>(e)->sig); }
  bool queryEvent(void* e) const override { return !e || !static_cast<Ev*>(e)->sig || static_cast<Ev*>(e)->sig->query(); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count()); }
  bool queryStream(const Stream& s) const override { auto q = queue(s); std::lock_guard<std::mutex> g(q->m); return q->q.empty() && !q->busy; }
  void synchronizeStream(const Stream& s) const override { count("stream.synchronize", ""); drain(s); }
  void synchronizeEvent(void* e) const override { count("event.synchronize", ""); if (e && static_cast<Ev*>(e)->sig) static_cast<Ev*>(e)->sig->wait(); }
  void synchronizeDevice(const DeviceIndex d) const override { count("device.synchronize", ""); drain_device(d < 0 ? t_device : d); }
  void recordDataPtrOnStream(const DataPtr& p, const Stream& s) const override {
    auto b = static_cast<Block*>(p.get_context()); if (!b || p.device().type() != kCUDA) return;
    std::lock_guard<std::mutex> g(m_m); if (s.id() != b->stream.id()) b->used.push_back(s);
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override { return 1e3 * (static_cast<Ev*>(b)->sig->at - static_cast<Ev*>(a)->sig->at); }
};
static std::vector<at::Generator>& gens() { static auto* g = [] { auto v = new std::vector<at::Generator>; for (int i = 0; i < device_count(); i++) v->push_back(at::make_generator<at::CPUGeneratorImpl>(i)); return v; }(); return *g; }
}  // namespace fake
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return fake::gens()[d < 0 ? fake::t_device : d]; }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(0); }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, fake::t_device); }
  bool isPinnedPtr(const void* p) const override { return fake::pinned_block(p) != nullptr; }
  DeviceIndex current_device() const override { return fake::t_device; }
  DeviceIndex deviceCount() const override { return fake::device_count(); }
  DeviceIndex getCurrentDevice() const override { return fake::t_device; }
  void setCurrentDevice(DeviceIndex d) const override { fake::t_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto o = fake::t_device; fake::t_device = d; return o; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  Allocator* getPinnedMemoryAllocator() const override { return &fake::g_pin; }
  Allocator* getCUDADeviceAllocator() const override { return &fake::g_dev; }
  int getNumGPUs() const override { return fake::device_count(); }
  void deviceSynchronize(DeviceIndex d) const override { fake::count("device.synchronize", ""); fake::drain_device(d < 0 ? fake::t_device : d); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
namespace fake {
static c10::impl::DeviceGuardImplRegistrar r_guard(kCUDA, new Guard);
static struct R { R() { c10::SetAllocator(kCUDA, &g_dev); } } r_alloc;

// Operators -----------------------------------------------------------------------------------
using at::Tensor; using at::IValue;
Alias raw(const Tensor& t) { return {t.numel() ? const_cast<void*>(t.const_data_ptr()) : nullptr, t.sizes().vec(), t.strides().vec(), t.scalar_type()}; }
Tensor Alias::make() const { return at::from_blob(p, sizes, strides, at::TensorOptions().dtype(t).device(at::kCPU)); }
static bool on_dev(const Tensor& t) { return t.defined() && t.device().type() == kCUDA; }
static Tensor new_like(const Tensor& m, int d) { return at::empty_strided(m.sizes(), m.strides(), m.options().device(Device(kCUDA, d))); }

static Tensor to_meta(const Tensor& t) {
  if (!t.defined()) return t;
  auto m = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(at::kMeta));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) m.unsafeGetTensorImpl()->set_wrapped_number(true);
  return m;
}
template <class F> static IValue map_tensors(const IValue& v, F f) {
  if (v.isTensor()) return IValue(f(v.toTensor()));
  if (v.isTensorList()) { std::vector<Tensor> o; for (const Tensor& t : v.toTensorVector()) o.push_back(f(t)); return IValue(o); }
  if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> o; for (const std::optional<Tensor>& t : v.toOptionalTensorList()) o.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt); return IValue(o); }
  return v;
}
template <class F> static void each_tensor(const IValue& v, F f) { map_tensors(v, [&](const Tensor& t) { f(t); return t; }); }

struct Arg { IValue plain; int kind = 0; std::vector<std::pair<int, std::pair<Alias, Tensor>>> ts; };  // of a tensor: 0 none, 1 device, 2 host
static Arg to_arg(const IValue& v) {
  Arg a; 
  a.kind = v.isTensor() ? 1 : v.isTensorList() ? 2 : v.isOptionalTensorList() ? 3 : 0;
  if (!a.kind) { a.plain = v; return a; }
  auto one = [&](const Tensor& t) {
    if (!t.defined()) a.ts.push_back({0, {}});
    else if (on_dev(t)) a.ts.push_back({1, {raw(t), {}}});
    else { auto c = t.is_meta() ? t : t.clone(); if (t.unsafeGetTensorImpl()->is_wrapped_number()) c.unsafeGetTensorImpl()->set_wrapped_number(true); a.ts.push_back({2, {Alias{}, c}}); }
    return t;
  };
  if (a.kind == 3) { for (const std::optional<Tensor>& t : v.toOptionalTensorList()) one(t ? *t : Tensor()); }
  else each_tensor(v, one);
  return a;
}
static IValue from_arg(const Arg& a) {
  auto one = [](const std::pair<int, std::pair<Alias, Tensor>>& e) { return e.first == 1 ? e.second.first.make() : e.second.second; };
  if (!a.kind) return a.plain;
  if (a.kind == 1) return IValue(one(a.ts[0]));
  if (a.kind == 2) { std::vector<Tensor> o; for (auto& e : a.ts) o.push_back(one(e)); return IValue(o); }
  c10::List<std::optional<Tensor>> o; for (auto& e : a.ts) o.push_back(e.first ? std::optional<Tensor>(one(e)) : std::nullopt); return IValue(o);
}
static bool mixes(const std::string& n) {  // operators that take tensors of the host beside those of the device
  static const std::set<std::string> s{"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::index.Tensor_out", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::_unsafe_index.Tensor", "aten::_amp_foreach_non_finite_check_and_unscale_"};
  return s.count(n) > 0;
}
static bool syncs(const std::string& n) {  // that wait for the device on a GPU, too
  static const std::set<std::string> s{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_unique", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor", "aten::_local_scalar_dense", "aten::nonzero_static"};
  return s.count(n) > 0;
}

static void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema(); const auto& args = schema.arguments(); size_t n = args.size(), base = stack->size() - n;
  std::string name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  int dev = -1; bool host = false, random = false, is_out = false, empty_out = false;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[base + i];
    each_tensor(v, [&](const Tensor& t) {
      if (on_dev(t)) { TORCH_CHECK(dev < 0 || dev == t.device().index() , "Expected all tensors to be on the same device, but found at least two devices, cuda:", dev, " and ", t.device(), "! (", name, ")"); dev = t.device().index(); }
      else if (t.defined() && t.dim() > 0 && t.device().is_cpu()) host = true;
      else if (t.defined() && t.is_meta()) TORCH_CHECK(false, "a meta tensor beside one of the device (", name, ")");
      if (t.defined() && (t.layout() != at::kStrided)) TORCH_CHECK_NOT_IMPLEMENTED(false, "sparse ", name);
    });
    if (v.isDevice() && v.toDevice().type() == kCUDA && dev < 0) dev = v.toDevice().index() < 0 ? t_device : v.toDevice().index();
    if (args[i].alias_info() && args[i].alias_info()->isWrite() && args[i].kwarg_only()) { is_out = true; each_tensor(v, [&](const Tensor& t) { if (t.numel() == 0) empty_out = true; }); }
  }
  TORCH_CHECK(!(host && dev >= 0) || mixes(name), "Expected all tensors to be on the same device, but found at least two devices, cuda:", dev, " and cpu! (", name, ")");
  if (host) count("h2d inside an operator", name);
  if (dev < 0) dev = t_device;
  c10::DeviceGuard guard(Device(kCUDA, dev));
  auto s = current(dev);
  bool seeded = op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && schema.name().find("dropout") != std::string::npos;
  for (size_t i = 0; i < n; i++) if (args[i].name() == "generator") { random = true; auto& v = (*stack)[base + i]; if (v.isNone()) v = IValue(gens()[dev]); }
  (void)random;
  bool tensors_only = true, views = false;
  for (auto& r : schema.returns()) {
    if (r.alias_info() && !r.alias_info()->isWrite()) views = true;
    auto t = r.type()->str(); if (t.find("Tensor") == std::string::npos) tensors_only = false;
  }
  TORCH_CHECK(!views, "fakecuda: the view ", name, " is not registered");
  bool wait = syncs(name);
  auto device_to = [&](c10::Stack& st, Device d) { for (auto& v : st) if (v.isDevice() && v.toDevice().type() == kCUDA) v = IValue(d); };

  // Shapes of what is new
  std::vector<IValue> returned; std::vector<std::vector<Tensor>> fresh; bool known = tensors_only && !wait && !seeded;
  bool any_write = false; for (auto& a : args) any_write |= a.alias_info() && a.alias_info()->isWrite();
  (void)empty_out;
  if (known && (!any_write || is_out)) {
    c10::Stack meta; for (size_t i = 0; i < n; i++) meta.push_back(map_tensors((*stack)[base + i], to_meta));
    for (size_t i = 0; i < n; i++) if (args[i].name() == "generator") meta[i] = IValue();
    device_to(meta, Device(at::kMeta));
    std::vector<IValue> given(meta.begin(), meta.end());
    try {
      at::AutoDispatchBelowAutograd below;
      op.callBoxed(&meta);
      if (is_out) {
        for (size_t i = 0; i < n; i++) if (args[i].alias_info() && args[i].alias_info()->isWrite()) {
          std::vector<Tensor> real, m; each_tensor((*stack)[base + i], [&](const Tensor& t) { real.push_back(t); }); each_tensor(given[i], [&](const Tensor& t) { m.push_back(t); });
          for (size_t k = 0; k < real.size(); k++) if (real[k].sizes() != m[k].sizes()) real[k].resize_(m[k].sizes());
        }
      } else {
        size_t nr = schema.returns().size();
        for (size_t r = 0; r < nr; r++) {
          std::vector<Tensor> f;
          auto v = map_tensors(meta[meta.size() - nr + r], [&](const Tensor& m) { Tensor t; if (m.defined()) t = new_like(m, dev); f.push_back(t); return t; });
          returned.push_back(v); fresh.push_back(f);
        }
      }
    } catch (const std::exception& e) { known = false; returned.clear(); fresh.clear(); if (getenv("LIGHTNING_GPP_STANDIN_VERBOSE")) fprintf(stderr, "FAKECUDA: no shapes of %s: %.200s\n", name.c_str(), e.what()); }
  }
  auto packed = std::make_shared<std::vector<Arg>>(); for (size_t i = 0; i < n; i++) packed->push_back(to_arg((*stack)[base + i]));
  for (auto& a : *packed) if (a.plain.isDevice() && a.plain.toDevice().type() == kCUDA) a.plain = IValue(Device(at::kCPU));
  auto outs = std::make_shared<std::vector<std::pair<bool, Alias>>>();
  for (auto& f : fresh) for (auto& t : f) outs->push_back({t.defined(), t.defined() ? raw(t) : Alias{}});
  auto results = std::make_shared<c10::Stack>();
  bool keep = !known && !(tensors_only && any_write);
  size_t nr = schema.returns().size();
  auto into = std::make_shared<std::vector<std::pair<size_t, Alias>>>();
  if (is_out) for (size_t i = 0; i < n; i++) if (args[i].kwarg_only() && args[i].alias_info() && args[i].alias_info()->isWrite() && (*packed)[i].kind == 1) into->push_back({i, (*packed)[i].ts[0].second.first});
  const char* stat = strdup(name.c_str());  // leaks; names are few
  auto work = [op, packed, outs, results, keep, nr, seeded, dev, stat, into] {
    c10::Stack st; for (auto& a : *packed) st.push_back(from_arg(a));
    std::vector<Tensor> made; for (auto& e : *into) { made.push_back(at::empty({0}, at::TensorOptions().dtype(e.second.t))); st[st.size() - packed->size() + e.first] = IValue(made.back()); }
    at::Tensor host_state; auto host_gen = at::detail::getDefaultCPUGenerator();
    if (seeded) { std::lock_guard<std::mutex> g(host_gen.mutex()); host_state = host_gen.get_state(); host_gen.set_state(gens()[dev].get_state()); }
    op.callBoxed(&st);
    if (seeded) { std::lock_guard<std::mutex> g(host_gen.mutex()); gens()[dev].set_state(host_gen.get_state()); host_gen.set_state(host_state); }
    for (size_t i = 0; i < made.size(); i++) { auto d = (*into)[i].second.make(); TORCH_CHECK(d.sizes() == made[i].sizes(), stat, ": an output of ", made[i].sizes(), " for ", d.sizes()); if (d.numel()) d.copy_(made[i]); }
    if (keep) { results->assign(st.end() - nr, st.end()); return; }
    size_t k = 0;
    for (size_t r = 0; r < nr && !outs->empty(); r++) each_tensor(st[st.size() - nr + r], [&](const Tensor& t) { auto& o = (*outs)[k++]; if (o.first && t.defined()) { auto d = o.second.make(); if (d.numel() && t.numel()) d.copy_(t); } });
  };
  if (keep) {
    if (wait) count(name == "aten::equal" ? "equal" : "shape from data", name); else count("(stand-in waits)", name);
    std::exception_ptr error; auto sig = std::make_shared<Sig>();
    push(s, stat, [&, sig] { try { work(); } catch (...) { error = std::current_exception(); } sig->set(); });
    sig->wait(); if (error) std::rethrow_exception(error);
    for (auto& v : *results) returned.push_back(map_tensors(v, [&](const Tensor& t) { if (!t.defined()) return t; auto d = new_like(t, dev); if (d.numel()) { drain(s); raw(d).make().copy_(t); } return d; }));
  } else {
    push(s, stat, work);
    if (any_write) for (auto& r : schema.returns()) {  // what was given comes back
      for (size_t i = 0; i < n; i++) if (args[i].alias_info() && args[i].alias_info()->isWrite() && r.alias_info() && *r.alias_info() == *args[i].alias_info()) { returned.push_back((*stack)[base + i]); break; }
    }
    TORCH_CHECK(returned.size() == nr, "fakecuda: returns of ", name);
  }
  stack->erase(stack->end() - n, stack->end());
  for (auto& v : returned) stack->push_back(v);
}

static Tensor k_empty(c10::IntArrayRef size, std::optional<at::ScalarType> t, std::optional<at::Layout>, std::optional<Device> d, std::optional<bool>, std::optional<at::MemoryFormat> f) {
  c10::DeviceGuard g(c10::device_or_default(d)); return at::detail::empty_generic(size, &g_dev, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(t), f);
}
static Tensor k_empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> t, std::optional<at::Layout>, std::optional<Device> d, std::optional<bool>) {
  c10::DeviceGuard g(c10::device_or_default(d)); return at::detail::empty_strided_generic(size, stride, &g_dev, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(t));
}
static const Tensor& k_resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t n = 1; for (auto x : size) n *= x;
  size_t bytes = (n + self.storage_offset()) * self.element_size(); auto storage = self.storage();
  if (bytes > storage.nbytes()) {
    c10::DeviceGuard g(self.device()); auto p = g_dev.allocate(bytes); void* d = p.get(); const void* o = storage.data(); size_t c = storage.nbytes();
    if (c) push(current(self.device().index()), "resize_", [=] { memcpy(d, o, c); });
    storage.set_data_ptr_noswap(std::move(p)); storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size); return self;
}
static Tensor& k_set_storage(Tensor& self, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(s)); self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) self.unsafeGetTensorImpl()->set_sizes_contiguous(size); else self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride); return self;
}
static Tensor& k_set_source(Tensor& self, at::Storage s) { int64_t n = s.nbytes() / self.element_size(); return k_set_storage(self, std::move(s), 0, {n}, {1}); }
static Tensor& k_set_tensor(Tensor& self, const Tensor& src) { return k_set_storage(self, src.storage(), src.storage_offset(), src.sizes(), src.strides()); }
static void uses_pinned(const Tensor& host, SigP sig) { if (auto b = pinned_block(host.storage().data())) { std::lock_guard<std::mutex> g(m_m); b->sigs.push_back(sig); } }
static Tensor& k_copy(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  if (self.is_meta() || src.is_meta()) TORCH_CHECK(false, "copy_ with a meta tensor");
  Tensor from = src.sizes() == self.sizes() ? src : src.expand(self.sizes());
  if (!self.numel()) return self;
  if (on_dev(self) && on_dev(src)) {
    auto s = current(src.device().index()), d = current(self.device().index()); auto a = raw(self), b = raw(from);
    if (s != d) block(s, record(d));
    push(s, "copy d2d", [a, b] { a.make().copy_(b.make()); });
    if (s != d) block(d, record(s));
  } else if (on_dev(self)) {
    auto s = current(self.device().index()); auto a = raw(self);
    bool pinned = src.device().is_cpu() && pinned_block(src.storage().data());
    if (non_blocking && pinned) { auto b = raw(from); push(s, "copy h2d", [a, b] { a.make().copy_(b.make()); }); uses_pinned(src, record(s)); }
    else { auto c = from.clone(); push(s, "copy h2d", [a, c] { a.make().copy_(c); }); if (!non_blocking) { count(src.dim() == 0 ? "h2d copy, blocking (number)" : pinned ? "h2d copy, blocking (pinned)" : "h2d copy, blocking (pageable)", ""); drain(s); } else count("h2d copy, pageable, not blocking", ""); }
  } else {
    auto s = current(src.device().index()); auto b = raw(from), a = raw(self);
    bool pinned = pinned_block(self.storage().data());
    push(s, "copy d2h", [a, b] { a.make().copy_(b.make()); });
    if (non_blocking && pinned) uses_pinned(self, record(s));
    else { count("d2h copy, blocking", ""); drain(s); }
  }
  return self;
}
static Tensor k_copy_from(const Tensor& self, const Tensor& dst, bool nb) { Tensor d = dst; return k_copy(d, self, nb); }
static at::Scalar k_item(const Tensor& self) { count("item", ""); auto s = current(self.device().index()); drain(s); return raw(self).make().item(); }
static void k_record_stream(Tensor& self, at::Stream s) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), s); }
static Tensor k_as_strided(const Tensor& t, c10::IntArrayRef a, c10::IntArrayRef b, std::optional<int64_t> o) { return at::native::as_strided_tensorimpl(t, a, b, o); }
static Tensor k_view(const Tensor& t, c10::IntArrayRef a) { return at::native::view(t, a); }
static Tensor k_unfold(const Tensor& t, int64_t a, int64_t b, int64_t c) { return at::native::unfold(t, a, b, c); }
static Tensor k_vac(const Tensor& t) { return at::native::view_as_complex(t); }
static Tensor k_var(const Tensor& t) { return at::native::view_as_real(t); }
static Tensor k_reshape_alias(const Tensor& t, c10::IntArrayRef a, c10::IntArrayRef b) { return at::native::_reshape_alias(t, a, b); }
}  // namespace fake
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &fake::k_empty); m.impl("empty_strided", &fake::k_empty_strided); m.impl("resize_", &fake::k_resize);
  m.impl("as_strided", &fake::k_as_strided); m.impl("view", &fake::k_view); m.impl("_reshape_alias", &fake::k_reshape_alias);
  m.impl("unfold", &fake::k_unfold); m.impl("view_as_real", &fake::k_var); m.impl("view_as_complex", &fake::k_vac);
  m.impl("set_.source_Storage_storage_offset", &fake::k_set_storage); m.impl("set_.source_Storage", &fake::k_set_source); m.impl("set_.source_Tensor", &fake::k_set_tensor);
  m.impl("copy_", &fake::k_copy); m.impl("_copy_from", &fake::k_copy_from); m.impl("_local_scalar_dense", &fake::k_item); m.impl("record_stream", &fake::k_record_stream);
}
extern "C" {
void fake_set_hook(void (*f)(const char*, const char*)) { fake::g_hook = f ? new std::function<void(const char*, const char*)>(f) : nullptr; }
int64_t fake_bytes(int d, int what) { std::lock_guard<std::mutex> g(fake::m_m); return what == 0 ? fake::g_bytes[d] : what == 1 ? fake::g_peak[d] : fake::g_allocs; }
void fake_reset_peak(int d) { std::lock_guard<std::mutex> g(fake::m_m); fake::g_peak[d] = fake::g_bytes[d]; }
void fake_drain(int d) { fake::drain_device(d); }
void fake_set_delay(int us) { fake::g_delay_us = us; }
void fake_seed(int d, uint64_t seed) { fake::gens()[d].set_current_seed(seed); }
int fake_rng(int d, char* b, int n, int set) {
  auto g = fake::gens()[d];
  if (set) { auto t = at::empty({n}, at::kByte); memcpy(t.data_ptr(), b, n); g.set_state(t); return n; }
  auto t = g.get_state(); int k = int(t.numel()); if (k <= n) memcpy(b, t.data_ptr(), k); return k;
}
int fake_device() { return fake::t_device; }
void fake_set_device(int d) { fake::t_device = d; }
// the counters as one text, name\tnumber\n; and back to nothing
int fake_counts(char* out, int n, int reset) { std::lock_guard<std::mutex> g(fake::c_m); std::string s; for (auto& e : fake::g_counts) s += e.first + "\t" + std::to_string(e.second) + "\n"; if (reset) fake::g_counts.clear(); snprintf(out, n, "%s", s.c_str()); return int(s.size()); }
}
