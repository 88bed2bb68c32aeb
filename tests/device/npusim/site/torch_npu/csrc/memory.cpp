// Devices, memory and random numbers: what torch asks of an accelerator before any operator runs.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace npusim {
namespace {

constexpr int kMaxDevices = 64;
thread_local c10::DeviceIndex current = 0;
std::atomic<bool> initialised{false};
std::atomic<bool> bad_fork{false};

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

double amount(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atof(text) : otherwise;
}

// The Ascend runtime reports no device at all when the mask is not strictly ascending.
std::vector<int> find_visible_devices() {
  auto installed = std::min<int64_t>(setting("NPU_SIM_DEVICES", 2), kMaxDevices);
  const char* mask = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  std::vector<int> found;
  if (!mask) {
    for (int id = 0; id < installed; ++id) found.push_back(id);
    return found;
  }
  std::stringstream ids(mask);
  for (std::string id; std::getline(ids, id, ',');) {
    int value = std::atoi(id.c_str());
    if (value <= (found.empty() ? -1 : found.back()) || value >= installed) return {};
    found.push_back(value);
  }
  return found;
}

const std::vector<int>& visible_devices() {
  static const auto found = find_visible_devices();
  return found;
}

void require_device(c10::DeviceIndex index) {
  TORCH_CHECK(!bad_fork,
              "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, "
              "you must use the 'spawn' start method");
  TORCH_CHECK(index >= 0 && index < device_count(), "Invalid NPU device ID ", int(index), ", ",
              int(device_count()), " available, error code is 107001");
  static std::array<std::atomic<bool>, kMaxDevices> entered{};
  if (!entered[index]) {
    enter(index);
    entered[index] = true;
  }
  initialised = true;
}

std::string size_of(int64_t bytes) {
  char text[32];
  bool large = bytes >= int64_t(1) << 30;
  std::snprintf(text, sizeof text, "%.2f %s", double(bytes) / (1 << (large ? 30 : 20)), large ? "GiB" : "MiB");
  return text;
}

struct Block {
  c10::Storage host;
  c10::DeviceIndex device;
  int64_t bytes;
};

class Allocator final : public c10::DeviceAllocator {
 public:
  static Allocator& instance() {
    // Never destroyed: tensors may outlive the static objects of this library.
    static auto* allocator = new Allocator();
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    require_device(current);
    add(current, static_cast<int64_t>(bytes));
    try {
      return wrap(c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                                     bytes, c10::GetCPUAllocator(),
                                                                     /*resizable=*/true)),
                  current);
    } catch (...) {
      remove(current, static_cast<int64_t>(bytes));
      throw;
    }
  }

  c10::DataPtr own(c10::Storage host, c10::DeviceIndex device) {
    add(device, static_cast<int64_t>(host.nbytes()));
    return wrap(std::move(host), device);
  }

  // In place of a block whose bytes have moved: they are never there twice.
  c10::DataPtr own_instead(Block* before, c10::Storage host, c10::DeviceIndex device) {
    remove(device, std::exchange(before->bytes, 0));
    add(device, 0);  // what stays of the block before is released later
    return own(std::move(host), device);
  }

  // Memory of another process: nothing of this process's.
  c10::DataPtr borrow(c10::Storage host, c10::DeviceIndex device) {
    add(device, 0);
    auto data = wrap(std::move(host), device);
    data.cast_context<Block>(&release)->bytes = 0;
    return data;
  }

  static Block* block(const c10::Storage& storage) {
    auto* found = storage.data_ptr().cast_context<Block>(&release);
    TORCH_CHECK(found, "this npu storage was not allocated by the simulation");
    return found;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (c10::DeviceIndex device = 0; device < kMaxDevices; ++device) {
      auto& reserved = stats_[device].reserved_bytes[0];
      auto cached = reserved.current - stats_[device].allocated_bytes[0].current;
      if (cached <= 0) continue;
      reserved.decrease(cached);
      hold(device, reserved.current, capacity_);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_counter(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_counter(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto held = stats_.at(device).reserved_bytes[0].current + held_by_others(device);
    return {std::max<int64_t>(0, capacity_ - held), capacity_};
  }

 private:
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    instance().remove(block->device, block->bytes);
    delete block;
  }

  static c10::DataPtr wrap(c10::Storage host, c10::DeviceIndex device) {
    void* data = host.mutable_data();
    auto bytes = static_cast<int64_t>(host.nbytes());
    return {data, new Block{std::move(host), device, bytes}, &release, c10::Device(kNpu, device)};
  }

  void add(c10::DeviceIndex device, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    auto& reserved = stats.reserved_bytes[0];
    auto allocated = stats.allocated_bytes[0].current;
    // Like a caching allocator, keep what was once reserved until emptyCache.
    auto more = std::max<int64_t>(0, allocated + bytes - reserved.current);
    if (more && !hold(device, reserved.current + more, capacity_)) {
      ++stats.num_ooms;
      auto free = std::max<int64_t>(0, capacity_ - reserved.current - held_by_others(device));
      TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", size_of(bytes),
                       " (NPU ", int(device), "; ", size_of(capacity_), " total capacity; ",
                       size_of(allocated), " already allocated; ", size_of(allocated), " current active; ",
                       size_of(free), " free; ", size_of(reserved.current),
                       " reserved in total by PyTorch) If reserved memory is >> allocated memory try "
                       "setting max_split_size_mb to avoid fragmentation.");
    }
    stats.allocation[0].increase(1);
    for (auto* counter : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*counter)[0].increase(bytes);
    }
    if (more) reserved.increase(more);
  }

  void remove(c10::DeviceIndex device, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    stats.allocation[0].decrease(1);
    for (auto* counter : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*counter)[0].decrease(bytes);
    }
  }

  template <typename Function>
  void for_each_counter(c10::DeviceIndex device, Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    for (auto* counter : {&stats.allocation, &stats.allocated_bytes, &stats.active_bytes,
                          &stats.requested_bytes, &stats.reserved_bytes}) {
      function((*counter)[0]);
    }
  }

  std::mutex mutex_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats_;
  const int64_t capacity_ = static_cast<int64_t>(amount("NPU_SIM_MEMORY_MB", 65536) * (1 << 20));
};

