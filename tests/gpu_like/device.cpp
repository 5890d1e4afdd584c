// Devices called "cuda", whose memory and arithmetic are the host's: see __init__.py.
//
// A storage of a device holds one of the host. Operators get tensors of the host that share their storages, and run
// as on the CPU; what they return, and whatever they have changed of sizes and storages, is given back.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::IValue;
constexpr int kDevices = 8;
thread_local c10::DeviceIndex current_index = 0;

c10::Device device_of(c10::DeviceIndex index) {
  return {c10::kCUDA, index < 0 ? current_index : index};
}

std::mutex lock;
std::map<const char*, size_t> pinned;  // sizes, by first byte
std::map<std::string, int64_t> waits;  // of the host for the device, by operator
std::atomic<int64_t> allocated{0}, most_allocated{0}, most_allowed{INT64_MAX};

// ---------------------------------------------------------------------------------- memory

struct Context {  // of a storage of the device
  c10::Storage host;
  int64_t size = 0;
  Context(c10::Storage of_host, int64_t of_size = 0) : host(std::move(of_host)), size(of_size) {}
  ~Context() { allocated -= size; }
  void measure() {
    int64_t more = static_cast<int64_t>(host.nbytes()) - size;
    int64_t now = allocated += more, most = most_allocated;
    size += more;
    TORCH_CHECK_WITH(OutOfMemoryError, more <= 0 || now <= most_allowed, "CUDA out of memory. Tried to allocate ",
                     more, " bytes; ", now - more, " of ", most_allowed.load(), " are taken");
    while (now > most && !most_allocated.compare_exchange_weak(most, now)) {}
  }
};

void release(void* context) { delete static_cast<Context*>(context); }

c10::Allocator& device_memory();

c10::Storage on_device(c10::Storage host, c10::DeviceIndex index) {
  auto context = std::make_unique<Context>(host);
  context->measure();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), host.nbytes(),
      c10::DataPtr(host.mutable_data(), context.release(), &release, device_of(index)), &device_memory(), true));
}

Context& context_of(const c10::Storage& storage) {
  auto& pointer = storage.data_ptr();
  TORCH_CHECK(pointer.get_deleter() == &release, "a storage that no operator has made");
  return *static_cast<Context*>(pointer.get_context());
}

c10::Storage host_of(const c10::Storage& storage) {
  if (storage.data_ptr().get_deleter() == &release) return context_of(storage).host;
  auto* data = const_cast<void*>(storage.data());  // of what torch saves, say, which outlives the operator
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::kCPU), nullptr, false));
}

// --------------------------------------------------------------------------------- operators

struct Call {
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;  // of the device, by that of the host
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> tensors;  // host and device
  std::vector<std::pair<at::Generator, at::Generator>> generators;         // host and device
  c10::DeviceIndex index = -1;
  bool has_device = false, has_host = false, has_several = false;

  void note(c10::Device device) {
    has_several |= has_device && index != device.index();
    has_device = true;
    index = device.index();
  }

  c10::Storage to_host(const c10::Storage& storage) {
    if (storage.device_type() != c10::kCUDA) return storage;
    auto host = host_of(storage);
    storages.emplace(host.unsafeGetStorageImpl(), storage);
    return host;
  }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    note(tensor.device());
    c10::InferenceMode as_made(tensor.is_inference());
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        to_host(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    tensors.emplace(alias.unsafeGetTensorImpl(), std::make_pair(alias, tensor));
    return alias;
  }

  const c10::Storage& to_device(const c10::Storage& host) {
    auto known = storages.find(host.unsafeGetStorageImpl());
    if (known == storages.end())
      known = storages.emplace(host.unsafeGetStorageImpl(), on_device(host, index)).first;
    return known->second;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    auto same = tensors.find(tensor.unsafeGetTensorImpl());
    if (same != tensors.end()) return same->second.second;
    c10::InferenceMode as_made(tensor.is_inference());
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(to_device(tensor.storage())), c10::DispatchKeySet(c10::DispatchKey::CUDA),
        tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isStorage()) return to_host(value.toStorage());
    if (value.isDevice() && value.toDevice().is_cuda()) {
      note(device_of(value.toDevice().index()));
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      auto device = value.toGenerator();
      auto host = at::detail::createCPUGenerator();
      host.set_state(device.get_state());
      generators.emplace_back(host, device);
      return host;
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_host(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::make_optional(to_host(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      auto both = c10::impl::GenericList(c10::ListType::ofTensors());
      for (const IValue& inner : value.toListRef()) both.push_back(to_host(inner));
      return both;
    }
    return value;
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
      return list;
    }
    if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      auto both = c10::impl::GenericList(c10::ListType::ofTensors());
      for (const IValue& inner : value.toListRef()) both.push_back(to_device(inner));
      return both;
    }
    return value;
  }

