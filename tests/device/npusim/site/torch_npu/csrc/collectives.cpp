// The `hccl` backend: gloo on the host bytes of npu tensors, with the reductions that HCCL knows.
#include "device.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

namespace npusim {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using c10d::ReduceOp;

Tensors host(const Tensors& tensors) {
  Tensors lowered;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.device().type() == kNpu, "hccl takes npu tensors, got one on ", tensor.device());
    lowered.push_back(host_tensor(tensor));
  }
  return lowered;
}

TensorLists host(const TensorLists& lists) {
  TensorLists lowered;
  for (const auto& list : lists) lowered.push_back(host(list));
  return lowered;
}

const char* unsupported_name(const ReduceOp& op) {
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::SUM:
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::MAX:
    case ReduceOp::AVG:
      return nullptr;
    case ReduceOp::BAND:
      return "BAND";
    case ReduceOp::BOR:
      return "BOR";
    case ReduceOp::BXOR:
      return "BXOR";
    default:
      return "PREMUL_SUM";
  }
}

// HCCL has no average: the backend sums and then divides in the tensor's own dtype.
template <typename Options>
Options with_supported_op(Options options) {
  const char* name = unsupported_name(options.reduceOp);
  TORCH_CHECK(!name, "Cannot use ReduceOp.", name, " with HCCL");
  if (options.reduceOp == ReduceOp::AVG) options.reduceOp = ReduceOp::SUM;
  return options;
}

