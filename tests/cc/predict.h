// The cost of a plan on one lane.

#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/plan/cost.h"

namespace topoep {

inline int64_t PredictPs(const Problem& problem, const int32_t* slot_expert, const int32_t* quota) {
  SerialTeam team;
  const DomainTable domains(problem);
  std::vector<int64_t> words(CostMemory::NumWords(problem));
  std::vector<Best> bests(Links::kNumBests);
  return PredictPs(team, problem, domains.View(), slot_expert, quota, CostMemory{words.data(), bests.data()});
}

}  // namespace topoep