  void finish() {  // what operators have changed in place
    for (auto& [impl, pair] : tensors) {
      auto& [host, device] = pair;
      auto* changed = device.unsafeGetTensorImpl();
      auto& storage = to_device(host.storage());
      if (storage.unsafeGetStorageImpl() != changed->unsafe_storage().unsafeGetStorageImpl())
        changed->set_storage_keep_dtype(storage);
      if (storage.data_ptr().get_deleter() != &release) continue;
      auto& held = context_of(storage);
      if (storage.data() != held.host.data() || storage.nbytes() != held.host.nbytes()) {
        auto pointer = std::make_unique<Context>(held.host, std::exchange(held.size, 0));
        pointer->measure();
        auto host_bytes = pointer->host.nbytes();
        auto* data = pointer->host.mutable_data();
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
            c10::DataPtr(data, pointer.release(), &release, device.device()));
        storage.unsafeGetStorageImpl()->set_nbytes(host_bytes);
      }
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset())
        changed->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
    for (auto& [host, device] : generators) device.set_state(host.get_state());
  }
};

struct DeviceGenerator : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index) { device_ = device_of(index); }
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kDevices; ++i) made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return generators.at(device_of(index).index());
}

const std::set<std::string> kWaits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal",
                                      "aten::masked_select", "aten::is_nonzero", "aten::_unique2"};
const std::set<std::string> kTakesBoth = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                          "aten::_unsafe_index", "aten::set_"};

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call call;
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto first = stack->size() - schema.arguments().size();
  for (auto i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const auto& argument = schema.arguments()[i - first].name();
    value = argument == "pin_memory" ? IValue() : call.to_host(value);
  }
  TORCH_CHECK(!call.has_several, name, " got tensors of several devices");
  TORCH_CHECK(!(call.has_device && call.has_host) || kTakesBoth.count(name),
              name, " expects all tensors to be on the same device, but found cuda:", int(call.index), " and cpu");
  if (kWaits.count(name)) {
    std::lock_guard<std::mutex> guard(lock);
    ++waits[name];
  }
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded) && call.generators.empty();
  at::Generator host = at::detail::getDefaultCPUGenerator();
  Tensor kept;
  if (draws) {
    kept = host.get_state();
    host.set_state(default_generator(call.index).get_state());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (draws) {
    default_generator(call.index).set_state(host.get_state());
    host.set_state(kept);
  }
  call.finish();
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = call.to_device((*stack)[i]);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(lock);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  auto& [begin, size] = *--next;
  return data < begin + size;
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Call call;
  if (self.is_cpu() && !(non_blocking && is_pinned(self.const_data_ptr()))) {
    std::lock_guard<std::mutex> guard(lock);
    ++waits["copy to the host"];
  }
  if (self.is_cuda() && source.is_cpu() && !(non_blocking && is_pinned(source.const_data_ptr()))) {
    std::lock_guard<std::mutex> guard(lock);
    ++waits["copy from memory that is not pinned"];
  }
  auto target = call.to_host(self);
  target.copy_(call.to_host(source));
  return self;
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const std::optional<Tensor>& mask, double dropout, bool is_causal,
                 std::optional<double> scale, bool enable_gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, is_causal, std::nullopt, scale, enable_gqa));
}

// -------------------------------------------------------------------------------- the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_of(-1); }
  void setDevice(c10::Device device) const override { current_index = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_index = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_of(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

void unpin(void* data) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(static_cast<const char*>(data));
  c10::GetCPUAllocator()->raw_deleter()(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto pointer = c10::GetCPUAllocator()->allocate(std::max<size_t>(size, 1));
    auto* data = pointer.release_context();
    std::lock_guard<std::mutex> guard(lock);
    pinned[static_cast<const char*>(data)] = std::max<size_t>(size, 1);
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }
};

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Storage host(c10::Storage::use_byte_size_t(), size, c10::GetCPUAllocator(), true);
    auto context = std::make_unique<Context>(host);
    context->measure();
    return {host.mutable_data(), context.release(), &release, device_of(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }
};
c10::Allocator& device_memory() {
  static DeviceMemory memory;
  return memory;
}
REGISTER_ALLOCATOR(c10::kCUDA, &device_memory());

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs = {}) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current_index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_index = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_index, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    static std::atomic<int> made{0};  // Python asks for those of all devices first
    return made++ < kDevices ? default_generator(index) : at::make_generator<DeviceGenerator>(index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return device_of(-1); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory memory;
    return &memory;
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy_);
  for (auto name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {  // else structured operators are composed of others
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) == 0 && name.name != "aten::copy_" && op &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {  // gloo sends what lies on the host
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind("c10d::", 0) == 0 && op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &attention); }

extern "C" {
int64_t allocated_bytes() { return allocated; }
int64_t most_allocated_bytes() { return most_allocated; }
void reset_most_allocated() { most_allocated = allocated.load(); }
void limit_allocated(int64_t size) { most_allowed = size; }
int current_device() { return current_index; }
void set_device(int index) { current_index = index; }
void read_waits(char* text, int64_t size) {  // "operator=count" lines; counting begins anew
  std::lock_guard<std::mutex> guard(lock);
  std::string lines;
  for (auto& [name, count] : waits) lines += name + "=" + std::to_string(count) + "\n";
  waits.clear();
  strncpy(text, lines.c_str(), size);
}
}
