// GPUs for tests, inside a CPU build of torch: device type CUDA gets memory of its own, kernels by way of the CPU, and "nccl".
//
// What a test may rely on: devices don't mix; memory nobody wrote is NaN and counted in blocks of 512 bytes; a generator has
// 16 bytes of state; layer norm keeps float32 statistics; attention keeps what flash's or cuDNN's kernel keeps; an exchange
// takes tensors of GPUs only, its result is NaN until somebody waits, and its input must stay as it is until then.
// What it has not: streams, times, memory-efficient attention, anything of NCCL itself.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cmath>
#include <mutex>
#include <unordered_map>

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::SymIntArrayRef;
using Maybe = std::optional<Tensor>;
#define INTS(sizes) C10_AS_INTARRAYREF_SLOW(sizes)
namespace {

std::string setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}
const int gpus = std::stoi(setting("STANDIN_GPUS", "1"));
const int64_t capacity = std::stoll(setting("STANDIN_BYTES", "85899345920"));
thread_local DeviceIndex current = 0;

// ---- memory

struct Memory { int64_t held = 0, peak = 0, asked = 0, allowed = capacity; } memory[16];
struct Block { int64_t bytes, asked; DeviceIndex gpu; };
struct Event { bool made; uintptr_t start; int64_t bytes; };
std::unordered_map<void*, Block> blocks;
std::vector<Event> events[16];
bool recording = false;
std::mutex counting;

void release(void* start) {
  std::lock_guard<std::mutex> lock(counting);
  auto found = blocks.find(start);
  if (found == blocks.end()) return;
  auto& m = memory[found->second.gpu];
  m.held -= found->second.bytes, m.asked -= found->second.asked;
  if (recording) events[found->second.gpu].push_back({false, uintptr_t(start), found->second.bytes});
  blocks.erase(found);
  free(start);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    Device device(at::kCUDA, current);
    if (!asked) return {nullptr, nullptr, &release, device};
    int64_t bytes = (asked + 511) / 512 * 512;
    std::lock_guard<std::mutex> lock(counting);
    auto& m = memory[current];
    TORCH_CHECK_WITH(OutOfMemoryError, m.held + bytes <= m.allowed, "CUDA out of memory. Tried to allocate ", asked / 1048576.0,
                     " MiB. GPU ", int(current), " has a total capacity of ", capacity / 1073741824.0, " GiB. ",
                     m.allowed / 1073741824.0, " GiB allowed; Of the allocated memory ", m.held / 1073741824.0,
                     " GiB is allocated by PyTorch");
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 512, bytes) == 0, "no memory left on the host");
    memset(start, 0xFF, bytes);
    m.held += bytes, m.asked += asked, m.peak = std::max(m.peak, m.held);
    blocks[start] = {bytes, int64_t(asked), current};
    if (recording) events[current].push_back({true, uintptr_t(start), bytes});
    return {start, start, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} allocator;

// ---- random numbers

struct Generator final : c10::GeneratorImpl {
  uint64_t state[2] = {c10::default_rng_seed_val, 0};  // seed, offset
  explicit Generator(DeviceIndex gpu) : GeneratorImpl(Device(at::kCUDA, gpu), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { state[0] = seed, state[1] = 0; }
  uint64_t current_seed() const override { return state[0]; }
  uint64_t seed() override { return set_current_seed(c10::detail::getNonDeterministicRandom()), state[0]; }
  void set_offset(uint64_t offset) override { state[1] = offset; }
  uint64_t get_offset() const override { return state[1]; }
  void set_state(const c10::TensorImpl& from) override {
    TORCH_CHECK(from.numel() == 16 && from.device().is_cpu(), "RNG state is wrong size");
    memcpy(state, from.data(), 16);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor bytes = at::empty({16}, at::kByte);
    memcpy(bytes.data_ptr(), state, 16);
    return bytes.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device().index());
    memcpy(other->state, state, 16);
    return other;
  }
  uint64_t draw() {  // a seed for the CPU's generator
    uint64_t mixed = (state[0] + 1) * 0x9E3779B97F4A7C15ull + state[1] * 0xD1B54A32D192ED03ull;
    state[1] += 4;
    return mixed ^ (mixed >> 32);
  }
};
std::vector<at::Generator>& generators() {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int gpu = 0; gpu < gpus; gpu++) made->push_back(at::make_generator<Generator>(gpu));
    return made;
  }();
  return *all;
}
DeviceIndex index_or_current(DeviceIndex gpu) { return gpu < 0 ? current : gpu; }