struct RegisterAllocator {
  RegisterAllocator() { c10::SetAllocator(kNpu, &Allocator::instance()); }
} register_allocator;

// No page is locked; the pointers are remembered so that is_pinned() answers as on a device.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto host = c10::GetCPUAllocator()->allocate(bytes);
    auto* data = host.get();
    std::lock_guard<std::mutex> lock(mutex());
    pointers().insert(data);
    return {data, new c10::DataPtr(std::move(host)), &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static bool owns(const void* data) {
    std::lock_guard<std::mutex> lock(mutex());
    return pointers().count(data) > 0;
  }

 private:
  static void release(void* context) {
    auto* host = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> lock(mutex());
      pointers().erase(host->get());
    }
    delete host;
  }
  static std::mutex& mutex() {
    static auto* value = new std::mutex();
    return *value;
  }
  static std::unordered_set<const void*>& pointers() {
    static auto* value = new std::unordered_set<const void*>();
    return *value;
  }
};

// A CPU generator that answers for an npu, so that seeding a device disturbs neither host nor siblings.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(c10::DeviceIndex index, at::Generator host)
      : c10::GeneratorImpl(c10::Device(kNpu, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  const at::Generator& host() const { return host_; }
  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override { return new Generator(device().index(), host_.clone()); }
  at::Generator host_;
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(index, at::detail::createCPUGenerator());
}

using Clock = std::chrono::steady_clock;

// Work is finished when a call returns, so streams are only names and events only time stamps.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNpu, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kNpu, current}; }
  void setDevice(c10::Device device) const override {
    require_device(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, streams()[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(device, ++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto& id = streams()[index_of(next.device())];
    auto previous = stream(next.device(), id);
    id = next.id();
    return previous;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point();
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto span = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(span).count();
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.index() < 0 ? current : device.index();
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, index_of(device)), id);
  }
  static std::array<c10::StreamId, kMaxDevices>& streams() {
    thread_local std::array<c10::StreamId, kMaxDevices> ids{};
    return ids;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    require_device(index);
    current = index;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::owns(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* pinned = new PinnedAllocator();
    return pinned;
  }
  at::Device getDeviceFromPtr(void*) const override { return {kNpu, current}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct RegisterHooks {
  RegisterHooks() {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    pthread_atfork(nullptr, nullptr, [] { bad_fork = initialised.load(); });
  }
} register_hooks;

}  // namespace

c10::DeviceIndex device_count() {
  return static_cast<c10::DeviceIndex>(visible_devices().size());
}

int physical_device(c10::DeviceIndex index) { return visible_devices().at(index); }

c10::DeviceIndex current_device() { return current; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  auto previous = current;
  if (index >= 0) current = index;
  return previous;
}

bool in_bad_fork() { return bad_fork; }

c10::Storage host_storage(const c10::Storage& storage) { return Allocator::block(storage)->host; }

c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index) {
  require_device(index);
  auto& allocator = Allocator::instance();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                            host.nbytes(), allocator.own(host, index),
                                                            &allocator, /*resizable=*/true));
}

c10::Storage borrow(const c10::Storage& host, c10::DeviceIndex index) {
  require_device(index);
  auto& allocator = Allocator::instance();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                            host.nbytes(), allocator.borrow(host, index),
                                                            &allocator, /*resizable=*/false));
}

void refresh(const c10::Storage& storage) {
  auto host = host_storage(storage);
  if (host.data() == storage.data() && host.nbytes() == storage.nbytes()) return;
  auto* impl = storage.unsafeGetStorageImpl();
  auto index = storage.device().index();
  impl->set_data_ptr_noswap(Allocator::instance().own_instead(Allocator::block(storage), host, index));
  impl->set_nbytes(host.nbytes());
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  DeviceScope scope(storage.device().index());
  auto* impl = storage.unsafeGetStorageImpl();
  auto moved = Allocator::instance().allocate(bytes);
  if (auto kept = std::min(bytes, impl->nbytes())) std::memcpy(moved.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(moved));
  impl->set_nbytes(bytes);
}

c10::Allocator* allocator() { return &Allocator::instance(); }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) made->push_back(new_generator(i));
    return made;
  }();
  return generators->at(index < 0 ? current : index);
}

const at::Generator& host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace npusim
