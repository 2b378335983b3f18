// XLA's view of replica transfer on CUDA: finds the group, checks that the call fits it, launches. See transfer_cuda.h.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/call.h"
#include "xla_ffi/transfer/transfer_cuda.h"
#include "xla_ffi/transport/group.h"
#include "xla_ffi/transport/sizes.h"

namespace topoep {
namespace {

namespace ffi = xla::ffi;

using Dimensions = ffi::Span<const int64_t>;
using Floats = ffi::Buffer<ffi::F32>;
using Int32Attribute = ffi::Span<const int32_t>;

ffi::Error Refuse(const char* target, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(target) + ": " + what);
}

ffi::Error Launched(const char* target, cudaError_t result) {
  if (result == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(target) + ": the kernels do not launch: " + cudaGetErrorString(result));
}

// The connected group of a call with own experts [Em, D], slots [N, D] and slot_expert [R, N].
ffi::ErrorOr<std::shared_ptr<Group>> Find(const char* target, int64_t id, int32_t device, Int32Attribute domain_of_rank,
                                          Dimensions mains, Dimensions slots, Dimensions slot_expert) {
  std::shared_ptr<Group> group = FindGroup(id, device);
  if (group == nullptr || !group->connected()) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                   std::string(target) + ": group " + std::to_string(id) + " is not there on device " +
                       std::to_string(device) + ": call topoep_jax.transport.init(mesh, axis) before the program" +
                       " runs and trace the program after it; a group made with compile_only=True never runs, and" +
                       " one that was shut down does not run any more"));
  }
  const int32_t ranks = group->options().num_ranks();
  if (mains.size() != 2 || slots.size() != 2 || slot_expert.size() != 2 || mains[0] <= 0 || slots[0] <= 0 ||
      mains[1] != slots[1] || slot_expert[0] != ranks || slot_expert[1] != slots[0] ||
      mains[0] > std::numeric_limits<int32_t>::max() / ranks) {
    return ffi::Unexpected(Refuse(target, "mains " + Text(mains) + ", slots " + Text(slots) + " and slot_expert " +
                                              Text(slot_expert) +
                                              " must be [Em, D], [N, D] and [R, N] with R=" + std::to_string(ranks)));
  }
  const auto& domains = group->options().domain_of_rank;
  if (!std::equal(domain_of_rank.begin(), domain_of_rank.end(), domains.begin(), domains.end())) {
    return ffi::Unexpected(
        Refuse(target, "domain_of_rank is not the group's: the layer and transport.init must be given one topology"));
  }
  return group;
}

// Whether the layer fits what the group was made for.
ffi::Error CheckSizes(const char* target, const Group& group, const LayerShape& layer) {
  const GroupSizes& made = group.options().sizes;
  const GroupSizes needed = SizesOf(group.options().domain_of_rank, layer, made.windows[kStaging], 0);
  if (!std::equal(needed.windows.begin(), needed.windows.end(), made.windows.begin(), std::less_equal<>()) ||
      !std::equal(needed.schedules.begin(), needed.schedules.end(), made.schedules.begin(), std::less_equal<>())) {
    return Refuse(target, "a layer with " + std::to_string(layer.mains_per_rank) + " mains and " +
                              std::to_string(layer.num_slots) + " slots of " + std::to_string(layer.expert_bytes) +
                              " bytes does not fit the group: name its LayerConfig, and the dtype of its tokens, in "
                              "transport.init");
  }
  return ffi::Error::Success();
}

ffi::Error Pull(cudaStream_t stream, int32_t device, int64_t id, Int32Attribute domain_of_rank, ffi::AnyBuffer mains,
                Int32s slot_expert, Int32s turn, ffi::Result<ffi::AnyBuffer> slots, ffi::Result<Int32s> next_turn,
                int64_t pulls, int64_t expert_bytes, int64_t inter_fs_per_byte, int64_t intra_fs_per_byte) {
  constexpr char kTarget[] = "topoep_pull";
  const auto found =
      Find(kTarget, id, device, domain_of_rank, mains.dimensions(), slots->dimensions(), slot_expert.dimensions());
  if (!found.has_value()) return found.error();
  const Group& group = **found;
  // The planner's own bounds are tighter; these only keep the sums of prices within 64 bits.
  const double most = 1e18 / (static_cast<double>(slot_expert.element_count()) * std::max<int64_t>(expert_bytes, 1));
  if (pulls < 0 || pulls > static_cast<int64_t>(Pulls::kBest) || expert_bytes < 0 || inter_fs_per_byte < 0 ||
      intra_fs_per_byte < 0 || std::max(inter_fs_per_byte, intra_fs_per_byte) > most) {
    return Refuse(kTarget, "pulls=" + std::to_string(pulls) + ", expert_bytes=" + std::to_string(expert_bytes) +
                               ", inter_fs_per_byte=" + std::to_string(inter_fs_per_byte) +
                               ", intra_fs_per_byte=" + std::to_string(intra_fs_per_byte) + " are out of range");
  }
  if (slots->element_type() != mains.element_type()) return Refuse(kTarget, "mains and slots differ in dtype");
  const int64_t row_bytes = static_cast<int64_t>(mains.size_bytes()) / mains.dimensions()[0];
  const LayerShape layer{static_cast<int32_t>(mains.dimensions()[0]), static_cast<int32_t>(slots->dimensions()[0]),
                         row_bytes, static_cast<Pulls>(pulls)};
  ffi::Error error = CheckSizes(kTarget, group, layer);
  if (error.failure()) return error;
  CostModel prices{expert_bytes, 0, 0, inter_fs_per_byte, intra_fs_per_byte};
  prices.pulls = layer.pulls;
  return Launched(kTarget, LaunchPull(group, layer, prices, slot_expert.typed_data(), mains.untyped_data(),
                                      slots->untyped_data(), {turn.typed_data(), next_turn->typed_data()}, stream));
}

