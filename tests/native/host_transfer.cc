#include "tests/native/host_transfer.h"

#include <memory>
#include <thread>
#include <vector>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/transfer/placement.h"
#include "xla_ffi/transfer/pull.h"
#include "xla_ffi/transfer/push.h"

namespace topoep {
namespace {

// Schedules of all ranks with their memory; layout(rank, arena) lays one out.
template <class Schedule>
class Schedules {
 public:
  template <class Layout>
  Schedules(int32_t num_ranks, Layout layout) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      Arena measured;
      layout(rank, measured);
      memory_.emplace_back(new char[measured.Used()]);
      Arena arena(memory_.back().get());
      schedules_.push_back(layout(rank, arena));
    }
  }

  const Schedule& operator[](int32_t rank) const { return schedules_[rank]; }

 private:
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<Schedule> schedules_;
};

// body(fabric) by every worker of every rank; the first failure of the lowest rank that has one.
template <class Body>
std::string RunRanks(const HostTransfer& call, Body body) {
  HostWorld world(ShapeOf(call), call.problem.domain_of_rank, call.gets, call.num_workers, call.timeout);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < call.problem.num_ranks; ++rank) {
    for (int32_t worker = 0; worker < call.num_workers; ++worker) {
      threads.emplace_back([&world, &body, rank, worker] {
        HostFabric<> fabric(world, rank, worker);
        body(fabric);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int32_t rank = 0; rank < call.problem.num_ranks; ++rank) {
    const Failure failure = world.failure(rank);
    if (failure.failed != 0) return Describe(rank, failure, call.timeout);
  }
  return "";
}

}  // namespace

std::string CheckPlacement(const Problem& problem, const int32_t* slot_expert) {
  const RankLayer layer{0, problem.num_ranks, problem.num_slots, problem.MainsPerRank(), 0};
  for (int32_t i = 0; i < problem.num_ranks * problem.num_slots; ++i) {
    const Flaw flaw = FlawOf(layer, slot_expert, i);
    if (flaw == Flaw::kNone) continue;
    const std::string where = "slot_expert[" + std::to_string(i / problem.num_slots) + ", " +
                              std::to_string(i % problem.num_slots) + "]=" + std::to_string(slot_expert[i]);
    if (flaw == Flaw::kRange) return where + " must be in [-1, " + std::to_string(problem.num_experts - 1) + "]";
    return where + (flaw == Flaw::kOwn ? " is a main of that rank" : " is held twice by that rank");
  }
  return "";
}

WindowShape ShapeOf(const HostTransfer& call) { return ShapeOf(call.problem, call.row_bytes, call.staging_bytes, 0); }

std::string HostPull(const HostTransfer& call, const int32_t* slot_expert, const char* mains, char* slots) {
  const Problem& problem = call.problem;
  const DomainTable table(problem);
  const Schedules<PullSchedule> schedules(problem.num_ranks, [&](int32_t rank, Arena& arena) {
    return PullSchedule(problem, table.View(), rank, call.row_bytes, arena);
  });
  SerialTeam team;
  for (int32_t rank = 0; rank < problem.num_ranks; ++rank) {
    MakePullSchedule(team, problem, table.View(), slot_expert, schedules[rank]);
  }
  return RunRanks(call, [&](HostFabric<>& fabric) {
    const int64_t rank = fabric.Rank();
    PullReplicas(fabric, schedules[fabric.Rank()], mains + rank * problem.MainsPerRank() * call.row_bytes,
                 slots + rank * problem.num_slots * call.row_bytes);
  });
}

std::string HostPush(const HostTransfer& call, const int32_t* slot_expert, const float* slot_grads, float* main_grads) {
  const Problem& problem = call.problem;
  const int64_t half_bytes = ShapeOf(call).HalfBytes();
  const int64_t columns = call.row_bytes / static_cast<int64_t>(sizeof(float));
  const Schedules<PushSchedule> schedules(problem.num_ranks, [&](int32_t rank, Arena& arena) {
    return PushSchedule(problem, rank, call.row_bytes, half_bytes, arena);
  });
  SerialTeam team;
  for (int32_t rank = 0; rank < problem.num_ranks; ++rank) MakePushSchedule(team, slot_expert, schedules[rank]);
  return RunRanks(call, [&](HostFabric<>& fabric) {
    const int64_t rank = fabric.Rank();
    PushGradients(fabric, schedules[fabric.Rank()], slot_grads + rank * problem.num_slots * columns,
                  main_grads + rank * problem.MainsPerRank() * columns);
  });
}

}  // namespace topoep
