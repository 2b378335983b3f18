// One lane that counts what a block of threads would do: dependent steps, and the items each thread gets between two.

#pragma once

#include <algorithm>
#include <cstdint>

#include "xla_ffi/team/team.h"

namespace topoep {

struct Steps {
  int64_t steps = 0;
  int64_t items = 0;  // of the busiest thread between two steps, at most
};

class CountingTeam {
 public:
  // `threads` of a block on the device.
  explicit CountingTeam(int32_t threads) : threads_(threads) {}

  Steps Counted() const { return {steps_, std::max(most_, items_)}; }

  int32_t size() const { return serial_.size(); }

  template <class F>
  void ForEach(int32_t n, F f) {
    Deal(n);
    serial_.ForEach(n, f);
  }

  void Sync() { Step(); }

  template <class T>
  void Add(T* target, T value) {
    serial_.Add(target, value);
  }

  template <class F>
  Best ArgMax(int32_t n, F key) {
    Deal(n);
    Step();
    return serial_.ArgMax(n, key);
  }

  template <class F, class Then>
  void ArgMaxEach(int32_t segments, int32_t n, F key, Then then) {
    Deal(int64_t{segments} * n);
    serial_.ArgMaxEach(segments, n, key, then);
    Step();
  }

  template <class F>
  void ScanEach(int32_t segments, int32_t n, F value, int64_t* result) {
    Deal(int64_t{segments} * n);
    serial_.ScanEach(segments, n, value, result);
    Step();
  }

  template <class F>
  void Single(F f) {
    serial_.Single(f);
  }

 private:
  void Deal(int64_t n) { items_ += (n + threads_ - 1) / threads_; }
  void Step() {
    ++steps_;
    most_ = std::max(most_, items_);
    items_ = 0;
  }

  SerialTeam serial_;
  int64_t threads_;
  int64_t steps_ = 0;
  int64_t items_ = 0;
  int64_t most_ = 0;
};

}  // namespace topoep