// ---- the device

void check(Device d) { TORCH_CHECK(d.index() >= 0 && d.index() < gpus, "CUDA error: invalid device ordinal"); }
DeviceIndex exchange(DeviceIndex gpu) { return gpu < 0 ? current : std::exchange(current, gpu); }

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return gpus > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex gpu = -1) const override { return generators()[index_or_current(gpu)]; }
  at::Generator getNewGenerator(DeviceIndex gpu = -1) const override { return at::make_generator<Generator>(index_or_current(gpu)); }
  DeviceIndex deviceCount() const override { return gpus; }
  int getNumGPUs() const override { return gpus; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex gpu) const override { current = gpu; }
  DeviceIndex exchangeDevice(DeviceIndex gpu) const override { return exchange(gpu); }
  DeviceIndex maybeExchangeDevice(DeviceIndex gpu) const override { return exchange(gpu); }
  void deviceSynchronize(DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = at::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return at::kCUDA; }
  Device exchangeDevice(Device d) const override { return check(d), Device(at::kCUDA, exchange(d.index())); }
  Device getDevice() const override { return {at::kCUDA, current}; }
  void setDevice(Device d) const override { check(d), current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return gpus; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// ---- tensors: made, seen by the CPU, copied, viewed

const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
Device device_or_current(const std::optional<Device>& d) { return d && d->has_index() ? *d : Device(at::kCUDA, current); }

Tensor empty(SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> d,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(d));
  return at::detail::empty_generic(INTS(sizes), &allocator, keys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> d, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(d));
  return at::detail::empty_strided_generic(INTS(sizes), INTS(strides), &allocator, keys, c10::dtype_or_default(dtype));
}
Tensor host(const Tensor& t) {  // the same memory as a CPU tensor
  if (!t.defined() || !t.is_cuda()) return t;
  auto* start = static_cast<char*>(t.storage().mutable_data());
  Tensor seen = at::from_blob(start ? start + t.storage_offset() * t.element_size() : nullptr, t.sizes(), t.strides(),
                              t.options().device(at::kCPU).requires_grad(false));
  return seen._set_conj(t.is_conj()), seen._set_neg(t.is_neg()), seen;
}
Tensor on(Device d, const Tensor& t) {
  if (!t.defined()) return t;
  c10::DeviceGuard guard(d);
  Tensor made = at::detail::empty_strided_generic(t.sizes(), t.strides(), &allocator, keys, t.scalar_type());
  return t.numel() ? (host(made).copy_(t), made) : made;
}
Tensor& copy(Tensor& self, const Tensor& from, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.numel()) host(self).copy_(host(from));
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool) { Tensor t = to; return copy(t, self, false); }
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) { return copy_from(self, to.resize_(self.sizes()), false); }
at::Scalar number(const Tensor& t) { return host(t).item(); }
void grow(c10::Storage storage, size_t bytes) {
  auto memory = allocator.allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes())) memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(bytes);
}
const Tensor& resize(const Tensor& self, SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(INTS(sizes));
  size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.storage().nbytes() < bytes) grow(self.storage(), bytes);
  return self;
}
Tensor as_strided(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, INTS(sizes), INTS(strides), offset ? offset->expect_int() : self.storage_offset());
}
Tensor view(const Tensor& self, SymIntArrayRef sizes) { return at::native::view(self, INTS(sizes)); }
Tensor reshape_alias(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, INTS(sizes), INTS(strides));
}
Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, SymIntArrayRef sizes, SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  strides.empty() ? impl->set_sizes_contiguous(INTS(sizes)) : impl->set_sizes_and_strides(INTS(sizes), INTS(strides));
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.sym_storage_offset(), other.sym_sizes(), other.sym_strides());
}
Tensor& set_whole(Tensor& self, at::Storage storage) {
  c10::SymInt elements = int64_t(storage.nbytes() / self.element_size());
  return set_storage(self, storage, 0, SymIntArrayRef(&elements, 1), {});
}

