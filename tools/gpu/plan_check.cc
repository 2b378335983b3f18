// Solves the problems of a file where PlanRunner solves them, and compares each plan with the right one, bit for bit.
//
//   plan_check FILE                   prints "wrong INDEX FIELD AT GOT WANTED" for each wrong plan, then "solved COUNT"
//   plan_check FILE WARMUPS RUNS      also times each: "time INDEX plain|graph MEDIAN P99 LEAST", microseconds
//
// Ends with 1 if a plan was wrong. Each problem is solved twice: with working memory full of other values, and with
// what the first solution and the timed ones left there.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tools/gpu/plan_runner.h"
#include "tools/gpu/problem_file.h"

namespace topoep {
namespace {

bool IsRight(int32_t index, Answer got, Answer right) {
  constexpr const char* kNames[] = {"slot_expert", "quota", "rank_load", "predicted_ps", "status"};
  const std::vector<int32_t>* gots[] = {&got.slot_expert, &got.quota, &got.rank_load, &got.predicted_ps, &got.status};
  const std::vector<int32_t>* wants[] = {&right.slot_expert, &right.quota, &right.rank_load, &right.predicted_ps,
                                         &right.status};
  for (int32_t field = 0; field < 5; ++field) {
    for (size_t i = 0; i < wants[field]->size(); ++i) {
      if ((*gots[field])[i] == (*wants[field])[i]) continue;
      std::printf("wrong %d %s %zu %d %d\n", index, kNames[field], i, (*gots[field])[i], (*wants[field])[i]);
      return false;
    }
  }
  return true;
}

void PrintTimes(int32_t index, const char* kind, std::vector<float> times) {
  std::sort(times.begin(), times.end());
  const size_t n = times.size();
  const size_t last_percent = (n * 99 + 99) / 100 - 1;
  std::printf("time %d %s %.2f %.2f %.2f\n", index, kind, (times[(n - 1) / 2] + times[n / 2]) / 2, times[last_percent],
              times[0]);
}

int Main(const char* path, int32_t warmups, int32_t runs) {
  const std::vector<StoredProblem> problems = ReadProblems(path);
  int32_t wrong = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(problems.size()); ++i) {
    PlanRunner runner(problems[i]);
    bool right = IsRight(i, runner.Solve(0x5a), problems[i].right);
    if (runs > 0) {
      PrintTimes(i, "plain", runner.Times(warmups, runs, false));
      PrintTimes(i, "graph", runner.Times(warmups, runs, true));
    }
    right = right && IsRight(i, runner.Solve(0), problems[i].right);
    wrong += !right;
  }
  std::printf("solved %zu\n", problems.size());
  return wrong > 0 ? 1 : 0;
}

}  // namespace
}  // namespace topoep

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::fprintf(stderr, "usage: plan_check FILE [WARMUPS RUNS]\n");
    return 2;
  }
  return topoep::Main(argv[1], argc == 4 ? std::atoi(argv[2]) : 0, argc == 4 ? std::atoi(argv[3]) : 0);
}
