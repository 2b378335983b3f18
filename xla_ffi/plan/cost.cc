#include "xla_ffi/plan/cost.h"

#include <cstdint>
#include <vector>

namespace topoep {

int64_t PredictPs(const Problem& problem, const int32_t* slot_expert, const int32_t* quota) {
  SerialTeam team;
  const DomainTable domains(problem);
  std::vector<int64_t> words(CostMemory::NumWords(problem));
  std::vector<Best> bests(Links::kNumBests);
  return PredictPs(team, problem, domains.View(), slot_expert, quota, CostMemory{words.data(), bests.data()});
}

}  // namespace topoep
