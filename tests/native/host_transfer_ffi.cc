// XLA's view of the host twins: checks shapes and attributes, then calls HostPull() and HostPush(). The parameters of a
// transfer are bytes of any type.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>

#include "tests/native/host_transfer.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/transfer/windows.h"

namespace topoep {
namespace {

namespace ffi = xla::ffi;

using Dimensions = ffi::Span<const int64_t>;

constexpr int64_t kMaxThreads = 1024;

ffi::Error Invalid(const std::string& text) { return ffi::Error::InvalidArgument("topoep_host_transfer: " + text); }

std::string Text(Dimensions dimensions) {
  std::string text = "[";
  for (const int64_t dimension : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "]";
}

bool HasShape(Dimensions actual, std::initializer_list<int64_t> expected) {
  return std::equal(actual.begin(), actual.end(), expected.begin(), expected.end());
}

// What both calls share. mains [R, Em, D], of `element_bytes` each.
struct Request {
  Dimensions mains;
  Dimensions slots;
  ffi::Buffer<ffi::S32> slot_expert;
  int64_t element_bytes;
  ffi::Span<const int32_t> domain_of_rank;
  int64_t workers;
  int64_t timeout_ms;
};

ffi::Error Read(const Request& request, HostTransfer* call) {
  const int64_t num_ranks = static_cast<int64_t>(request.domain_of_rank.size());
  const Dimensions mains = request.mains;
  const Dimensions plan = request.slot_expert.dimensions();
  if (num_ranks == 0) return Invalid("domain_of_rank is empty");
  if (mains.size() != 3 || mains[0] != num_ranks || mains[1] == 0 || mains[2] == 0) {
    return Invalid("mains have shape " + Text(mains) + ", expected [" + std::to_string(num_ranks) + ", Em, D]");
  }
  if (plan.size() != 2 || plan[0] != num_ranks) {
    return Invalid("slot_expert has shape " + Text(plan) + ", expected [" + std::to_string(num_ranks) + ", N]");
  }
  if (!HasShape(request.slots, {num_ranks, plan[1], mains[2]})) {
    return Invalid("slots have shape " + Text(request.slots) + ", expected [R, N, D] of mains " + Text(mains) +
                   " and slot_expert " + Text(plan));
  }
  if (num_ranks * plan[1] > kMaxReplicas) return Invalid("slot_expert has more than 65536 slots");
  for (const int32_t domain : request.domain_of_rank) {
    if (domain < 0 || domain >= num_ranks) return Invalid("domain_of_rank has " + std::to_string(domain));
  }
  if (request.workers < 1 || num_ranks * request.workers > kMaxThreads) {
    return Invalid("workers=" + std::to_string(request.workers) + " must be at least 1, and at most " +
                   std::to_string(kMaxThreads) + " over all ranks");
  }
  if (request.timeout_ms < 1) return Invalid("timeout_ms=" + std::to_string(request.timeout_ms) + " must be positive");
  call->problem = {};
  call->problem.num_ranks = static_cast<int32_t>(num_ranks);
  call->problem.num_experts = static_cast<int32_t>(num_ranks * mains[1]);
  call->problem.num_slots = static_cast<int32_t>(plan[1]);
  call->problem.num_domains = 1 + *std::max_element(request.domain_of_rank.begin(), request.domain_of_rank.end());
  call->problem.domain_of_rank = request.domain_of_rank.begin();
  call->problem.objective = Objective::kBottleneck;
  call->row_bytes = mains[2] * request.element_bytes;
  call->num_workers = static_cast<int32_t>(request.workers);
  call->timeout = std::chrono::milliseconds(request.timeout_ms);
  const std::string illegal = CheckPlacement(call->problem, request.slot_expert.typed_data());
  return illegal.empty() ? ffi::Error::Success() : Invalid(illegal);
}

ffi::Error Result(const std::string& failure) {
  return failure.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure);
}

ffi::Error Pull(ffi::AnyBuffer mains, ffi::Buffer<ffi::S32> slot_expert, ffi::Result<ffi::AnyBuffer> slots,
                ffi::Span<const int32_t> domain_of_rank, int64_t pulls, int64_t expert_bytes, int64_t inter_fs_per_byte,
                int64_t intra_fs_per_byte, int64_t gets, int64_t workers, int64_t timeout_ms) {
  if (slots->element_type() != mains.element_type()) return Invalid("slots and mains must have one type");
  if (pulls < 0 || pulls > static_cast<int64_t>(Pulls::kBest)) return Invalid("pulls=" + std::to_string(pulls));
  if (gets < 0 || gets > static_cast<int64_t>(Gets::kAll)) return Invalid("gets=" + std::to_string(gets));
  HostTransfer call;
  const int64_t element_bytes = static_cast<int64_t>(ffi::ByteWidth(mains.element_type()));
  if (ffi::Error error = Read(
          {mains.dimensions(), slots->dimensions(), slot_expert, element_bytes, domain_of_rank, workers, timeout_ms},
          &call);
      error.failure()) {
    return error;
  }
  call.problem.cost = {expert_bytes, 1, 0, inter_fs_per_byte, intra_fs_per_byte};
  call.problem.cost.pulls = static_cast<Pulls>(pulls);
  call.gets = static_cast<Gets>(gets);
  // Like the transport over lax collectives; the bodies leave these rows alone.
  char* const rows = static_cast<char*>(slots->untyped_data());
  std::fill(rows, rows + slots->size_bytes(), 0);
  return Result(HostPull(call, slot_expert.typed_data(), static_cast<const char*>(mains.untyped_data()), rows));
}

ffi::Error Push(ffi::Buffer<ffi::F32> slot_grads, ffi::Buffer<ffi::F32> main_grads, ffi::Buffer<ffi::S32> slot_expert,
                ffi::Result<ffi::Buffer<ffi::F32>> sums, ffi::Span<const int32_t> domain_of_rank, int64_t staging_bytes,
                int64_t workers, int64_t timeout_ms) {
  const Dimensions mains = main_grads.dimensions();
  HostTransfer call;
  if (ffi::Error error = Read(
          {mains, slot_grads.dimensions(), slot_expert, sizeof(float), domain_of_rank, workers, timeout_ms}, &call);
      error.failure()) {
    return error;
  }
  if (!HasShape(sums->dimensions(), {mains[0], mains[1], mains[2]})) return Invalid("results must be as main_grads");
  call.staging_bytes = staging_bytes;
  const int64_t least = ShapeOf(call).LeastStaging();
  if (staging_bytes < least) {
    return Invalid("staging_bytes=" + std::to_string(staging_bytes) + " must be at least " + std::to_string(least) +
                   ": 16 bytes for every slot of every rank, twice");
  }
  std::memcpy(sums->typed_data(), main_grads.typed_data(), main_grads.size_bytes());
  return Result(HostPush(call, slot_expert.typed_data(), slot_grads.typed_data(), sums->typed_data()));
}

}  // namespace
}  // namespace topoep

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopoepHostPull, topoep::Pull,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()              // mains
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slot_expert
                                  .Ret<xla::ffi::AnyBuffer>()              // slots
                                  .Attr<xla::ffi::Span<const int32_t>>("domain_of_rank")
                                  .Attr<int64_t>("pulls")
                                  .Attr<int64_t>("expert_bytes")
                                  .Attr<int64_t>("inter_fs_per_byte")
                                  .Attr<int64_t>("intra_fs_per_byte")
                                  .Attr<int64_t>("gets")
                                  .Attr<int64_t>("workers")
                                  .Attr<int64_t>("timeout_ms"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopoepHostPush, topoep::Push,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // slot_grads
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // main_grads
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slot_expert
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // sums
                                  .Attr<xla::ffi::Span<const int32_t>>("domain_of_rank")
                                  .Attr<int64_t>("staging_bytes")
                                  .Attr<int64_t>("workers")
                                  .Attr<int64_t>("timeout_ms"));
