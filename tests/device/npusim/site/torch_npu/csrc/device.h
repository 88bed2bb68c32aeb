// What the files of the simulated npu share: its devices, and how its tensors map to host tensors.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace npusim {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);  // a negative index leaves it unchanged
bool in_bad_fork();
int physical_device(c10::DeviceIndex index);  // its number on the machine, whatever the mask hides

// Devices are shared with the other processes that have the same `NPU_SIM_HOST`, as on one machine. `enter`
// refuses a device that is another's, `hold` says what this process now holds of it and whether that fits.
void enter(c10::DeviceIndex index);
bool hold(c10::DeviceIndex index, int64_t bytes, int64_t capacity);
int64_t held_by_others(c10::DeviceIndex index);

// Every npu storage is a handle on a host storage that owns the bytes. `host_storage` gives that owner,
// `adopt` wraps a host storage as npu memory, `borrow` one that another process accounts for, and `refresh`
// follows an owner whose bytes have moved.
c10::Storage host_storage(const c10::Storage& storage);
c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index);
c10::Storage borrow(const c10::Storage& host, c10::DeviceIndex index);
void refresh(const c10::Storage& storage);
void resize_storage(const c10::Storage& storage, size_t bytes);

// A host tensor on the same bytes; tensors of other devices pass through.
at::Tensor host_tensor(const at::Tensor& tensor);

// Bytes that this process has copied between npu and host memory.
int64_t copied_bytes();

// Operators that this process has given to the device, without views; and how often the host waited for a result
// of the device: for a value, a copy to the host, or a shape that depends on data.
int64_t kernel_launches();
int64_t host_waits();

// A flat npu tensor of bytes that another process shares through a host storage.
at::Tensor borrowed_tensor(const at::Tensor& host, int index);

c10::Allocator* allocator();
const at::Generator& default_generator(c10::DeviceIndex index);
const at::Generator& host_generator(const at::Generator& generator);  // what an npu generator draws from

// Runs a piece of code with another current device.
class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex index) : previous_(exchange_device(index)) {}
  ~DeviceScope() { exchange_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

}  // namespace npusim
