// Replica transfers among several ranks on ONE GPU, against sums on the host: the kernels, communicators and windows
// of a node without a node. NCCL calls this experimental (NCCL_MULTI_RANK_GPU_ENABLE). All ranks share memory, so GIN
// is not run.
//
//   nvcc -std=c++17 -O2 -arch=sm_90 -I. -isystem <nccl include> -cudart static -o ranks tools/gpu/ranks_on_one_gpu.cu
//       xla_ffi/transfer/transfer.cu xla_ffi/transport/group.cc xla_ffi/transport/nccl_api.cc -ldl -lpthread
//   ./ranks [--ranks 2] [--domains 1] [--epochs 20] [--mains 4] [--num_slots 2] [--elements 1048576] [--pulls 0..3]
//           [--workers 8] [--nccl libnccl.so.2] [--stop]
//
// Every epoch has a new plan, new parameters and new gradients; all slots and all sums are compared bit for bit. With
// --stop the last rank stays away from the last pull, and the others must report it. One line of JSON on stdout; exit
// status 0 only if everything was as it should be.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/transfer/transfer_cuda.h"
#include "xla_ffi/transport/group.h"
#include "xla_ffi/transport/nccl_api.h"
#include "xla_ffi/transport/sizes.h"

namespace topoep {
namespace {

struct Settings {
  int32_t ranks = 2;
  int32_t domains = 1;
  int32_t epochs = 20;
  int32_t mains = 4;
  int32_t slots = 2;
  int32_t elements = 1 << 20;  // f32 of one expert
  int32_t pulls = 0;           // enum Pulls
  int32_t workers = 8;
  bool stop = false;
  std::string nccl = "libnccl.so.2";
};

[[noreturn]] void Die(const std::string& reason) {
  std::printf("{\"ok\": false, \"reason\": \"%s\"}\n", reason.c_str());
  std::fflush(stdout);
  std::_Exit(1);  // other ranks may be waiting in a kernel
}

void Check(cudaError_t result, const char* action) {
  if (result != cudaSuccess) Die(std::string(action) + ": " + cudaGetErrorString(result));
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t size) : size_(size) { Check(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc"); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  void Write(const T* from, cudaStream_t stream) {
    Check(cudaMemcpyAsync(data_, from, size_ * sizeof(T), cudaMemcpyHostToDevice, stream), "writing an array");
  }
  void Read(T* to, cudaStream_t stream) const {
    Check(cudaMemcpyAsync(to, data_, size_ * sizeof(T), cudaMemcpyDeviceToHost, stream), "reading an array");
    Check(cudaStreamSynchronize(stream), "running the kernels");
  }

 private:
  int64_t size_;
  T* data_ = nullptr;
};

// What one epoch starts from, the same for all ranks, and what it must end with.
struct Epoch {
  std::vector<int32_t> slot_expert;  // [R, N]
  std::vector<float> mains;          // [E, D]
  std::vector<float> slot_grads;     // [R, N, D]
  std::vector<float> main_grads;     // [E, D]
  std::vector<float> sums;           // [E, D]

  Epoch(const Settings& s, uint32_t seed) : slot_expert(s.ranks * s.slots, -1) {
    std::mt19937 random(seed);
    const int32_t experts = s.ranks * s.mains;
    for (int32_t rank = 0; rank < s.ranks; ++rank) {
      std::vector<int32_t> others;
      for (int32_t e = 0; e < experts; ++e) {
        if (e / s.mains != rank) others.push_back(e);
      }
      std::shuffle(others.begin(), others.end(), random);
      const int32_t most = std::min<int32_t>(s.slots, static_cast<int32_t>(others.size()));
      const auto held = static_cast<int32_t>(random() % (most + 1));
      std::sort(others.begin(), others.begin() + held);
      std::copy_n(others.begin(), held, slot_expert.begin() + rank * s.slots);
    }
    const auto fill = [&](std::vector<float>* values, int64_t rows) {
      values->resize(rows * s.elements);
      for (float& value : *values) value = static_cast<float>(static_cast<int32_t>(random())) * 1e-9f;
    };
    fill(&mains, experts);
    fill(&main_grads, experts);
    fill(&slot_grads, s.ranks * s.slots);
    sums = main_grads;
    for (int32_t i = 0; i < s.ranks * s.slots; ++i) {
      if (slot_expert[i] < 0) continue;
      float* sum = &sums[int64_t{slot_expert[i]} * s.elements];
      const float* added = &slot_grads[int64_t{i} * s.elements];
      for (int32_t d = 0; d < s.elements; ++d) sum[d] += added[d];
    }
  }
};

constexpr float kUntouched = -12345.0f;

class Rank {
 public:
  Rank(const Settings& s, int32_t rank, Group& group)
      : s_(s),
        rank_(rank),
        group_(group),
        layer_{s.mains, s.slots, int64_t{s.elements} * 4, static_cast<Pulls>(s.pulls)},
        slot_expert_(s.ranks * s.slots),
        mains_(int64_t{s.mains} * s.elements),
        slots_(int64_t{s.slots} * s.elements),
        turn_(1) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    Check(cudaMemsetAsync(turn_.data(), 0, sizeof(int32_t), stream_), "clearing the turn");
    prices_.expert_bytes = layer_.expert_bytes;
    prices_.inter_fs_per_byte = 20000;
    prices_.intra_fs_per_byte = 5000;
  }

