// One call of target topoep_plan: operands, results and attributes, the same on every platform. A handler binds them
// with BindPlanCall(), reads them with PlanCall::Read(), and solves.

#ifndef TOPOEP_XLA_FFI_PLAN_CALL_H_
#define TOPOEP_XLA_FFI_PLAN_CALL_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/topoep/effort.h"

namespace topoep {

using Int32s = xla::ffi::Buffer<xla::ffi::S32>;
using Int32sResult = xla::ffi::Result<Int32s>;
using BytesResult = xla::ffi::Result<xla::ffi::Buffer<xla::ffi::U8>>;
using Int32Attribute = xla::ffi::Span<const int32_t>;
using Int64Attribute = xla::ffi::Span<const int64_t>;

// Owns what problem() points to, but for the buffers and attributes of the call itself.
class PlanCall {
 public:
  PlanCall() = default;
  PlanCall(const PlanCall&) = delete;
  PlanCall& operator=(const PlanCall&) = delete;

  // Checks shapes and attributes and translates them. Values of demand are not read: bad demand is an answer
  // (kBadInput), a malformed call is an error. The parameters are those of BindPlanCall(), in its order.
  xla::ffi::Error Read(Int32s omega, Int32sResult slot_expert, Int32sResult quota, Int32sResult rank_load,
                       Int32sResult predicted_ps, Int32sResult status, BytesResult workspace,
                       Int32Attribute domain_of_rank, int64_t num_slots, int64_t planner, int64_t objective,
                       int64_t cap_rows, int64_t block_rows, int64_t expert_bytes, int64_t token_bytes, int64_t row_ps,
                       int64_t inter_fs_per_byte, int64_t intra_fs_per_byte, int64_t instance_ps, int64_t tile_rows,
                       Int32Attribute rank_speed, int64_t pulls, Int64Attribute candidates, Int32Attribute thrifty,
                       Int32Attribute eager, int64_t fill_moves, bool paper, int64_t refine_changes,
                       int64_t refine_starts, int64_t refine_waves, int64_t num_threads);

  const Problem& problem() const { return problem_; }
  const Plan& plan() const { return plan_; }
  void* workspace() const { return workspace_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  std::vector<Candidate> candidates_;
  Effort effort_{};
  Problem problem_{};
  Plan plan_{};
  void* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

// Adds them to a binding that may hold a platform's context.
template <class Binding>
auto BindPlanCall(Binding binding) {
  return std::move(binding)
      .template Arg<Int32s>()  // omega
      .template Ret<Int32s>()  // slot_expert
      .template Ret<Int32s>()  // quota
      .template Ret<Int32s>()  // rank_load
      .template Ret<Int32s>()  // predicted_ps
      .template Ret<Int32s>()  // status
      // Of any size. Working memory of a GPU: what a handler allocates it must give back when it returns, and a command
      // buffer would then be replayed in memory of others.
      .template Ret<xla::ffi::Buffer<xla::ffi::U8>>()
      .template Attr<Int32Attribute>("domain_of_rank")
      .template Attr<int64_t>("num_slots")
      .template Attr<int64_t>("planner")
      .template Attr<int64_t>("objective")
      .template Attr<int64_t>("cap_rows")
      .template Attr<int64_t>("block_rows")
      .template Attr<int64_t>("expert_bytes")
      .template Attr<int64_t>("token_bytes")
      .template Attr<int64_t>("row_ps")
      .template Attr<int64_t>("inter_fs_per_byte")
      .template Attr<int64_t>("intra_fs_per_byte")
      .template Attr<int64_t>("instance_ps")
      .template Attr<int64_t>("tile_rows")
      .template Attr<Int32Attribute>("rank_speed")
      .template Attr<int64_t>("pulls")
      .template Attr<Int64Attribute>("candidates")
      .template Attr<Int32Attribute>("thrifty")
      .template Attr<Int32Attribute>("eager")
      .template Attr<int64_t>("fill_moves")
      .template Attr<bool>("paper")
      .template Attr<int64_t>("refine_changes")
      .template Attr<int64_t>("refine_starts")
      .template Attr<int64_t>("refine_waves")
      .template Attr<int64_t>("num_threads");
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_CALL_H_
