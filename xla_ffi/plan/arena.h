// Lays out working memory: the same code measures it, then hands out its parts, on the host and for a device.

#pragma once

#include <cstdint>

#include "xla_ffi/team/team.h"

namespace topoep {

class Arena {
 public:
  static constexpr int64_t kAlignment = 16;  // of every part, and needed of `base`

  // Without a base it only measures: what Take() returns then must not be read or written.
  TOPOEP_BODY explicit Arena(void* base = nullptr)
      : base_(base == nullptr ? static_cast<uintptr_t>(kAlignment) : reinterpret_cast<uintptr_t>(base)) {}

  // The next `count` elements, with whatever value they have.
  template <class T>
  TOPOEP_BODY T* Take(int64_t count) {
    static_assert(alignof(T) <= kAlignment, "parts are aligned to kAlignment");
    const int64_t at = used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(base_ + at);
  }

  // Several parts of the same size.
  template <class... T>
  TOPOEP_BODY void Take(int64_t count, T**... parts) {
    ((*parts = Take<T>(count)), ...);
  }

  // Bytes handed out so far, a multiple of kAlignment.
  TOPOEP_BODY int64_t Used() const { return used_; }

 private:
  uintptr_t base_;
  int64_t used_ = 0;
};

}  // namespace topoep