ffi::Error Push(cudaStream_t stream, int32_t device, int64_t id, Int32Attribute domain_of_rank, Floats slot_grads,
                Floats main_grads, Int32s slot_expert, Int32s turn, ffi::AnyBuffer carried, ffi::Result<Floats> sums,
                ffi::Result<Int32s> next_turn, ffi::Result<ffi::AnyBuffer> carried_on) {
  constexpr char kTarget[] = "topoep_push";
  const auto found = Find(kTarget, id, device, domain_of_rank, main_grads.dimensions(), slot_grads.dimensions(),
                          slot_expert.dimensions());
  if (!found.has_value()) return found.error();
  const Group& group = **found;
  if (sums->typed_data() != main_grads.typed_data()) return Refuse(kTarget, "result 0 must alias operand 1");
  if (carried_on->untyped_data() != carried.untyped_data()) return Refuse(kTarget, "result 2 must alias operand 4");
  LayerShape layer{static_cast<int32_t>(main_grads.dimensions()[0]), static_cast<int32_t>(slot_grads.dimensions()[0]),
                   0, Pulls::kDirect};
  ffi::Error error = CheckSizes(kTarget, group, layer);
  if (error.failure()) return error;
  const int64_t staging = group.options().sizes.windows[kStaging];
  const WindowShape shape = ShapeOf(ProblemOf(group.options().domain_of_rank, layer), 0, staging, 0);
  if (staging < shape.LeastStaging()) {
    return Refuse(kTarget, "the group's staging of " + std::to_string(staging) + " bytes is less than the " +
                               std::to_string(shape.LeastStaging()) + " that " + std::to_string(shape.NumReplicas()) +
                               " replicas need: raise staging_bytes in transport.init");
  }
  layer.expert_bytes = main_grads.dimensions()[1] * static_cast<int64_t>(sizeof(float));
  return Launched(kTarget, LaunchPush(group, layer, slot_expert.typed_data(), slot_grads.typed_data(),
                                      sums->typed_data(), {turn.typed_data(), next_turn->typed_data()}, stream));
}

// What both calls begin with.
auto BindTransfer() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attr<int64_t>("group")
      .Attr<Int32Attribute>("domain_of_rank");
}

}  // namespace
}  // namespace topoep

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopoepPullCuda, topoep::Pull,
                              topoep::BindTransfer()
                                  .Arg<xla::ffi::AnyBuffer>()  // mains
                                  .Arg<topoep::Int32s>()       // slot_expert
                                  .Arg<topoep::Int32s>()       // turn
                                  .Ret<xla::ffi::AnyBuffer>()  // slots
                                  .Ret<topoep::Int32s>()       // turn
                                  .Attr<int64_t>("pulls")
                                  .Attr<int64_t>("expert_bytes")
                                  .Attr<int64_t>("inter_fs_per_byte")
                                  .Attr<int64_t>("intra_fs_per_byte"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopoepPushCuda, topoep::Push,
                              topoep::BindTransfer()
                                  .Arg<topoep::Floats>()         // slot_grads
                                  .Arg<topoep::Floats>()         // main_grads
                                  .Arg<topoep::Int32s>()         // slot_expert
                                  .Arg<topoep::Int32s>()         // turn
                                  .Arg<xla::ffi::AnyBuffer>()    // carried
                                  .Ret<topoep::Floats>()         // main_grads
                                  .Ret<topoep::Int32s>()         // turn
                                  .Ret<xla::ffi::AnyBuffer>());  // carried