  void Pull(const Epoch& epoch) {
    slot_expert_.Write(epoch.slot_expert.data(), stream_);
    mains_.Write(&epoch.mains[At(rank_ * s_.mains)], stream_);
    const std::vector<float> untouched(At(s_.slots), kUntouched);
    slots_.Write(untouched.data(), stream_);
    Launch("pull", LaunchPull(group_, layer_, prices_, slot_expert_.data(), mains_.data(), slots_.data(),
                              {turn_.data(), turn_.data()}, stream_));
  }

  void CheckSlots(const Epoch& epoch) {
    std::vector<float> slots(At(s_.slots));
    slots_.Read(slots.data(), stream_);
    for (int32_t n = 0; n < s_.slots; ++n) {
      const int32_t expert = epoch.slot_expert[rank_ * s_.slots + n];
      for (int32_t d = 0; d < s_.elements; ++d) {
        const float wanted = expert < 0 ? kUntouched : epoch.mains[At(expert) + d];
        if (std::memcmp(&slots[At(n) + d], &wanted, sizeof(float)) != 0) Wrong("slot", n, d, slots[At(n) + d], wanted);
      }
    }
  }

  void PushAndCheck(const Epoch& epoch) {
    slots_.Write(&epoch.slot_grads[At(rank_ * s_.slots)], stream_);
    mains_.Write(&epoch.main_grads[At(rank_ * s_.mains)], stream_);
    Launch("push", LaunchPush(group_, layer_, slot_expert_.data(), slots_.data(), mains_.data(),
                              {turn_.data(), turn_.data()}, stream_));
    std::vector<float> sums(At(s_.mains));
    mains_.Read(sums.data(), stream_);
    for (int64_t i = 0; i < At(s_.mains); ++i) {
      const float wanted = epoch.sums[At(rank_ * s_.mains) + i];
      if (std::memcmp(&sums[i], &wanted, sizeof(float)) != 0) {
        Wrong("gradient", static_cast<int32_t>(i / s_.elements), static_cast<int32_t>(i % s_.elements), sums[i],
              wanted);
      }
    }
  }

  // The kernel must end by its time-out and name the rank that is missing, if it waited for it at all.
  bool Fails() {
    if (cudaStreamSynchronize(stream_) == cudaSuccess) return false;
    const Failure failure = group_.failure();
    if (failure.failed == 0) Die("rank " + std::to_string(rank_) + " failed without a record");
    std::fprintf(stderr, "rank %d waited for rank %d: word %d, call %d\n", rank_, static_cast<int32_t>(failure.peer),
                 static_cast<int32_t>(failure.word), static_cast<int32_t>(EpochOf(failure.value)));
    return true;
  }

 private:
  int64_t At(int64_t row) const { return row * s_.elements; }

  void Launch(const char* what, cudaError_t result) const { Check(result, what); }

  void Wrong(const char* what, int32_t row, int32_t column, float got, float wanted) const {
    Die("rank " + std::to_string(rank_) + ": " + what + " " + std::to_string(row) + ", element " +
        std::to_string(column) + " is " + std::to_string(got) + ", not " + std::to_string(wanted));
  }

