// The runner of a dry run.

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "tools/gpu/plan_runner.h"
#include "xla_ffi/plan/solver.h"

namespace topoep {

struct PlanRunner::Memory {
  Problem problem;
  Answer answer;
};

PlanRunner::PlanRunner(const StoredProblem& stored) : memory_(new Memory{stored.View(), stored.right}) {}
PlanRunner::~PlanRunner() = default;

Answer PlanRunner::Solve(uint8_t fill) {
  Answer& answer = memory_->answer;
  for (std::vector<int32_t>* values :
       {&answer.slot_expert, &answer.quota, &answer.rank_load, &answer.predicted_ps, &answer.status}) {
    values->assign(values->size(), fill);
  }
  topoep::Solve(memory_->problem, Plan{answer.slot_expert.data(), answer.quota.data(), answer.rank_load.data(),
                                       answer.predicted_ps.data(), answer.status.data()});
  return answer;
}

std::vector<float> PlanRunner::Times(int32_t warmups, int32_t runs, bool /*graph*/) {
  std::vector<float> times;
  for (int32_t i = 0; i < warmups + runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    Solve(0);
    const std::chrono::duration<float, std::micro> took = std::chrono::steady_clock::now() - start;
    if (i >= warmups) times.push_back(took.count());
  }
  return times;
}

}  // namespace topoep
