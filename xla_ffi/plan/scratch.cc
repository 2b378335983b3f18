#include "xla_ffi/plan/scratch.h"

#include <cstdint>

#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/plan_cuda.h"

namespace topoep {

int64_t PlanScratchBytes(const Problem& problem) {
  const DomainTable domains(problem);
  return Scratch(problem, domains.View(), nullptr).bytes;
}

}  // namespace topoep
