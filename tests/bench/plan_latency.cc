// Runs a plan on the host and counts what a GPU would wait for: dependent steps, and the accesses to device memory of
// the busiest lane between two of them. Compiled with -fsanitize=thread but linked without its library: the compiler
// calls the functions below for every access, and only those to the planner's memory count.
//
// Reads named lists of numbers from standard input (plan_latency_bench.py writes them); writes a line for each kernel:
// name, steps, accesses.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "xla_ffi/plan/host_workspace.h"
#include "xla_ffi/plan/owned_problem.h"
#include "xla_ffi/plan/solve.h"

namespace {

struct Range {
  uintptr_t begin;
  uintptr_t end;
};
Range ranges[3];                // workspace, demand, plan
volatile int64_t accesses = 0;  // the compiler does not know that its own calls change it

}  // namespace

#define HOOK extern "C" __attribute__((no_sanitize("thread"), noinline, used)) void

__attribute__((no_sanitize("thread"), noinline)) static void Count(void* address) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  for (const Range& range : ranges) accesses = accesses + (range.begin <= at && at < range.end);
}

HOOK __tsan_init() {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_vptr_update(void**, void*) {}
HOOK __tsan_read1(void* a) { Count(a); }
HOOK __tsan_read2(void* a) { Count(a); }
HOOK __tsan_read4(void* a) { Count(a); }
HOOK __tsan_read8(void* a) { Count(a); }
HOOK __tsan_read16(void* a) { Count(a); }
HOOK __tsan_write1(void* a) { Count(a); }
HOOK __tsan_write2(void* a) { Count(a); }
HOOK __tsan_write4(void* a) { Count(a); }
HOOK __tsan_write8(void* a) { Count(a); }
HOOK __tsan_write16(void* a) { Count(a); }
HOOK __tsan_read_range(void* a, size_t) { Count(a); }
HOOK __tsan_write_range(void* a, size_t) { Count(a); }

namespace topoep {
namespace {

// Deals work to lanes as BlockTeam does.
class LaneTeam {
 public:
  static constexpr int32_t kLanesOfWarp = 32;

  explicit LaneTeam(int32_t threads) : of_lane_(threads) {}

  int64_t steps() const { return steps_; }
  int64_t path() {
    Step(0);
    return path_;
  }

  int32_t size() const { return static_cast<int32_t>(of_lane_.size()); }

  template <class F>
  void ForEach(int32_t n, F f) {
    for (int32_t i = 0; i < n; ++i) As(i % size(), [&] { f(i); });
  }

  void Sync() { Step(1); }

  template <class T>
  __attribute__((no_sanitize("thread"))) void Add(T* target, T value) {
    *target += value;
    accesses = accesses + 1;
  }

  template <class F>
  Best ArgMax(int32_t n, F key) {
    Best best;
    ForEach(n, [&](int32_t i) { best = Better(best, Best{key(i), i}); });
    Step(1);
    return best.Found() ? best : Best{};
  }

  template <class F, class Then>
  void ArgMaxEach(int32_t segments, int32_t n, F key, Then then) {
    for (int32_t s = 0; s < segments; ++s) {
      Best best;
      for (int32_t i = 0; i < n; ++i) As(Lane(segments, n, s, i), [&] { best = Better(best, Best{key(s, i), i}); });
      As(Lane(segments, n, s, 0), [&] { then(s, best.Found() ? best : Best{}); });
    }
    Step(1);
  }

  template <class F>
  void ScanEach(int32_t segments, int32_t n, F value, int64_t* result) {
    for (int32_t s = 0; s < segments; ++s) {
      int64_t sum = 0;
      for (int32_t i = 0; i < n; ++i) {
        As(Lane(segments, n, s, i), [&] {
          result[int64_t{s} * n + i] = sum;
          sum += value(s, i);
          accesses = accesses + 3;  // written, added up, read and replaced
        });
      }
    }
    Step(1);
  }

  template <class F>
  void Single(F f) {
    As(0, f);
  }

 private:
  // What is read outside of any item is read by every lane.
  template <class F>
  void As(int32_t lane, F f) {
    const int64_t before = accesses;
    of_all_ += before - mark_;
    f();
    of_lane_[lane] += accesses - before;
    mark_ = accesses;
  }

  int32_t Lane(int32_t segments, int32_t n, int32_t s, int32_t i) const {
    const int32_t warps = size() / kLanesOfWarp;
    const int32_t share = std::max(1, std::min(warps / segments, (n + kLanesOfWarp - 1) / kLanesOfWarp));
    if (share == 1) return s % warps * kLanesOfWarp + i % kLanesOfWarp;
    return s * share * kLanesOfWarp + i % (share * kLanesOfWarp);
  }

  void Step(int64_t steps) {
    of_all_ += accesses - mark_;
    mark_ = accesses;
    steps_ += steps;
    path_ += of_all_ + *std::max_element(of_lane_.begin(), of_lane_.end());
    of_all_ = 0;
    std::fill(of_lane_.begin(), of_lane_.end(), 0);
  }

  std::vector<int64_t> of_lane_;
  int64_t of_all_ = 0;
  int64_t mark_ = accesses;
  int64_t steps_ = 0;
  int64_t path_ = 0;
};

template <class T>
Range RangeOf(const std::vector<T>& values) {
  return {reinterpret_cast<uintptr_t>(values.data()), reinterpret_cast<uintptr_t>(values.data() + values.size())};
}

void Run() {
  Attributes lists;
  std::string name;
  for (int64_t count = 0; std::cin >> name >> count;) {
    std::vector<int64_t>& list = lists[name];
    list.resize(count);
    for (int64_t& value : list) std::cin >> value;
  }
  const int32_t threads = static_cast<int32_t>(lists.at("threads").at(0));
  const std::vector<int32_t> omega(lists.at("omega").begin(), lists.at("omega").end());
  lists.erase("threads");
  lists.erase("omega");
  OwnedProblem owned;
  if (const std::string wrong = ReadProblem(lists, owned); !wrong.empty()) throw std::invalid_argument(wrong);
  Problem problem = owned.View();
  problem.omega = omega.data();
  const HostWorkspace workspace(problem);
  const Workspace& work = workspace.Work();
  const Memory memory = work.MemoryOf(0);
  std::vector<int32_t> answer(problem.num_ranks * (problem.num_slots + 1) + problem.NumQuotas() + 3);
  int32_t* const load = answer.data() + problem.num_ranks * problem.num_slots + problem.NumQuotas();
  const Plan plan{answer.data(), answer.data() + problem.num_ranks * problem.num_slots, load, load + problem.num_ranks,
                  load + problem.num_ranks + 2};
  ranges[0] = {reinterpret_cast<uintptr_t>(workspace.begin()), reinterpret_cast<uintptr_t>(workspace.end())};
  ranges[1] = RangeOf(omega);
  ranges[2] = RangeOf(answer);

  const auto report = [](const char* kernel, LaneTeam& team) {
    const int64_t path = team.path();
    std::cout << kernel << ' ' << team.steps() << ' ' << path << '\n';
  };
  LaneTeam begin(threads);
  Begin(begin, work);
  report("begin", begin);
  for (int32_t run = 0; run < work.NumRuns(); ++run) {
    LaneTeam team(threads);
    RunEntry(team, problem, work, memory, run);
    report(run == work.NumCandidates() ? "paper" : "entry", team);
  }
  LaneTeam conclude(threads);
  Conclude(conclude, problem, work, memory, plan);
  report("conclude", conclude);
}

}  // namespace
}  // namespace topoep

int main() { topoep::Run(); }