// ---- every other kernel is the CPU's

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const bool indexes = name.find("index") != std::string::npos;  // these take their indices from the CPU too
  std::optional<Device> gpu;
  bool cpu = false;
  Generator* drawn = nullptr;
  auto see = [&](const Tensor& t) {
    if (!t.defined()) return;
    TORCH_CHECK(!t.is_cuda() || !gpu || *gpu == t.device(), "Expected all tensors to be on the same device, but found ", *gpu, " and ", t.device(), " (", name, ")");
    if (t.is_cuda()) gpu = t.device();
    else cpu |= t.dim() > 0;  // a number without dimensions may come from the CPU
  };
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) see(t);
    else if (value.isOptionalTensorList()) { for (const Maybe& t : value.toOptionalTensorVector()) if (t && (t->is_cuda() || !indexes)) see(*t); }
    else if (value.isDevice() && !gpu) gpu = value.toDevice();
  }
  TORCH_CHECK(!gpu || !cpu, "Expected all tensors to be on the same device, but found ", gpu.value_or(at::kCUDA), " and cpu (", name, ")");
  Device device = device_or_current(gpu);
  c10::DeviceGuard guard(device);
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  static std::mutex drawing;
  std::lock_guard<std::mutex> lock(drawing);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
    if (auto& value = (*stack)[i]; value.isGenerator()) {
      auto given = value.toGenerator();
      TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      drawn = static_cast<Generator*>(given.unsafeGetGeneratorImpl());
      value = c10::IValue();
    }
  if (!drawn) drawn = static_cast<Generator*>(generators()[device.index()].unsafeGetGeneratorImpl());
  auto of_cpu = at::detail::getDefaultCPUGenerator();
  auto before = of_cpu.get_state();
  of_cpu.set_current_seed(drawn->draw());
  at::native::cpu_fallback(op, stack);
  of_cpu.set_state(before);
}

// ---- where a GPU's kernel keeps something else

struct Wide {  // the statistics' dtype
  at::ScalarType dtype;
  explicit Wide(const Tensor& x) : dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat) {}
  Tensor operator()(const Tensor& t) const { return t.defined() ? host(t).to(dtype) : t; }
  Maybe operator()(const Maybe& t) const { return t && t->defined() ? Maybe((*this)(*t)) : std::nullopt; }
};
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, SymIntArrayRef shape, const Maybe& weight, const Maybe& bias, double eps) {
  at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(!weight || weight->device() == x.device(), "Expected all tensors to be on the same device (native_layer_norm)");
  Wide wide(x);
  auto [y, mean, rstd] = at::native_layer_norm_symint(wide(x), shape, wide(weight), wide(bias), eps);
  return {on(x.device(), y.to(x.scalar_type())), on(x.device(), mean), on(x.device(), rstd)};
}
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const Tensor& x, SymIntArrayRef shape, const Tensor& mean,
                                                       const Tensor& rstd, const Maybe& weight, const Maybe& bias, std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView below;
  Wide wide(x);
  auto [dx, dw, db] = at::native_layer_norm_backward_symint(wide(dy), wide(x), shape, wide(mean), wide(rstd), wide(weight), wide(bias), mask);
  auto back = [&](const Tensor& t) { return t.defined() ? on(x.device(), t.to(x.scalar_type())) : t; };
  return {back(dx), back(dw), back(db)};
}

