// Ranks that pull and push, epoch after epoch, each with a new plan, and check every byte that they get.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/test_fabric.h"
#include "tests/native/host_fabric.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/thread_team.h"
#include "xla_ffi/transfer/pull.h"
#include "xla_ffi/transfer/push.h"

namespace topoep {

struct TransferCase {
  std::vector<int32_t> domain_of_rank;
  int32_t mains = 2;
  int32_t slots = 2;
  int64_t row_bytes = 200;  // of parameters
  int32_t columns = 52;     // of gradients; a multiple of four, which bodies treat apart
  Pulls pulls = Pulls::kBest;
  Gets gets = Gets::kAll;
  int32_t workers = 2;
  int64_t staging_bytes = 4096;
  int32_t epochs = 20;
  double occupied = 0.7;  // share of slots
  std::chrono::milliseconds timeout{60000};
  uint32_t seed = 1;

  int32_t NumRanks() const { return static_cast<int32_t>(domain_of_rank.size()); }
  int32_t NumExperts() const { return NumRanks() * mains; }

  Problem ToProblem() const {
    Problem problem{};
    problem.num_ranks = NumRanks();
    problem.num_experts = NumExperts();
    problem.num_slots = slots;
    problem.num_domains = 1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end());
    problem.domain_of_rank = domain_of_rank.data();
    problem.cost = {row_bytes, 1, 1, 20000, 5000};
    problem.cost.pulls = pulls;
    problem.objective = Objective::kBottleneck;
    return problem;
  }

  WindowShape Windows() const { return ShapeOf(ToProblem(), row_bytes, staging_bytes, 0); }
};

// A legal placement: ascending experts that are not the rank's own, then -1. Few experts are hot, so that they have
// many replicas.
inline std::vector<int32_t> RandomPlacement(const TransferCase& c, std::mt19937& rng) {
  std::vector<int32_t> slot_expert(int64_t{c.NumRanks()} * c.slots, -1);
  const auto draw = [&rng] { return std::uniform_real_distribution<double>(0, 1)(rng); };
  for (int32_t rank = 0; rank < c.NumRanks(); ++rank) {
    std::vector<int32_t> held;
    for (int32_t slot = 0; slot < c.slots; ++slot) {
      if (draw() >= c.occupied) continue;
      const double skewed = draw() * draw();
      const int32_t expert = std::min(static_cast<int32_t>(skewed * c.NumExperts()), c.NumExperts() - 1);
      if (expert / c.mains != rank && std::count(held.begin(), held.end(), expert) == 0) held.push_back(expert);
    }
    std::sort(held.begin(), held.end());
    std::copy(held.begin(), held.end(), slot_expert.begin() + int64_t{rank} * c.slots);
  }
  return slot_expert;
}

inline uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Parameters and gradients follow from what they are: nobody has to send them to check them.
inline void FillParameters(int32_t epoch, int32_t expert, int64_t bytes, char* row) {
  const uint32_t seed = Mix(epoch * 7919u + expert);
  for (int64_t i = 0; i < bytes; ++i) row[i] = static_cast<char>(Mix(seed + static_cast<uint32_t>(i)));
}

// Magnitudes far apart, so that another order of additions gives another sum.
inline void FillGradients(int32_t epoch, int32_t row, int32_t columns, float* grads) {
  const uint32_t seed = Mix(epoch * 104729u + row);
  const float scale = std::pow(10.0f, static_cast<float>(seed % 12) - 6);
  for (int32_t i = 0; i < columns; ++i) {
    grads[i] = scale * (static_cast<float>(Mix(seed + i) % 200001u) / 1e5f - 1);
  }
}

template <class Orders = HostOrders>
class TransferRun {
 public:
  explicit TransferRun(const TransferCase& c)
      : c_(c),
        problem_(c_.ToProblem()),
        table_(problem_),
        world_(c_.Windows(), c_.domain_of_rank.data(), c_.gets, c_.workers, c_.timeout) {
    std::mt19937 rng(c.seed);
    for (int32_t epoch = 0; epoch < c.epochs; ++epoch) plans_.push_back(RandomPlacement(c_, rng));
    for (int32_t rank = 0; rank < c.NumRanks(); ++rank) ranks_.emplace_back(new Rank(*this, rank));
  }
  TransferRun(const TransferRun&) = delete;

  Trouble& trouble() { return trouble_; }
  std::vector<std::vector<int32_t>>& plans() { return plans_; }
  HostWorld& world() { return world_; }

  // Runs all epochs on threads; the first complaint of each rank, "" where all was well.
  std::vector<std::string> Run() {
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < c_.NumRanks(); ++rank) {
      for (int32_t worker = 0; worker < c_.workers; ++worker) {
        threads.emplace_back([this, rank, worker] { ranks_[rank]->Work(worker); });
      }
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<std::string> complaints;
    for (const auto& rank : ranks_) {
      const Failure failure = world_.failure(rank->rank);
      if (failure.failed != 0) rank->Complain(Describe(rank->rank, failure, c_.timeout));
      complaints.push_back(rank->complaint);
    }
    return complaints;
  }

  int64_t moved_parameters() const { return moved_parameters_; }
  int64_t moved_gradients() const { return moved_gradients_; }

 private:
  static constexpr char kUntouched = 0x5a;

