// Pulls and pushes among threads: every parameter arrives, every gradient is added in order, a lost rank is an error.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/transfer_workload.h"

namespace topoep {
namespace {

// Sanitizers are slow; -DTOPOEP_TRANSFER_EPOCHS=200 makes them run as long.
#if !defined(TOPOEP_TRANSFER_EPOCHS)
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define TOPOEP_TRANSFER_EPOCHS 20
#else
#define TOPOEP_TRANSFER_EPOCHS 200
#endif
#endif

struct Named {
  const char* name;
  TransferCase c;
};

std::vector<Named> Cases() {
  const std::vector<int32_t> two{0, 0}, apart{0, 1}, uneven{0, 0, 0, 1, 1, 2}, mixed{1, 0, 1, 0, 2, 1, 0};
  std::vector<int32_t> eight, sixteen;
  for (int32_t r = 0; r < 8; ++r) eight.push_back(r / 4);
  for (int32_t r = 0; r < 16; ++r) sixteen.push_back(r / 4);
  std::vector<Named> cases;
  const auto add = [&cases](const char* name, const std::vector<int32_t>& domains, auto change) {
    TransferCase c;
    c.domain_of_rank = domains;
    c.seed = static_cast<uint32_t>(cases.size()) + 1;
    change(c);
    cases.push_back({name, c});
  };
  add("one domain", two, [](TransferCase&) {});
  add("a rank in each domain", apart, [](TransferCase& c) { c.gets = Gets::kDomain; });
  add("one worker", uneven, [](TransferCase& c) { c.workers = 1; });
  add("three workers, odd rows", uneven, [](TransferCase& c) {
    c.workers = 3;
    c.row_bytes = 37;
    c.columns = 7;
  });
  add("rows shorter than a grain", mixed, [](TransferCase& c) {
    c.row_bytes = 2;
    c.columns = 1;
    c.staging_bytes = 2 * 16 * 7 * 2;  // the least there can be
  });
  for (const Gets gets : {Gets::kNone, Gets::kDomain, Gets::kAll}) {
    for (const Pulls pulls : {Pulls::kDirect, Pulls::kRelayed, Pulls::kStriped, Pulls::kBest}) {
      add("uneven domains, all modes", mixed, [=](TransferCase& c) {
        c.gets = gets;
        c.pulls = pulls;
        c.slots = 3;
        c.row_bytes = 100 + 64 * static_cast<int64_t>(pulls);
      });
    }
  }
  add("many pieces", eight, [](TransferCase& c) {
    c.columns = 301;
    c.staging_bytes = 2 * 16 * 8 * 2;
  });
  add("hot experts", eight, [](TransferCase& c) {
    c.mains = 1;
    c.slots = 4;
    c.occupied = 1;
    c.gets = Gets::kDomain;
    c.pulls = Pulls::kStriped;
  });
  add("no slots", uneven, [](TransferCase& c) { c.slots = 0; });
  add("no replicas", uneven, [](TransferCase& c) { c.occupied = 0; });
  add("few replicas", sixteen, [](TransferCase& c) { c.occupied = 0.05; });
  add("sixteen ranks", sixteen, [](TransferCase& c) { c.gets = Gets::kDomain; });
  add("sixteen ranks, nobody gets", sixteen, [](TransferCase& c) {
    c.gets = Gets::kNone;
    c.pulls = Pulls::kStriped;
  });
  return cases;
}

TEST(TransferTest, EverythingArrives) {
  int32_t runs = 0;
  struct Way {
    bool delays;
    bool late_puts;
  };
  for (const Way& way : {Way{false, false}, Way{true, false}, Way{true, true}}) {
    for (Named& named : Cases()) {
      named.c.epochs = TOPOEP_TRANSFER_EPOCHS;
      TransferRun<> run(named.c);
      run.trouble().delays = way.delays;
      run.trouble().late_puts = way.late_puts;
      for (const std::string& complaint : run.Run()) EXPECT_EQ(complaint, "") << named.name << ", case " << runs;
      EXPECT_EQ(run.moved_parameters() > 0, named.c.slots > 0 && named.c.occupied > 0) << named.name;
      EXPECT_EQ(run.moved_gradients() > 0, named.c.slots > 0 && named.c.occupied > 0) << named.name;
      ++runs;
    }
  }
}

TEST(TransferTest, WithoutReplicasNothingMoves) {
  for (const Gets gets : {Gets::kNone, Gets::kAll}) {
    TransferCase c;
    c.domain_of_rank = std::vector<int32_t>{0, 0, 1, 1};
    c.occupied = 0;
    c.gets = gets;
    TransferRun<> run(c);
    for (int32_t rank = 0; rank < 4; ++rank) {
      for (const Window window : {kMains, kSlots, kStripes, kStaging}) {
        std::memset(run.world().At(rank, window), 0x33, c.Windows().Bytes()[window]);
      }
    }
    for (const std::string& complaint : run.Run()) EXPECT_EQ(complaint, "");
    for (int32_t rank = 0; rank < 4; ++rank) {
      for (const Window window : {kMains, kSlots, kStripes, kStaging}) {
        const std::vector<char> untouched(c.Windows().Bytes()[window], 0x33);
        EXPECT_EQ(std::memcmp(run.world().At(rank, window), untouched.data(), untouched.size()), 0);
      }
      EXPECT_EQ(*run.world().state(rank).pulls, c.epochs);
      EXPECT_EQ(*run.world().state(rank).pushes, c.epochs);
    }
  }
}

// Wherever a rank stops, everybody ends, and whoever depends on it says on whom it waited and for what.
TEST(TransferTest, AStoppedRankIsAnError) {
  int32_t runs = 0;
  int32_t named = 0;
  for (int64_t calls = 0; calls < 400; calls += 13) {
    TransferCase c;
    c.domain_of_rank = std::vector<int32_t>{0, 0, 1, 1, 1};
    c.gets = calls % 2 == 0 ? Gets::kDomain : Gets::kAll;
    c.epochs = 1000;
    c.occupied = 1;
    c.timeout = std::chrono::milliseconds(120);
    TransferRun<> run(c);
    run.plans().assign(1000, run.plans()[0]);
    run.trouble().stopped_rank = 2;
    run.trouble().calls_before_stop = calls;
    const std::vector<std::string> complaints = run.Run();
    bool direct = false;
    for (int32_t rank = 0; rank < 5; ++rank) {
      if (rank == 2) continue;
      EXPECT_NE(complaints[rank].find("rank " + std::to_string(rank) + " waited 120 ms for rank "), std::string::npos)
          << complaints[rank];
      direct = direct || complaints[rank].find("for rank 2 to ") != std::string::npos;
    }
    ++runs;
    named += direct;
  }
  EXPECT_GE(named, runs * 3 / 4);  // all of them, unless the machine is so busy that others come late, too
}

TEST(TransferTest, FailuresAreDescribed) {
  const auto text = [](Word word, int64_t step) {
    return Describe(3, {1, word, 5, Stamp(7, step)}, std::chrono::milliseconds(1500));
  };
  EXPECT_EQ(text(kReady, 1), "rank 3 waited 1500 ms for rank 5 to have what it sends in hop 1 (pull 7)");
  EXPECT_EQ(text(kDone, 0), "rank 3 waited 1500 ms for rank 5 to have read this rank's parameters (pull 7)");
  EXPECT_EQ(text(kPushed, 12), "rank 3 waited 1500 ms for rank 5 to put 12 pieces of gradients (push 7)");
}

}  // namespace
}  // namespace topoep