int64_t attention_kernel(const Tensor& q, const Tensor&, const Tensor& v, const Maybe& mask, double dropout, bool, std::optional<double>, bool) {
  auto wanted = setting("STANDIN_SDPA", "cudnn");
  bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  auto d = q.size(-1);
  if (!half || q.dim() != 4 || v.size(-1) != d || mask || dropout || wanted == "math") return int64_t(at::SDPBackend::math);
  if (wanted == "cudnn" && d % 8 == 0 && d <= 128) return int64_t(at::SDPBackend::cudnn_attention);
  return int64_t(d <= 256 ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}
std::pair<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(host(q), host(k), host(v), 0.0, causal, std::nullopt, scale);
  Tensor like_q = at::empty_like(q);
  host(like_q).copy_(out);
  return {like_q, on(q.device(), logsumexp.contiguous())};
}
using Three = std::tuple<Tensor, Tensor, Tensor>;
Three attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                         bool causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(host(dout), host(q), host(k), host(v), host(out),
                                                                              host(logsumexp), 0.0, causal, std::nullopt, scale);
  return {on(q.device(), dq), on(q.device(), dk), on(q.device(), dv)};
}
using Kept = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
Kept flash(const Tensor& q, const Tensor& k, const Tensor& v, double, bool causal, bool, std::optional<double> scale) {
  auto [out, logsumexp] = attention(q, k, v, causal, scale);
  auto seeds = q.options().dtype(at::kUInt64).requires_grad(false);
  return {out, logsumexp, {}, {}, q.sym_size(2), k.sym_size(2), at::empty({2}, seeds), at::empty({}, seeds), at::empty({0}, q.options())};
}
Three flash_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                     const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&, const Tensor&,
                     std::optional<double> scale) {
  return attention_backward(dout, q, k, v, out, logsumexp, causal, scale);
}
Kept cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe&, bool, double, bool causal, bool, std::optional<double> scale) {
  auto [out, logsumexp] = attention(q, k, v, causal, scale);
  auto seeds = q.options().dtype(at::kLong).requires_grad(false);
  return {out, logsumexp.unsqueeze(-1), {}, {}, q.sym_size(2), k.sym_size(2), at::empty({}, seeds), at::empty({}, seeds), {}};
}
Three cudnn_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                     const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double,
                     bool causal, std::optional<double> scale) {
  return attention_backward(dout, q, k, v, out, logsumexp.squeeze(-1), causal, scale);
}

// ---- "nccl": gloo exchanges copies

using Tensors = std::vector<Tensor>;
using Started = c10::intrusive_ptr<c10d::Work>;
Tensors copies(const Tensors& ts) {
  Tensors made;
  for (auto& t : ts) made.push_back(host(t).clone(at::MemoryFormat::Contiguous));
  return made;
}

// What an exchange does to its copies is nobody's operation: a TorchDispatchMode must not see it, and gloo's thread may hold them for a while.
struct Unseen { c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})}; };