// Collectives are complete when they return: streams, and so `Work.wait`, order nothing in this simulation.
// gloo's own work is not handed out, as a second wait on a reduce-scatter copies the sum over the average.
class FinishedWork final : public c10d::Work {
 public:
  explicit FinishedWork(Tensors results) : results_(std::move(results)) {
    std::vector<c10::Device> devices;
    if (!results_.empty()) devices.push_back(results_.front().device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    future_->markCompleted(results_);
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Of a broadcast that may never end: whoever polls it can give up, as on a device.
class RunningWork final : public c10d::Work {
 public:
  explicit RunningWork(WorkPtr work) : work_(std::move(work)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  void synchronize() override { work_->wait(); }
  Tensors result() override { return work_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    work_->wait();
    return work_->getFuture();
  }

 private:
  WorkPtr work_;
};

WorkPtr finish(const WorkPtr& work, Tensors results) {
  work->wait();
  return c10::make_intrusive<FinishedWork>(std::move(results));
}

Tensors joined(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

class Hccl final : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("hccl", timeout) {}
  };

  Hccl(BackendPtr gloo, std::chrono::milliseconds timeout)
      : c10d::Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        options_(c10::make_intrusive<Options>(timeout)) {}

  const std::string getBackendName() const override { return "hccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<Options> options() const { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    gloo_->setTimeout(timeout);
  }
  // HCCL's name for it; `abort` does nothing there.
  void abort_hccl_comm() { gloo_->abort(); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  // torch 2.13 splits groups whenever the process group was made with a device_id.
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<c10d::Backend::Options>& options) override {
    auto mine = std::find(ranks.begin(), ranks.end(), getRank());
    if (mine == ranks.end()) return {};
    // The group's cpu backend meets on the same store.
    auto own_store = c10::make_intrusive<c10d::PrefixStore>("hccl", store->clone());
    py::gil_scoped_acquire gil;
    auto create = py::module_::import("torch_npu.distributed").attr("hccl");
    return create(own_store, mine - ranks.begin(), ranks.size(), options->timeout).cast<BackendPtr>();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto data = host(tensors);
    return c10::make_intrusive<RunningWork>(gloo_->broadcast(data, options));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto data = host(tensors);
    auto work = gloo_->allreduce(data, with_supported_op(options));
    return finish_reduction(work, tensors, options.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return c10::make_intrusive<FinishedWork>(tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto data = host(tensors);
    auto work = gloo_->reduce(data, with_supported_op(options));
    bool root = getRank() == options.rootRank;
    return finish_reduction(work, root ? tensors : Tensors(), options.reduceOp);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return finish(gloo_->allgather(to, from, options), joined(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    auto to = host_tensor(output), from = host_tensor(input);
    return finish(gloo_->_allgather_base(to, from, options), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<FinishedWork>(outputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return finish(gloo_->gather(to, from, options), joined(outputs));
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return finish(gloo_->scatter(to, from, options), outputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    auto work = gloo_->reduce_scatter(to, from, with_supported_op(options));
    return finish_reduction(work, outputs, options.reduceOp);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    auto to = host_tensor(output), from = host_tensor(input);
    auto work = gloo_->_reduce_scatter_base(to, from, with_supported_op(options));
    return finish_reduction(work, {output}, options.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<FinishedWork>(outputs);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto to = host_tensor(output), from = host_tensor(input);
    return finish(gloo_->alltoall_base(to, from, output_sizes, input_sizes, options), {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto to = host(outputs), from = host(inputs);
    return finish(gloo_->alltoall(to, from, options), outputs);
  }

  // Point to point must not block: two ranks that send first and then receive would wait for each other.
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto data = host(tensors);
    return started(gloo_->send(data, to, tag));
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto data = host(tensors);
    return started(gloo_->recv(data, from, tag));
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto data = host(tensors);
    return started(gloo_->recvAnysource(data, tag));
  }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    for (auto& work : std::exchange(pending_, {})) work->wait();
    return c10::make_intrusive<FinishedWork>(Tensors());
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return finish(gloo_->barrier(options), {});
  }

 private:
  WorkPtr finish_reduction(const WorkPtr& work, const Tensors& results, const ReduceOp& op) {
    work->wait();
    for (const auto& tensor : results) {
      TORCH_CHECK(tensor.scalar_type() != at::kDouble, "HCCL: unsupported data type float64 of a reduction");
    }
    if (op == ReduceOp::AVG) {
      for (const auto& tensor : results) host_tensor(tensor).div_(getSize());
    }
    return c10::make_intrusive<FinishedWork>(results);
  }

  WorkPtr started(WorkPtr work) {
    if (coalescing_) pending_.push_back(work);
    return work;
  }

  BackendPtr gloo_;
  c10::intrusive_ptr<Options> options_;
  bool coalescing_ = false;
  std::vector<WorkPtr> pending_;
};

}  // namespace
}  // namespace npusim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace npusim;
  m.def("device_count", [] { return int(device_count()); });
  m.def("physical_device", [](int index) { return physical_device(c10::DeviceIndex(index)); });
  m.def("in_bad_fork", &in_bad_fork);
  m.def("default_generator", [](int index) { return default_generator(c10::DeviceIndex(index)); });

  m.def("host_tensor", &host_tensor);
  m.def("refresh", [](const at::Tensor& tensor) { refresh(tensor.storage()); });
  m.def("borrowed_tensor", &borrowed_tensor);
  m.def("copied_bytes", &copied_bytes);
  m.def("kernel_launches", &kernel_launches);
  m.def("host_waits", &host_waits);

  py::module_::import("torch.distributed");  // registers the base class
  // torch calls perform_nocolor_split on the ranks that are not in a new group; gloo needs nothing of them.
  py::class_<Hccl, c10::intrusive_ptr<Hccl>, c10d::Backend> hccl(m, "ProcessGroupHCCL");
  hccl.def(py::init<BackendPtr, std::chrono::milliseconds>())
      .def_property_readonly("options", &Hccl::options)
      .def("perform_nocolor_split", [](Hccl&, const at::Device&) {})
      .def("abort_hccl_comm", [](Hccl& group, const std::string&) {
        py::gil_scoped_release others;
        group.abort_hccl_comm();
      });
  py::class_<Hccl::Options, c10::intrusive_ptr<Hccl::Options>, c10d::Backend::Options>(hccl, "Options")
      .def("__deepcopy__", [](const Hccl::Options& options, const py::dict&) {
        return c10::make_intrusive<Hccl::Options>(options);
      });
}
