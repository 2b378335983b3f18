// Schedules of transfers: the copies are those that the planner prices, both sides agree, and any team makes them.

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/made_schedules.h"
#include "tests/cc/transfer_workload.h"
#include "tests/native/counting_team.h"

namespace topoep {
namespace {

TransferCase RandomCase(std::mt19937& rng) {
  const auto draw = [&rng](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(rng);
  };
  TransferCase c;
  const int32_t num_domains = draw(1, 4);
  c.domain_of_rank.resize(draw(2, 12));
  for (int32_t& domain : c.domain_of_rank) domain = draw(0, num_domains - 1);
  c.mains = draw(1, 3);
  c.slots = std::min(draw(0, 3), c.NumExperts() - c.mains);
  c.row_bytes = draw(1, 2000);
  c.occupied = draw(0, 10) / 10.0;
  c.pulls = static_cast<Pulls>(draw(0, 3));
  return c;
}

// Bytes by class of link, sent and received, of each rank: Links' own words.
std::vector<int64_t> Priced(const MadeSchedules& made, const std::vector<int32_t>& slot_expert, Pulls mode) {
  std::vector<int64_t> counts(PullCounts::NumWords(made.problem));
  std::vector<int64_t> words(Links::NumWords(made.problem.num_ranks));
  std::vector<Best> bests(Links::kNumBests);
  SerialTeam team;
  CountPulls(team, made.problem, made.domains, slot_expert.data(), mode, PullCounts(made.problem, counts.data()),
             Links(made.problem, words.data(), bests.data()));
  return words;
}

Pulls ModeOf(const MadeSchedules& made, const std::vector<int32_t>& slot_expert) {
  if (made.problem.cost.pulls != Pulls::kBest) return made.problem.cost.pulls;
  int64_t best = -1;
  Pulls mode = Pulls::kDirect;
  for (int64_t id = 0; id < 3; ++id) {
    Problem problem = made.problem;
    problem.cost.pulls = static_cast<Pulls>(id);
    std::vector<int64_t> counts(PullCounts::NumWords(problem));
    std::vector<int64_t> words(Links::NumWords(problem.num_ranks));
    std::vector<Best> bests(Links::kNumBests);
    SerialTeam team;
    Pulls chosen{};
    const int64_t ps = PullPs(team, problem, made.domains, slot_expert.data(), PullCounts(problem, counts.data()),
                              Links(problem, words.data(), bests.data()), chosen);
    if (best < 0 || ps < best) {
      best = ps;
      mode = problem.cost.pulls;
    }
  }
  return mode;
}

TEST(TransferScheduleTest, CopiesAreWhatIsPricedAndCoverEverySlotOnce) {
  std::mt19937 rng(7);
  std::map<Pulls, int32_t> modes;
  for (int32_t i = 0; i < 400; ++i) {
    const TransferCase c = RandomCase(rng);
    const std::vector<int32_t> slot_expert = RandomPlacement(c, rng);
    const int32_t num_ranks = c.NumRanks();
    std::vector<int64_t> moved(Links::NumWords(num_ranks));
    std::multiset<Row> sent, received;
    Pulls mode = Pulls::kDirect;
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      MadeSchedules made(c, rank);
      SerialTeam team;
      made.Make(team, slot_expert);
      mode = ModeOf(made, slot_expert);
      std::vector<Best> unused(Links::kNumBests);
      const Links links(made.problem, moved.data(), unused.data());
      std::map<int32_t, std::vector<Range>> of_slot;
      for (int32_t k = 0; k < made.pull.incoming_begin[kMaxHops]; ++k) {
        const Copy copy = made.pull.incoming[k];
        const int64_t first = c.row_bytes * copy.slice / copy.slices;
        links.Add(team, copy.peer, rank, c.row_bytes * (copy.slice + 1) / copy.slices - first);
        const Range bytes = copy.Bytes(made.pull.pitch);
        EXPECT_LT(std::abs(bytes.begin - first), 16);
        if (copy.to == kSlots) of_slot[copy.to_row].push_back(bytes);
        EXPECT_LE(copy.Place(copy.to, copy.to_row, bytes.end, made.pull.pitch), c.Windows().Bytes()[copy.to]);
        Row row = ToRow(copy);
        row.push_back(rank);
        received.insert(row);
      }
      for (int32_t k = 0; k < made.pull.outgoing_begin[kMaxHops]; ++k) {
        const Copy copy = made.pull.outgoing[k];
        EXPECT_LE(copy.Place(copy.from, copy.from_row, copy.Bytes(made.pull.pitch).end, made.pull.pitch),
                  c.Windows().Bytes()[copy.from]);
        Row row = ToRow(copy);
        row.push_back(row[0]);
        row[0] = rank;
        sent.insert(row);
      }
      for (auto& [slot, ranges] : of_slot) {
        std::sort(ranges.begin(), ranges.end(), [](Range a, Range b) { return a.end < b.end; });
        int64_t end = 0;
        for (const Range& range : ranges) {
          EXPECT_EQ(range.begin, end);
          end = range.end;
        }
        EXPECT_EQ(end, made.pull.pitch);
      }
      int32_t occupied = 0;
      for (int32_t slot = 0; slot < c.slots; ++slot) occupied += slot_expert[rank * c.slots + slot] >= 0;
      EXPECT_EQ(of_slot.size(), occupied);
    }
    ++modes[mode];
    EXPECT_EQ(sent, received);
    EXPECT_EQ(moved, Priced(MadeSchedules(c, 0), slot_expert, mode)) << "case " << i;
  }
  for (const Pulls mode : {Pulls::kDirect, Pulls::kRelayed, Pulls::kStriped}) EXPECT_GT(modes[mode], 50);
}

// The places where copies of a hop write are apart, and a copy reads what an earlier hop wrote: pulls.py's check().
TEST(TransferScheduleTest, CopiesReadWhatEarlierHopsBrought) {
  std::mt19937 rng(8);
  for (int32_t i = 0; i < 200; ++i) {
    const TransferCase c = RandomCase(rng);
    const std::vector<int32_t> slot_expert = RandomPlacement(c, rng);
    std::vector<std::unique_ptr<MadeSchedules>> ranks;
    SerialTeam team;
    for (int32_t rank = 0; rank < c.NumRanks(); ++rank) {
      ranks.push_back(std::make_unique<MadeSchedules>(c, rank));
      ranks.back()->Make(team, slot_expert);
    }
    // (rank, window, grain) -> expert and grain of it.
    std::map<std::tuple<int32_t, int32_t, int64_t>, std::pair<int32_t, int64_t>> has;
    const int64_t pitch = ranks[0]->pull.pitch;
    for (int32_t expert = 0; expert < c.NumExperts(); ++expert) {
      for (int64_t at = 0; at < pitch; at += kGrain) {
        has[{expert / c.mains, kMains, expert % c.mains * pitch + at}] = {expert, at};
      }
    }
    for (int32_t hop = 0; hop < kMaxHops; ++hop) {
      auto after = has;
      for (int32_t rank = 0; rank < c.NumRanks(); ++rank) {
        const PullSchedule& pull = ranks[rank]->pull;
        for (int32_t k = pull.incoming_begin[hop]; k < pull.incoming_begin[hop + 1]; ++k) {
          const Copy copy = pull.incoming[k];
          const Range bytes = copy.Bytes(pitch);
          for (int64_t at = bytes.begin; at < bytes.end; at += kGrain) {
            const auto source = has.find({copy.peer, copy.from, copy.Place(copy.from, copy.from_row, at, pitch)});
            ASSERT_NE(source, has.end());
            EXPECT_EQ(source->second, std::make_pair(copy.expert, at));
            const bool fresh =
                after.insert({{rank, copy.to, copy.Place(copy.to, copy.to_row, at, pitch)}, {copy.expert, at}}).second;
            EXPECT_TRUE(fresh) << "written twice";
          }
        }
      }
      has = after;
    }
  }
}

TEST(TransferScheduleTest, AnyTeamMakesTheSame) {
  std::mt19937 rng(9);
  for (int32_t i = 0; i < 60; ++i) {
    const TransferCase c = RandomCase(rng);
    const std::vector<int32_t> slot_expert = RandomPlacement(c, rng);
    const int32_t rank = i % c.NumRanks();
    MadeSchedules one(c, rank);
    SerialTeam serial;
    one.Make(serial, slot_expert);
    for (int32_t lanes = 2; lanes <= 3; ++lanes) {
      MadeSchedules many(c, rank);
      RunThreads(lanes, [&](auto& team) { many.Make(team, slot_expert); });
      ASSERT_EQ(many.Contents(), one.Contents()) << "case " << i << ", " << lanes << " lanes";
    }
    CountingTeam counting(128);
    one.Make(counting, slot_expert);
    EXPECT_EQ(counting.Counted().steps, 8 + (c.pulls == Pulls::kBest ? 12 : 0) + 2);
  }
}

TEST(TransferScheduleTest, PiecesOfAllReplicasFitTheStaging) {
  std::mt19937 rng(10);
  for (int32_t i = 0; i < 200; ++i) {
    TransferCase c = RandomCase(rng);
    c.staging_bytes = std::max<int64_t>(c.Windows().LeastStaging(), 2 * std::uniform_int_distribution<>(16, 4096)(rng));
    const std::vector<int32_t> slot_expert = RandomPlacement(c, rng);
    std::map<int32_t, std::vector<int32_t>> index_of_owner;
    for (int32_t rank = 0; rank < c.NumRanks(); ++rank) {
      MadeSchedules made(c, rank);
      SerialTeam team;
      made.Make(team, slot_expert);
      for (int32_t slot = 0; slot < c.slots; ++slot) {
        const SlotGradient& at = made.push.slots[slot];
        if (at.owner < 0) continue;
        index_of_owner[at.owner].push_back(at.index);
        EXPECT_GE(at.piece, kGrain);
        EXPECT_EQ(at.piece % kGrain, 0);
        EXPECT_LE(at.piece * (at.index + 1), c.Windows().HalfBytes());
      }
    }
    for (const auto& [owner, indices] : index_of_owner) {
      for (size_t k = 0; k < indices.size(); ++k) EXPECT_EQ(indices[k], k);  // ascending (rank, slot)
    }
  }
}

}  // namespace
}  // namespace topoep