struct Exchange final : c10d::Work {
  Started inner;
  Tensors in, in_then, out, result;
  std::mutex waiting;
  bool over = false;
  Exchange(int rank, c10d::OpType kind) : Work(rank, kind) {}
  bool isCompleted() override { return over || !inner || inner->isCompleted(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds limit) override {
    std::lock_guard<std::mutex> lock(waiting);
    if (over) return true;
    Unseen unseen;
    if (inner) inner->wait(limit);
    over = true;
    for (size_t i = 0; i < in.size(); i++)
      if (!host(in[i]).contiguous().view(-1).view(at::kByte).equal(in_then[i].view(-1).view(at::kByte)))
        fprintf(stderr, "stand-in: an input changed during its exchange\n");
    for (size_t i = 0; i < out.size(); i++) host(out[i]).copy_(result[i].view(out[i].sizes()));
    in.clear(), out.clear(), result.clear(), in_then.clear(), inner.reset();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  ~Exchange() override { try { wait(kNoTimeout); } catch (...) {} }
};

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options = c10::make_intrusive<Options>("nccl");
  Nccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> by) : Backend(rank, size), gloo(std::move(by)) {}
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds limit) override { gloo->setTimeout(limit); }
  void shutdown() override {  // NCCL's may wait for the other ranks
    if (setting("STANDIN_NCCL_DESTROY", "") == "collective" && size_ > 1) gloo->barrier()->wait();
  }
  template <class Start>
  Started run(c10d::OpType kind, Tensors in, Tensors out, bool async, Start start) {
    Unseen unseen;
    auto work = c10::make_intrusive<Exchange>(rank_, kind);
    for (auto* ts : {&in, &out}) for (auto& t : *ts) TORCH_CHECK(t.is_cuda() && t.is_non_overlapping_and_dense(), "NCCL takes dense CUDA tensors, got ", t.device());
    work->in_then = copies(in), work->result = copies(out);
    work->inner = start(work->in_then, work->result);
    for (auto& t : out) if (t.numel() && t.is_floating_point() && kind != c10d::OpType::REDUCE && kind != c10d::OpType::BROADCAST) host(t).fill_(std::nan(""));
    for (auto& t : in) for (auto& o : out) if (t.storage().data() == o.storage().data()) in.clear(), work->in_then = copies({});
    work->in = in, work->out = out;
    if (!async) work->wait(kNoTimeout);
    return work;
  }
  Started allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override {
    return run(c10d::OpType::ALLREDUCE, {}, ts, o.asyncOp, [&](Tensors&, Tensors& out) { return gloo->allreduce(out, o); });
  }
  Started broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    return run(c10d::OpType::BROADCAST, {}, ts, o.asyncOp, [&](Tensors&, Tensors& out) { return gloo->broadcast(out, o); });
  }
  Started reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
    bool root = o.rootRank == rank_;  // elsewhere the tensor stays
    return run(c10d::OpType::REDUCE, {}, root ? ts : Tensors(), o.asyncOp, [&](Tensors&, Tensors& out) {
      Tensors own = root ? out : copies(ts);
      auto started = gloo->reduce(own, o);
      return started->wait(), started;
    });
  }
  Started _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return run(c10d::OpType::_ALLGATHER_BASE, {in}, {out}, o.asyncOp, [&](Tensors& i, Tensors& r) { return gloo->_allgather_base(r[0], i[0], o); });
  }
  Started allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return run(c10d::OpType::ALLGATHER, ins, outs[0], o.asyncOp, [&](Tensors& i, Tensors& r) { std::vector<Tensors> all{r}; return gloo->allgather(all, i, o); });
  }
  Started _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, {in}, {out}, o.asyncOp, [&](Tensors& i, Tensors& r) {
      Tensors sum{i[0].clone()};
      c10d::AllreduceOptions how;
      how.reduceOp = o.reduceOp;
      auto started = gloo->allreduce(sum, how);
      started->wait();
      r[0].view(-1).copy_(sum[0].view(-1).narrow(0, rank_ * r[0].numel(), r[0].numel()));
      return started;
    });
  }
  // DTensor's collectives are these, each with one tensor.
  Started allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override {
    TORCH_CHECK(ts.size() == 1, "not written: several tensors");
    return allreduce(ts, o);
  }
  Started allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(ins.size() == 1, "not written: several tensors");
    return _allgather_base(outs[0], ins[0], o);
  }
  Started reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(ins.size() == 1, "not written: several tensors");
    return _reduce_scatter_base(outs[0], ins[0], o);
  }
  Started reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    Tensor whole = at::stack(ins[0]);
    return _reduce_scatter_base(outs[0], whole, o);
  }
  Started gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    return run(c10d::OpType::GATHER, ins, outs.empty() ? Tensors() : outs[0], o.asyncOp, [&](Tensors& i, Tensors& r) {
      std::vector<Tensors> all(outs.size(), r);
      return gloo->gather(all, i, o);
    });
  }
  Started scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    return run(c10d::OpType::SCATTER, ins.empty() ? Tensors() : ins[0], outs, o.asyncOp, [&](Tensors& i, Tensors& r) {
      std::vector<Tensors> all(ins.size(), i);
      return gloo->scatter(r, all, o);
    });
  }
  Started alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    return run(c10d::OpType::ALLTOALL_BASE, {in}, {out}, o.asyncOp, [&](Tensors& i, Tensors& r) { return gloo->alltoall_base(r[0], i[0], out_splits, in_splits, o); });
  }
  Started send(Tensors& ts, int to, int tag) override {
    return run(c10d::OpType::SEND, ts, {}, true, [&](Tensors& i, Tensors&) { return gloo->send(i, to, tag); });
  }
  Started recv(Tensors& ts, int from, int tag) override {
    return run(c10d::OpType::RECV, {}, ts, true, [&](Tensors&, Tensors& r) { return gloo->recv(r, from, tag); });
  }
  Started barrier(const c10d::BarrierOptions& o) override {
    return run(c10d::OpType::BARRIER, {}, {}, false, [&](Tensors&, Tensors&) { return gloo->barrier(o); });
  }
};
}  // namespace