  // One rank's arrays and what its workers share. Only its own workers meet at a barrier: ranks run apart.
  struct Rank {
    Rank(TransferRun& run, int32_t rank) : run(run), c(run.c_), rank(rank), barrier(run.c_.workers) {
      const Domains domains = run.table_.View();
      Arena measured;
      Layout(domains, measured);
      memory.resize(measured.Used() + Arena::kAlignment);
      const auto base = reinterpret_cast<uintptr_t>(memory.data());
      Arena arena(memory.data() + (Arena::kAlignment - base % Arena::kAlignment) % Arena::kAlignment);
      Layout(domains, arena);
      mains.resize(c.mains * c.row_bytes);
      slots.resize(c.slots * c.row_bytes);
      slot_grads.resize(int64_t{c.slots} * c.columns);
      main_grads.resize(int64_t{c.mains} * c.columns);
    }

    void Layout(const Domains& domains, Arena& arena) {
      pull = PullSchedule(run.problem_, domains, rank, c.row_bytes, arena);
      push = PushSchedule(run.problem_, rank, c.columns * int64_t{4}, run.c_.Windows().HalfBytes(), arena);
    }

    void Work(int32_t worker) {
      TestFabric<Orders> fabric(run.world_, run.trouble_, rank, worker);
      for (int32_t epoch = 0; epoch < c.epochs; ++epoch) {
        if (worker == 0) Prepare(epoch);
        if (!Call(PullReplicas(Begin(fabric), pull, mains.data(), slots.data()))) return;
        if (worker == 0) CheckPull(epoch);
        if (!Call(PushGradients(Begin(fabric), push, slot_grads.data(), main_grads.data()))) return;
        if (worker == 0) CheckPush(epoch);
      }
    }

    TestFabric<Orders>& Begin(TestFabric<Orders>& fabric) {
      barrier.Wait();
      return fabric;
    }

    // The end of a call: as a kernel's, it comes when all workers have ended.
    bool Call(bool ended) {
      if (!ended) failed.store(true, std::memory_order_relaxed);
      barrier.Wait();
      return !failed.load(std::memory_order_relaxed);
    }

    void Prepare(int32_t epoch) {
      const int32_t* plan = run.plans_[epoch].data();
      SerialTeam team;
      MakePullSchedule(team, run.problem_, run.table_.View(), plan, pull);
      MakePushSchedule(team, plan, push);
      for (int32_t main = 0; main < c.mains; ++main) {
        FillParameters(epoch, rank * c.mains + main, c.row_bytes, mains.data() + main * c.row_bytes);
        FillGradients(epoch, -1 - rank * c.mains - main, c.columns, main_grads.data() + int64_t{main} * c.columns);
      }
      std::fill(slots.begin(), slots.end(), kUntouched);
      std::fill(slot_grads.begin(), slot_grads.end(), std::numeric_limits<float>::quiet_NaN());
      for (int32_t slot = 0; slot < c.slots; ++slot) {
        if (plan[rank * c.slots + slot] < 0) continue;
        FillGradients(epoch, rank * c.slots + slot, c.columns, slot_grads.data() + int64_t{slot} * c.columns);
      }
    }

    void CheckPull(int32_t epoch) {
      std::vector<char> want(c.row_bytes);
      for (int32_t slot = 0; slot < c.slots; ++slot) {
        const int32_t expert = run.plans_[epoch][rank * c.slots + slot];
        std::fill(want.begin(), want.end(), kUntouched);
        if (expert >= 0) FillParameters(epoch, expert, c.row_bytes, want.data());
        if (expert >= 0) run.moved_parameters_ += c.row_bytes;
        if (!std::equal(want.begin(), want.end(), slots.begin() + slot * c.row_bytes)) {
          Complain("epoch " + std::to_string(epoch) + ": slot " + std::to_string(slot) + " of rank " +
                   std::to_string(rank) + (expert < 0 ? " was touched" : " has wrong parameters"));
        }
      }
    }

    void CheckPush(int32_t epoch) {
      std::vector<float> want(c.columns);
      std::vector<float> grads(c.columns);
      for (int32_t main = 0; main < c.mains; ++main) {
        const int32_t expert = rank * c.mains + main;
        FillGradients(epoch, -1 - expert, c.columns, want.data());
        for (int32_t i = 0; i < c.NumRanks() * c.slots; ++i) {
          if (run.plans_[epoch][i] != expert) continue;
          FillGradients(epoch, i, c.columns, grads.data());
          for (int32_t k = 0; k < c.columns; ++k) want[k] += grads[k];
          run.moved_gradients_ += c.columns * int64_t{4};
        }
        if (std::memcmp(want.data(), main_grads.data() + int64_t{main} * c.columns, c.columns * sizeof(float)) != 0) {
          Complain("epoch " + std::to_string(epoch) + ": wrong gradients of expert " + std::to_string(expert));
        }
      }
    }

    void Complain(const std::string& text) {
      if (complaint.empty()) complaint = text;
    }

    TransferRun& run;
    const TransferCase& c;
    int32_t rank;
    ThreadTeamState barrier;
    std::atomic<bool> failed{false};
    std::string complaint;
    std::vector<char> memory;
    PullSchedule pull;
    PushSchedule push;
    std::vector<char> mains, slots;
    std::vector<float> slot_grads, main_grads;
  };

  TransferCase c_;
  Problem problem_;
  DomainTable table_;
  HostWorld world_;
  Trouble trouble_;
  std::vector<std::vector<int32_t>> plans_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::atomic<int64_t> moved_parameters_{0};
  std::atomic<int64_t> moved_gradients_{0};
};

}  // namespace topoep
