// Operators: memory and views are native, everything else runs the CPU kernel on the same bytes.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/view_native.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <unordered_set>

namespace npusim {
namespace {

using torch::jit::Stack;

bool on_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNpu; }

c10::DeviceIndex index_of(std::optional<at::Device> device) {
  return device && device->index() >= 0 ? device->index() : current_device();
}

at::Tensor on_storage(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  c10::DispatchKeySet keys(key);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

// CPU kernels without a generator argument (dropout) draw from the default CPU generator: while they run
// it has the state of the npu's. Another thread that draws host numbers meanwhile would draw the npu's.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(c10::DeviceIndex device)
      : cpu_(at::detail::getDefaultCPUGenerator()),
        npu_(host_generator(default_generator(device))),
        saved_(read(cpu_)) {
    write(cpu_, read(npu_));
  }
  ~BorrowedGenerator() {
    write(npu_, read(cpu_));
    write(cpu_, saved_);
  }

 private:
  static at::Tensor read(at::Generator& generator) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  }
  static void write(at::Generator& generator, const at::Tensor& state) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
  at::Generator cpu_, npu_;
  at::Tensor saved_;
};

// The vendor's kernels are for float32 and narrower types. A few of its elementwise operators do take doubles,
// on slow cores of the device: here none does. What moves or compares bytes takes any type.
bool takes_doubles(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::fill_",  "aten::zero_",        "aten::cat",           "aten::index",      "aten::index_put_",
      "aten::equal",  "aten::index_select", "aten::masked_select", "aten::masked_fill_", "aten::unfold",
      "aten::gather", "aten::eq",           "aten::ne",            "aten::_index_put_impl_"};
  return names.count(name) > 0;
}

void refuse_double(const at::Tensor& tensor, const std::string& name) {
  bool refused = tensor.defined() && tensor.scalar_type() == at::kDouble && !takes_doubles(name);
  TORCH_CHECK(!refused, "EZ1001: Tensor not implemented for DT_DOUBLE, should be in dtype support list ",
              "[DT_FLOAT,DT_FLOAT16,DT_BFLOAT16]. (operator ", name, ")");
}

std::atomic<int64_t> copied{0}, launched{0}, waited{0};