namespace at { using ::CUDAHooks; REGISTER_CUDA_HOOKS(CUDAHooks); }  // looked up by this name
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("resize_", resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole);
  m.impl("native_layer_norm", layer_norm);
  m.impl("native_layer_norm_backward", layer_norm_backward);
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
  m.impl("_scaled_dot_product_cudnn_attention", cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward);
}

PYBIND11_MODULE(_standin, m) {
  c10::SetAllocator(at::kCUDA, &allocator, 255);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
  py::module_::import("torch._C._distributed_c10d");
  m.def("device", [] { return int(current); });
  m.def("set_device", [](int gpu) { check(Device(at::kCUDA, gpu)), current = gpu; });
  m.def("generator", [](int gpu) { return generators().at(gpu); });
  m.def("held", [](int gpu) { return memory[gpu].held; });
  m.def("allow", [](int gpu, int64_t bytes) { memory[gpu].allowed = bytes; });
  m.def("asked", [](int gpu) { return memory[gpu].asked; });
  m.def("peak", [](int gpu) { return memory[gpu].peak; });
  m.def("reset_peak", [](int gpu) { memory[gpu].peak = memory[gpu].held; });
  m.def("record", [](bool on) { std::lock_guard<std::mutex> lock(counting); if ((recording = on)) for (auto& list : events) list.clear(); });
  m.def("events", [](int gpu) {
    std::lock_guard<std::mutex> lock(counting);
    std::vector<std::tuple<bool, uintptr_t, int64_t>> found;
    for (auto& one : events[gpu]) found.emplace_back(one.made, one.start, one.bytes);
    return found;
  });
  m.def("blocks", [](int gpu) {
    std::lock_guard<std::mutex> lock(counting);
    std::vector<std::tuple<uintptr_t, int64_t, int64_t>> found;
    for (auto& [start, block] : blocks) if (block.gpu == gpu) found.emplace_back(uintptr_t(start), block.asked, block.bytes);
    return found;
  });
  m.def("resize", [](py::object storage, size_t bytes) { grow(torch::createStorage(storage.ptr()), bytes); });
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(m, "Nccl")
      .def(py::init([](int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) { return c10::make_intrusive<Nccl>(rank, size, gloo); }))
      .def_property_readonly("options", &Nccl::getBackendOptions);
}
