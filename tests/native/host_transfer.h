// The transfer kernels on the host: all ranks of one call side by side on threads, through HostFabric. For tests and
// studies of the protocol; the layer's transfers on a CPU are those of topoep_jax/transfer/api.py.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "tests/native/host_fabric.h"
#include "xla_ffi/plan/problem.h"

namespace topoep {

struct HostTransfer {
  Problem problem;    // ranks, experts, slots, domains; prices and modes of pulls
  int64_t row_bytes;  // of one expert
  int64_t staging_bytes = 0;
  int32_t num_workers = 1;  // threads of every rank
  Gets gets = Gets::kAll;
  std::chrono::nanoseconds timeout = std::chrono::seconds(60);
};

// Why slot_expert [R, N] is no legal placement, "" if it is one: experts in range, none twice on a rank, none on the
// rank of its main.
std::string CheckPlacement(const Problem& problem, const int32_t* slot_expert);

// Fills the occupied rows of slots [R, N, row_bytes] from mains [R, Em, row_bytes]. Returns what went wrong: a wait
// that ran out of time, "" if nothing did. slot_expert [R, N] is legal.
std::string HostPull(const HostTransfer& call, const int32_t* slot_expert, const char* mains, char* slots);

// Adds slot_grads [R, N, row_bytes] to main_grads [R, Em, row_bytes], f32 both. The staging is at least
// WindowShape::LeastStaging().
std::string HostPush(const HostTransfer& call, const int32_t* slot_expert, const float* slot_grads, float* main_grads);

// What the windows of the call are made for.
WindowShape ShapeOf(const HostTransfer& call);

}  // namespace topoep
