#include "xla_ffi/plan/owned_problem.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "xla_ffi/plan/cost.h"

namespace topoep {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kCandidateFields = 5;
constexpr int64_t kMaxSetting = int64_t{1} << 20;  // keeps products of a setting and rows inside 64 bits
constexpr int64_t kMaxThreads = 256;

// Takes attributes one by one, and remembers the first thing that is wrong.
class Reader {
 public:
  explicit Reader(const Attributes& attributes) : attributes_(attributes) {}

  void Check(const std::string& name, int64_t value, int64_t low, int64_t high) {
    if (low <= value && value <= high) return;
    Refuse(name + "=" + std::to_string(value) + " must be in [" + std::to_string(low) + ", " + std::to_string(high) +
           "]");
  }

  // Stays empty where something is wrong.
  template <class T>
  void List(const char* name, int64_t low, int64_t high, std::vector<T>& list) {
    ++num_taken_;
    const auto found = attributes_.find(name);
    if (found == attributes_.end()) return Refuse(std::string(name) + " is missing");
    for (const int64_t value : found->second) Check(name, value, low, high);
    if (wrong_.empty()) std::transform(found->second.begin(), found->second.end(), std::back_inserter(list), Cast<T>);
  }

  // Stays as it is where something is wrong.
  template <class T>
  void Value(const char* name, int64_t low, int64_t high, T& value) {
    std::vector<T> list;
    List(name, low, high, list);
    if (list.size() == 1) return void(value = list[0]);
    Check("values of " + std::string(name), static_cast<int64_t>(list.size()), 1, 1);
  }

  std::string Wrong() {
    const int64_t given = static_cast<int64_t>(attributes_.size());
    Check("attributes", given, num_taken_, num_taken_);
    return wrong_;
  }

 private:
  template <class T>
  static T Cast(int64_t value) {
    return static_cast<T>(value);
  }

  void Refuse(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }

  const Attributes& attributes_;
  int64_t num_taken_ = 0;
  std::string wrong_;
};

void ReadTopology(Reader& reader, OwnedProblem& owned) {
  Problem& problem = owned.sizes;
  reader.List("domain_of_rank", 0, kInt32Max, owned.domain_of_rank);
  const int64_t ranks = static_cast<int64_t>(owned.domain_of_rank.size());
  reader.Check("ranks", ranks, 1, kInt32Max);
  for (const int32_t domain : owned.domain_of_rank) reader.Check("domain_of_rank", domain, 0, ranks - 1);
  reader.Value("num_experts", 1, kInt32Max, problem.num_experts);
  reader.Check("num_experts beyond a multiple of the ranks", ranks == 0 ? 0 : problem.num_experts % ranks, 0, 0);
}

// The bounds of CostModel: no 64-bit sum overflows within them.
void ReadCost(Reader& reader, OwnedProblem& owned) {
  CostModel& cost = owned.sizes.cost;
  reader.Value("inter_fs_per_byte", 0, kInt64Max / (2 * kMaxRows), cost.inter_fs_per_byte);
  reader.Value("intra_fs_per_byte", 0, kInt64Max / (2 * kMaxRows), cost.intra_fs_per_byte);
  reader.Value("pulls", 0, static_cast<int64_t>(Pulls::kBest), cost.pulls);
  const int64_t slowest_link = std::max({cost.inter_fs_per_byte, cost.intra_fs_per_byte, int64_t{1}});
  const int64_t copies_per_replica = cost.pulls == Pulls::kDirect ? 1 : 2;
  reader.Value("token_bytes", 1, kInt64Max / (2 * kMaxRows * slowest_link), cost.token_bytes);
  reader.Value("expert_bytes", 1, kInt64Max / (copies_per_replica * kMaxReplicas * slowest_link), cost.expert_bytes);
  reader.List("rank_speed", 1, kMaxSpeed, owned.rank_speed);
  int64_t slowest_rank = kNominalSpeed;
  for (const int32_t speed : owned.rank_speed) slowest_rank = std::min<int64_t>(slowest_rank, speed);
  if (!owned.rank_speed.empty()) {
    const int64_t ranks = static_cast<int64_t>(owned.domain_of_rank.size());
    reader.Check("values of rank_speed", static_cast<int64_t>(owned.rank_speed.size()), ranks, ranks);
  }
  reader.Value("tile_rows", 0, kMaxRows, cost.tile_rows);
  reader.Value("row_ps", 0, ComputeLimit(MaxPaddedRows(cost.tile_rows), slowest_rank), cost.row_ps);
  reader.Value("instance_ps", 0, ComputeLimit(kMaxInstances, slowest_rank), cost.instance_ps);
}

void ReadEffort(Reader& reader, OwnedProblem& owned) {
  Effort& effort = owned.sizes.effort;
  std::vector<int64_t> fields;
  reader.List("candidates", -1, kInt32Max, fields);
  const int64_t count = static_cast<int64_t>(fields.size()) / kCandidateFields;
  reader.Check("candidates", count, owned.sizes.planner == Planner::kTopoep ? 1 : 0, int64_t{1} << 16);
  reader.Check("fields of candidates", static_cast<int64_t>(fields.size()), count * kCandidateFields,
               count * kCandidateFields);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* at = fields.data() + i * kCandidateFields;
    owned.candidates.push_back({at[0], at[1], at[2], at[3], at[4]});
    reader.Check("a candidate's sixteenths", owned.candidates.back().sixteenths, 0, kSixteenths);
    for (const int64_t setting : {at[1], at[3], at[4]}) reader.Check("a candidate's setting", setting, -1, kMaxSetting);
  }
  reader.List("thrifty", 0, static_cast<int64_t>(Kind::kHome), owned.thrifty);
  reader.List("eager", 0, static_cast<int64_t>(Kind::kHome), owned.eager);
  reader.Value("fill_moves", 0, kMaxSetting, effort.fill_moves);
  reader.Value("paper", 0, 1, effort.paper);
  reader.Value("refine_changes", 0, kMaxSetting, effort.refine_changes);
  reader.Value("refine_starts", 0, kMaxSetting, effort.refine_starts);
  reader.Value("refine_waves", 0, kMaxSetting, effort.refine_waves);
}

}  // namespace

std::string ReadProblem(const Attributes& attributes, OwnedProblem& owned) {
  Reader reader(attributes);
  Problem& problem = owned.sizes;
  ReadTopology(reader, owned);
  ReadCost(reader, owned);
  const int64_t ranks = std::max<int64_t>(static_cast<int64_t>(owned.domain_of_rank.size()), 1);
  const int64_t mains = problem.num_experts / ranks;
  reader.Value("num_slots", 0, std::min(problem.num_experts - mains, kMaxReplicas / ranks), problem.num_slots);
  const bool by_instance = problem.cost.instance_ps > 0 || problem.cost.tile_rows > 0;
  reader.Check("instances of a rank", mains + problem.num_slots, 1, by_instance ? kMaxInstances : kInt32Max);
  reader.Value("cap_rows", kNoCap, kInt64Max, problem.cap_rows);
  reader.Value("block_rows", 1, kInt32Max, problem.block_rows);
  reader.Value("planner", 0, static_cast<int64_t>(Planner::kTopoep), problem.planner);
  reader.Value("objective", 0, static_cast<int64_t>(Objective::kEq8), problem.objective);
  reader.Value("num_threads", 1, kMaxThreads, problem.num_threads);
  ReadEffort(reader, owned);
  return reader.Wrong();
}

}  // namespace topoep