  const Settings& s_;
  int32_t rank_;
  Group& group_;
  LayerShape layer_;
  CostModel prices_{};
  cudaStream_t stream_ = nullptr;
  DeviceArray<int32_t> slot_expert_;
  DeviceArray<float> mains_;  // parameters, then their gradients
  DeviceArray<float> slots_;
  DeviceArray<int32_t> turn_;
};

void OnEachRank(const Settings& s, const std::function<void(int32_t)>& work) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < s.ranks; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::unique_ptr<Group>> Connect(const Settings& s, const NcclApi& nccl) {
  std::vector<int32_t> domain_of_rank(s.ranks);
  for (int32_t r = 0; r < s.ranks; ++r) domain_of_rank[r] = r * s.domains / s.ranks;
  const LayerShape layer{s.mains, s.slots, int64_t{s.elements} * 4, static_cast<Pulls>(s.pulls)};
  const GroupSizes sizes = SizesOf(domain_of_rank, layer, 1 << 20, 0);  // little staging: many pieces
  ncclUniqueId id;
  if (nccl.GetUniqueId(&id) != ncclSuccess) Die("no unique id");
  std::vector<std::unique_ptr<Group>> groups(s.ranks);
  OnEachRank(s, [&](int32_t rank) {
    std::string error;
    groups[rank] =
        Group::Prepare(nccl, {0, rank, s.workers, s.stop ? 2000000000 : 30000000000, domain_of_rank, sizes}, &error);
    if (groups[rank] == nullptr || !groups[rank]->Connect(id, &error)) Die(error);
  });
  return groups;
}

int Run(const Settings& s) {
  std::string error;
  const NcclApi* nccl = LoadNccl(s.nccl.c_str(), &error);
  if (nccl == nullptr) Die(error);
  std::vector<std::unique_ptr<Group>> groups = Connect(s, *nccl);
  std::vector<std::unique_ptr<Rank>> ranks(s.ranks);
  for (int32_t r = 0; r < s.ranks; ++r) ranks[r] = std::make_unique<Rank>(s, r, *groups[r]);
  for (int32_t e = 0; e < s.epochs; ++e) {
    const Epoch epoch(s, e + 1);
    OnEachRank(s, [&](int32_t rank) {
      ranks[rank]->Pull(epoch);
      ranks[rank]->CheckSlots(epoch);
      ranks[rank]->PushAndCheck(epoch);
    });
  }
  int32_t failures = 0;
  if (s.stop) {
    Epoch epoch(s, 0);
    const int32_t last = s.ranks - 1;
    std::fill(epoch.slot_expert.begin(), epoch.slot_expert.end(), -1);
    for (int32_t r = 0; r < last; ++r) epoch.slot_expert[r * s.slots] = last * s.mains;  // everybody needs the last
    for (int32_t r = 0; r < last; ++r) ranks[r]->Pull(epoch);
    for (int32_t r = 0; r < last; ++r) failures += ranks[r]->Fails() ? 1 : 0;
    if (failures == 0) Die("the missing rank went unnoticed");
  } else {
    ranks.clear();
    OnEachRank(s, [&](int32_t rank) { groups[rank].reset(); });
  }
  std::printf(
      "{\"ok\": true, \"ranks\": %d, \"domains\": %d, \"epochs\": %d, \"pulls\": %d, \"nccl\": %d,"
      " \"timeouts\": %d}\n",
      s.ranks, s.domains, s.epochs, s.pulls, nccl->version, failures);
  std::fflush(stdout);
  std::_Exit(0);  // after a time-out the device is lost: nothing is left to free
}

Settings Parse(int argc, char** argv) {
  Settings s;
  const std::vector<std::pair<const char*, int32_t*>> numbers = {
      {"--ranks", &s.ranks},     {"--domains", &s.domains},   {"--epochs", &s.epochs}, {"--mains", &s.mains},
      {"--num_slots", &s.slots}, {"--elements", &s.elements}, {"--pulls", &s.pulls},   {"--workers", &s.workers}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto number = std::find_if(numbers.begin(), numbers.end(), [&](auto& known) { return name == known.first; });
    if (name == "--stop") {
      s.stop = true;
    } else if (name == "--nccl" && i + 1 < argc) {
      s.nccl = argv[++i];
    } else if (number != numbers.end() && i + 1 < argc) {
      *number->second = std::atoi(argv[++i]);
    } else {
      Die("unknown argument " + name);
    }
  }
  if (s.ranks < 2 || s.domains < 1 || s.domains > s.ranks || s.mains < 1 || s.slots < 1 || s.elements < 1 ||
      s.epochs < 0 || s.workers < 1 || s.pulls < 0 || s.pulls > 3) {
    Die("an argument is out of range");
  }
  // The first trap ends the context that all ranks share, before others could leave their records.
  if (s.stop && s.ranks != 2) Die("--stop needs --ranks 2");
  return s;
}

}  // namespace
}  // namespace topoep

int main(int argc, char** argv) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  return topoep::Run(topoep::Parse(argc, argv));
}
