#include "tools/gpu/problem_file.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace topoep {
namespace {

enum Size {
  kRanks,
  kExperts,
  kSlots,
  kDomains,
  kPlanner,
  kObjective,
  kCapRows,
  kBlockRows,
  kExpertBytes,
  kTokenBytes,
  kRowPs,
  kInterFs,
  kIntraFs,
  kInstancePs,
  kTileRows,
  kPulls,
  kFillMoves,
  kPaper,
  kRefineChanges,
  kRefineStarts,
  kRefineWaves,
  kNumSizes
};

[[noreturn]] void Give(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(2);
}

// Arrays of int64, each behind its length.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "rb")) {
    if (file_ == nullptr) Give("cannot open " + path);
  }
  ~Reader() { std::fclose(file_); }
  Reader(const Reader&) = delete;

  bool AtEnd() {
    const int next = std::fgetc(file_);
    if (next == EOF) return true;
    std::ungetc(next, file_);
    return false;
  }

  template <class T>
  std::vector<T> Take() {
    int64_t count = 0;
    Read(&count, 1);
    std::vector<int64_t> words(count);
    Read(words.data(), count);
    std::vector<T> values;
    for (const int64_t word : words) values.push_back(static_cast<T>(word));
    return values;
  }

 private:
  void Read(int64_t* words, int64_t count) {
    if (std::fread(words, sizeof(int64_t), count, file_) != static_cast<size_t>(count)) Give(path_ + " ends too early");
  }

  std::string path_;
  std::FILE* file_;
};

StoredProblem ReadProblem(Reader& reader) {
  StoredProblem stored;
  stored.sizes = reader.Take<int64_t>();
  if (stored.sizes.size() != kNumSizes) Give("a problem has another number of sizes: is the file of this version?");
  stored.domain_of_rank = reader.Take<int32_t>();
  stored.rank_speed = reader.Take<int32_t>();
  const std::vector<int64_t> fields = reader.Take<int64_t>();
  for (size_t i = 0; i + 5 <= fields.size(); i += 5) {
    stored.candidates.push_back({fields[i], fields[i + 1], fields[i + 2], fields[i + 3], fields[i + 4]});
  }
  stored.thrifty = reader.Take<int32_t>();
  stored.eager = reader.Take<int32_t>();
  stored.omega = reader.Take<int32_t>();
  stored.right.slot_expert = reader.Take<int32_t>();
  stored.right.quota = reader.Take<int32_t>();
  stored.right.rank_load = reader.Take<int32_t>();
  stored.right.predicted_ps = reader.Take<int32_t>();
  stored.right.status = reader.Take<int32_t>();
  return stored;
}

}  // namespace

Problem StoredProblem::View() const {
  const auto size = [this](Size which) { return static_cast<int32_t>(sizes[which]); };
  Problem problem{};
  problem.num_ranks = size(kRanks);
  problem.num_experts = size(kExperts);
  problem.num_slots = size(kSlots);
  problem.num_domains = size(kDomains);
  problem.domain_of_rank = domain_of_rank.data();
  problem.omega = omega.data();
  problem.cost = {sizes[kExpertBytes], sizes[kTokenBytes], sizes[kRowPs], sizes[kInterFs], sizes[kIntraFs]};
  problem.cost.instance_ps = sizes[kInstancePs];
  problem.cost.tile_rows = sizes[kTileRows];
  if (!rank_speed.empty()) problem.cost.rank_speed = rank_speed.data();
  problem.cost.pulls = static_cast<Pulls>(sizes[kPulls]);
  problem.cap_rows = sizes[kCapRows];
  problem.block_rows = sizes[kBlockRows];
  problem.planner = static_cast<Planner>(sizes[kPlanner]);
  problem.objective = static_cast<Objective>(sizes[kObjective]);
  problem.effort = &effort;
  return problem;
}

std::vector<StoredProblem> ReadProblems(const std::string& path) {
  Reader reader(path);
  std::vector<StoredProblem> problems;
  while (!reader.AtEnd()) problems.push_back(ReadProblem(reader));
  for (StoredProblem& stored : problems) {  // they do not move any more
    const auto size = [&stored](Size which) { return static_cast<int32_t>(stored.sizes[which]); };
    stored.effort = {stored.candidates.data(),
                     static_cast<int32_t>(stored.candidates.size()),
                     stored.thrifty.data(),
                     static_cast<int32_t>(stored.thrifty.size()),
                     stored.eager.data(),
                     static_cast<int32_t>(stored.eager.size()),
                     size(kFillMoves),
                     stored.sizes[kPaper] != 0,
                     stored.sizes[kRefineChanges],
                     size(kRefineStarts),
                     size(kRefineWaves)};
  }
  return problems;
}

}  // namespace topoep
