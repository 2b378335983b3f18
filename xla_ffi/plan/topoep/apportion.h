// Whole rows of several sources over several takers, both sums given; topoep_jax/plan/topoep/apportion.py is the same
// in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// What is to be apportioned: weight [jobs, R] rows of each source, part [jobs, width] rows of each taker; equal sums.
struct Jobs {
  TOPOEP_BODY Jobs(const Context& context, Arena& arena)
      : most(context.ranks * context.slots), width(context.ranks + 1), length(width + 1) {
    arena.Take(most, &slot, &parts);
    arena.Take(int64_t{context.ranks} * context.instances + 1, &index);
    arena.Take(int64_t{most} * context.ranks, &weight);
    arena.Take(int64_t{most} * width, &part);
    arena.Take(int64_t{most} * 2 * length, &start);
  }

  TOPOEP_BODY int64_t Total(int32_t job) const {
    return Sum(parts[job], [&](int32_t n) { return part[int64_t{job} * width + n]; });
  }

  int32_t most;
  int32_t width;
  int32_t length;
  int32_t* slot;    // [most] what a job is about
  int32_t* parts;   // [most] takers of each job
  int64_t* index;   // of a job among those that exist
  int64_t* weight;  // [most, R]
  int64_t* part;    // [most, width]
  int64_t* start;   // [most, 2, length] where the rests of its sources, and of its takers, start when laid end to end
};

// A source gives a taker the proportional share of its rows, rounded down; then the rests of the sources, laid end to
// end, go to the rests of the takers. This finds where each rest lies; one dependent step.
template <class Team>
TOPOEP_STAGE void LayRests(Team& team, const Context& context, int32_t num_jobs, const Jobs& jobs) {
  team.ScanEach(
      2 * num_jobs, jobs.length,
      [&](int32_t segment, int32_t k) {
        const int32_t job = segment / 2;
        const int64_t* weight = jobs.weight + int64_t{job} * context.ranks;
        const int64_t* part = jobs.part + int64_t{job} * jobs.width;
        const bool of_taker = segment % 2 == 1;
        if (k >= (of_taker ? jobs.parts[job] : context.ranks)) return int64_t{0};
        const int64_t own = of_taker ? part[k] : weight[k];
        if (own == 0) return own;
        const int64_t total = jobs.Total(job);
        if (total == 0) return own;
        const int64_t* others = of_taker ? weight : part;
        return own - Sum(of_taker ? context.ranks : jobs.parts[job], [&](int32_t n) {
                 return others[n] == 0 ? 0 : own * others[n] / total;  // a division takes long on a GPU
               });
      },
      jobs.start);
}

// put(job, source, taker, rows) for all rows of the jobs. No barrier.
template <class Team, class Put>
TOPOEP_BODY void Apportion(Team& team, const Context& context, int32_t num_jobs, const Jobs& jobs, Put put) {
  const int32_t sources = context.ranks;
  team.ForEach(num_jobs * sources, [&](int32_t i) {
    if (jobs.weight[i] == 0) return;
    const int32_t job = i / sources;
    const int64_t total = jobs.Total(job);
    if (total == 0) return;
    const int64_t* of_sources = jobs.start + int64_t{job} * 2 * jobs.length + i % sources;
    const int64_t* of_takers = jobs.start + (int64_t{job} * 2 + 1) * jobs.length;
    for (int32_t n = 0; n < jobs.parts[job]; ++n) {
      const int64_t part = jobs.part[int64_t{job} * jobs.width + n];
      if (part == 0) continue;
      const int64_t common = Min(of_takers[n + 1], of_sources[1]) - Max(of_takers[n], of_sources[0]);
      const int64_t rows = jobs.weight[i] * part / total + Max(common, 0);
      if (rows > 0) put(job, i % sources, n, static_cast<int32_t>(rows));
    }
  });
}

}  // namespace topoep
