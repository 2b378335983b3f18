// The transfer bodies with one fault in the protocol. tools/mutants.py builds this under ThreadSanitizer and runs it
// once for each fault.
//
//   mutant_transfer FAULT    runs with that fault. Fails where ThreadSanitizer, a wrong value or a time-out tells, with
//                            status 3 where no run comes to its place, and ends with 0 if the fault survives
//   mutant_transfer none     runs without a fault; so does no argument at all
//   mutant_transfer --list   the same, and prints every fault and how often a run came to its place
//
// Faults: relaxed_signal, relaxed_wait, arrive_without_acquire, arrive_without_release (a weaker order than
// HostOrders'); drop_signal:WORD; skip_wait:WORD; early_arrive:COUNTER, a worker signals before the others have
// arrived; skip_flush:FILE:LINE; and xla_ffi/transfer/FILE:LINE, a barrier of a schedule left out.

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/cc/made_schedules.h"
#include "tests/cc/mutant_team.h"
#include "tests/cc/transfer_workload.h"

namespace topoep {
namespace {

constexpr int kCaught = 1;
constexpr int kUsage = 2;
constexpr int kNeverReached = 3;
constexpr int32_t kLanes = 3;

struct RelaxedSignal : HostOrders {
  static constexpr int kSignal = __ATOMIC_RELAXED;
};
struct RelaxedWait : HostOrders {
  static constexpr int kWait = __ATOMIC_RELAXED;
};
struct ArriveWithoutAcquire : HostOrders {
  static constexpr int kArrive = __ATOMIC_RELEASE;
};
struct ArriveWithoutRelease : HostOrders {
  static constexpr int kArrive = __ATOMIC_ACQUIRE;
};

std::vector<TransferCase> Cases() {
  std::vector<TransferCase> cases;
  for (const Gets gets : {Gets::kAll, Gets::kDomain, Gets::kNone}) {
    for (const Pulls pulls : {Pulls::kStriped, Pulls::kBest}) {
      TransferCase c;
      c.domain_of_rank = {0, 0, 0, 1, 1};
      c.mains = 1;
      c.row_bytes = 400;
      c.columns = 100;
      c.staging_bytes = 1024;
      c.gets = gets;
      c.pulls = pulls;
      c.epochs = 30;
      c.seed = static_cast<uint32_t>(cases.size()) + 1;
      c.timeout = std::chrono::milliseconds(2000);
      cases.push_back(c);
    }
  }
  return cases;
}

struct Outcome {
  int32_t complaints = 0;
  int64_t faults = 0;                     // how often the fault was at work
  std::map<std::string, int64_t> visits;  // of the places of all faults, if they are recorded

  int Status() const { return complaints > 0 ? kCaught : 0; }
};

// Ends after the first run with a complaint.
template <class Orders = HostOrders>
Outcome RunAll(const std::string& fault = "", bool records = false) {
  Outcome outcome;
  for (const TransferCase& c : Cases()) {
    TransferRun<Orders> run(c);
    run.trouble().delays = true;
    run.trouble().fault = fault;
    run.trouble().records = records;
    for (const std::string& complaint : run.Run()) {
      if (complaint.empty()) continue;
      std::fprintf(stderr, "%s\n", complaint.c_str());
      ++outcome.complaints;
    }
    outcome.faults += run.trouble().faults;
    for (const auto& [place, count] : run.trouble().visits) outcome.visits[place] += count;
    if (outcome.complaints > 0) break;
  }
  return outcome;
}

// Schedules by threads that may leave out a barrier, against those of one thread.
int32_t RunSchedules() {
  int32_t wrong = 0;
  std::mt19937 rng(3);
  for (int32_t i = 0; i < 60; ++i) {
    TransferCase c = Cases()[i % 6];
    const std::vector<int32_t> slot_expert = RandomPlacement(c, rng);
    MadeSchedules one(c, i % c.NumRanks());
    MadeSchedules many(c, i % c.NumRanks());
    SerialTeam serial;
    one.Make(serial, slot_expert);
    RunThreads<MutantTeam>(kLanes, [&](MutantTeam& team) { many.Make(team, slot_expert); });
    if (many.Contents() != one.Contents()) ++wrong;
  }
  return wrong;
}

void List(const Outcome& outcome) {
  for (const char* order : {"relaxed_signal", "relaxed_wait", "arrive_without_acquire", "arrive_without_release"}) {
    std::printf("%s 1\n", order);
  }
  for (const auto& places : {outcome.visits, site_visits}) {
    for (const auto& [place, count] : places) std::printf("%s %" PRId64 "\n", place.c_str(), count);
  }
}

int Main(const std::string& fault) {
  if (fault == "none" || fault == "--list") {
    const Outcome outcome = RunAll("", fault == "--list");
    const int32_t wrong = outcome.complaints + RunSchedules();
    if (fault == "--list") List(outcome);
    return wrong > 0 ? kCaught : 0;
  }
  if (fault == "relaxed_signal") return RunAll<RelaxedSignal>().Status();
  if (fault == "relaxed_wait") return RunAll<RelaxedWait>().Status();
  if (fault == "arrive_without_acquire") return RunAll<ArriveWithoutAcquire>().Status();
  if (fault == "arrive_without_release") return RunAll<ArriveWithoutRelease>().Status();
  if (fault.rfind("xla_ffi/", 0) == 0) {
    mutant_site = fault;
    const int32_t wrong = RunSchedules();
    if (site_visits.count(fault) == 0) return kNeverReached;
    return wrong > 0 ? kCaught : 0;
  }
  if (fault.find(':') == std::string::npos) {
    std::fprintf(stderr, "unknown fault %s; mutant_transfer --list names all\n", fault.c_str());
    return kUsage;
  }
  const Outcome outcome = RunAll(fault);
  return outcome.faults == 0 ? kNeverReached : outcome.Status();
}

}  // namespace
}  // namespace topoep

int main(int argc, char** argv) { return topoep::Main(argc > 1 ? argv[1] : "none"); }
