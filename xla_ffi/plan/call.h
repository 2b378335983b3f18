// One call of target topoep_plan, the same on every platform. A handler binds it with BindPlanCall(), reads it with
// PlanCall::Read(), and solves.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/owned_problem.h"
#include "xla_ffi/plan/problem.h"

namespace topoep {

using Int32s = xla::ffi::Buffer<xla::ffi::S32>;
using Bytes = xla::ffi::Buffer<xla::ffi::U8>;

// The dimensions of an array, as errors tell them.
template <class Dimensions>
std::string Text(const Dimensions& dimensions) {
  std::string text = "[";
  for (const int64_t dimension : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "]";
}

// Owns what problem() points to, but for the demand.
class PlanCall {
 public:
  PlanCall() = default;
  PlanCall(const PlanCall&) = delete;
  PlanCall& operator=(const PlanCall&) = delete;

  // Checks attributes and shapes. Results are the fields of Plan, then the workspace. Values of demand are not read:
  // bad demand is an answer (kBadInput), a malformed call is an error.
  xla::ffi::Error Read(Int32s omega, xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes);

  const Problem& problem() const { return problem_; }
  const Plan& plan() const { return plan_; }
  // Of any size. Working memory of a GPU: what a handler allocates it must give back when it returns, and a command
  // buffer would then be replayed in memory of others.
  Bytes& workspace() { return *workspace_; }  // NOLINT(bugprone-unchecked-optional-access): Read() has set it

 private:
  OwnedProblem owned_;
  Problem problem_{};
  Plan plan_{};
  std::optional<Bytes> workspace_;
};

// Adds them to a binding that may hold a platform's context.
template <class Binding>
auto BindPlanCall(Binding binding) {
  return std::move(binding).template Arg<Int32s>().RemainingRets().Attrs();
}

}  // namespace topoep