bool is_mask(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

// One operator call, carried out by the CPU kernel. Results with memory of their own become npu memory
// without a copy, results on an argument's memory become views of it, and written arguments are returned.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        first_(stack->size() - schema_.arguments().size()),
        arguments_(stack->begin() + first_, stack->end()) {}

  void run() {
    for (size_t i = 0; i < arguments_.size(); ++i) (*stack_)[first_ + i] = lower(arguments_[i]);
    require_one_device();
    for (const auto& pair : pairs_) refuse_double(pair.npu, op_.operator_name().name);
    if (!pairs_.empty() || device_ >= 0) count();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::optional<BorrowedGenerator> borrowed;
      if (op_.hasTag(at::Tag::nondeterministic_seeded) && !pass_generator()) borrowed.emplace(device());
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    if (schema_.is_mutable()) follow_resized_arguments();
    for (size_t i = 0; i < schema_.returns().size(); ++i) raise_result(i);
  }

 private:
  struct Pair {
    at::Tensor npu, host;
  };

  c10::DeviceIndex device() const { return device_ < 0 ? current_device() : device_; }

  // A view launches nothing. The host waits for the device where a result's value or shape depends on data:
  // of indexing, only with a mask.
  void count() const {
    bool view = !schema_.returns().empty();
    for (const auto& result : schema_.returns()) {
      view = view && result.alias_info() && !result.alias_info()->isWrite();
    }
    if (view) return;
    ++launched;
    bool waits = op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
    const auto& name = op_.operator_name().name;
    if (name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
        name == "aten::_index_put_impl_") {
      waits = std::any_of(pairs_.begin() + 1, pairs_.end(), [](const Pair& pair) { return is_mask(pair.npu); });
    }
    if (waits) ++waited;
  }

  c10::IValue lower(const c10::IValue& value) {
    if (value.isTensor()) return lower(value.toTensor());
    if (value.isTensorList()) return lower_list(value.toTensorList());
    if (value.isOptionalTensorList()) return lower_list(value.toOptionalTensorList());
    if (value.isDevice() && value.toDevice().type() == kNpu) {
      device_ = index_of(value.toDevice());
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator()) return host_generator(value.toGenerator());
    return value;
  }

  at::Tensor lower(const at::Tensor& tensor) {
    if (!on_npu(tensor)) {
      if (tensor.defined() && tensor.dim() > 0 && !stranger_.defined()) stranger_ = tensor;
      return tensor;
    }
    if (device_ < 0) device_ = tensor.device().index();
    if (device_ != tensor.device().index() && !stranger_.defined()) stranger_ = tensor;
    pairs_.push_back({tensor, host_tensor(tensor)});
    return pairs_.back().host;
  }

  c10::List<at::Tensor> lower_list(const c10::List<at::Tensor>& list) {
    c10::List<at::Tensor> lowered;
    lowered.reserve(list.size());
    for (const at::Tensor& tensor : list) lowered.push_back(lower(tensor));
    return lowered;
  }

  c10::List<std::optional<at::Tensor>> lower_list(const c10::List<std::optional<at::Tensor>>& list) {
    c10::List<std::optional<at::Tensor>> lowered;
    lowered.reserve(list.size());
    for (const std::optional<at::Tensor>& tensor : list) {
      lowered.push_back(tensor ? std::optional<at::Tensor>(lower(*tensor)) : std::nullopt);
    }
    return lowered;
  }

  // The bytes are all on the host, so a forgotten .to("npu") would pass unnoticed without this.
  void require_one_device() const {
    if (!stranger_.defined() || pairs_.empty()) return;
    const auto& name = op_.operator_name().name;
    bool indexing = name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
                    name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" ||
                    name == "aten::_unsafe_index_put";
    bool host_index = indexing && stranger_.device().is_cpu();
    TORCH_CHECK(host_index, "Expected all tensors to be on the same device, but found at least two devices, ",
                pairs_.front().npu.device(), " and ", stranger_.device(), "! (operator ", name, ")");
  }

  bool pass_generator() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].name() != "generator") continue;
      auto& value = (*stack_)[first_ + i];
      if (value.isNone()) value = host_generator(default_generator(device()));
      return true;
    }
    return false;
  }

  void follow_resized_arguments() {
    for (auto& [npu, host] : pairs_) {
      refresh(npu.storage());
      if (npu.sizes() == host.sizes() && npu.strides() == host.strides()) continue;
      npu.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  void raise_result(size_t index) {
    auto& value = (*stack_)[first_ + index];
    const auto* alias = schema_.returns()[index].alias_info();
    if (alias && alias->isWrite()) {
      value = written_argument(*alias);
    } else if (value.isTensor()) {
      value = raise(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = raise(tensor);
      value = std::move(list);
    }
  }

  const c10::IValue& written_argument(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* found = schema_.arguments()[i].alias_info();
      if (found && *found == alias) return arguments_[i];
    }
    TORCH_CHECK(false, "no argument of ", op_.operator_name(), " matches its written result");
  }

  at::Tensor raise(const at::Tensor& host) {
    bool untouched = pairs_.empty() && device_ < 0;  // neither npu tensors nor an npu device took part
    if (untouched || !host.defined() || !host.device().is_cpu()) return host;
    auto* owner = host.storage().unsafeGetStorageImpl();
    if (!pairs_.empty()) refuse_double(host, op_.operator_name().name);  // otherwise it only fills memory
    for (const auto& pair : pairs_) {
      if (pair.host.is_same(host)) return pair.npu;
      if (pair.host.storage().unsafeGetStorageImpl() == owner) {
        return on_storage(pair.npu.storage(), c10::DispatchKey::PrivateUse1, host);
      }
    }
    auto raised = on_storage(adopt(host.storage(), device()), c10::DispatchKey::PrivateUse1, host);
    pairs_.push_back({raised, host});
    return raised;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t first_;
  c10::SmallVector<c10::IValue, 8> arguments_;
  c10::SmallVector<Pair, 4> pairs_;
  at::Tensor stranger_;
  c10::DeviceIndex device_ = -1;
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack) { HostCall(op, stack).run(); }

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  DeviceScope scope(index_of(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  DeviceScope scope(index_of(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           at::dtype_or_default(dtype));
}

// The CPU's version has no memory at all, which an alias could not tell from lost memory.
at::Tensor efficient_zero_tensor(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                                 std::optional<bool> pinned) {
  return empty(size, dtype, layout, device, pinned, std::nullopt).zero_();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (on_npu(from) != on_npu(to)) copied += static_cast<int64_t>(to.nbytes());
  if (on_npu(from) && on_npu(to)) ++launched;
  if (on_npu(from) && !on_npu(to) && !non_blocking) ++waited;
  host_tensor(to).copy_(host_tensor(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  ++waited;
  copied += static_cast<int64_t>(tensor.itemsize());
  return host_tensor(tensor).item();
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void grow_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(),
                                                tensor.storage_offset());
  if (tensor.storage().nbytes() < bytes) resize_storage(tensor.storage(), bytes);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format) impl->empty_tensor_restride(*format);
  grow_storage(tensor);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  if (stride.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  }
  grow_storage(tensor);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage source) {
  c10::SymInt length(static_cast<int64_t>(source.nbytes() / tensor.dtype().itemsize()));
  return set_storage(tensor, std::move(source), 0, length, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  DeviceScope scope(tensor.device().index());
  c10::Storage nothing(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                             allocator(), /*resizable=*/true));
  return set_storage(tensor, std::move(nothing), 0, c10::SymInt(0), {});
}

void record_stream(at::Tensor&, at::Stream) {}

at::Tensor npu_like(const at::Tensor& host, const at::Tensor& like) {
  if (!host.defined()) return host;
  return on_storage(adopt(host.storage(), like.device().index()), c10::DispatchKey::PrivateUse1, host);
}

std::optional<at::Tensor> host_tensor_or_none(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return host_tensor(*tensor);
}

// torch sends the convolutions of an unknown device here instead of to the operators themselves.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  refuse_double(input, "aten::convolution");
  at::AutoDispatchBelowADInplaceOrView below;
  auto out = at::convolution_symint(host_tensor(input), host_tensor(weight), host_tensor_or_none(bias),
                                    stride, padding, dilation, transposed, output_padding, groups);
  return npu_like(out, input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::SymInt bias_size = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward_symint(
      host_tensor(grad), host_tensor(input), host_tensor(weight), c10::SymIntArrayRef(bias_size), stride,
      padding, dilation, transposed, output_padding, groups, mask);
  return {npu_like(grad_input, input), npu_like(grad_weight, input), npu_like(grad_bias, input)};
}

// torch asks each device which attention kernel it has; the one it then calls is the CPU's.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  return at::_fused_sdp_choice(host_tensor(query), host_tensor(key), host_tensor(value),
                               host_tensor_or_none(mask), dropout, causal, scale, grouped);
}

// Without a kernel of its own, an operator with a structured CPU kernel would be decomposed into a meta
// call, an allocation and an out= call: the fallback registered by name saves that.
void register_every_cpu_operator() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                            __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// A lazily conjugated or negated tensor is resolved by a copy, which must not ask to be resolved first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

struct RegisterOperators {
  RegisterOperators() { register_every_cpu_operator(); }
} register_operators;

}  // namespace

at::Tensor host_tensor(const at::Tensor& tensor) {
  if (!on_npu(tensor)) return tensor;
  return on_storage(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

int64_t copied_bytes() { return copied; }
int64_t kernel_launches() { return launched; }
int64_t host_waits() { return waited; }

at::Tensor borrowed_tensor(const at::Tensor& host, int index) {
  return on_storage(borrow(host.storage(), static_cast<c10::DeviceIndex>(index)),
                    c10::DispatchKey::PrivateUse1, host);
}

}  // namespace npusim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &npusim::choose_attention)
}
