// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "cortado/communicator.h"

namespace cortado {

// What a decorator keeps of the collectives it has started, by number. A slot is used again once its collective has
// ended, and stays where it is in memory: peers may write there. Grows when more are in flight; then never allocates.
//
// Slot: default constructible, with a member `work`.
template <typename Slot>
class WorkRing {
 public:
  // For collective `work`, one above the last, or the last again if nothing of it was started;
  // `has_ended(slot)` of the one whose place it would take.
  template <typename HasEnded>
  Slot& take(WorkId work, HasEnded&& has_ended) {
    std::unique_ptr<Slot>& slot = slots_[work % slots_.size()];
    if (slot != nullptr && slot->work != work && !has_ended(*slot)) {
      grow();
      return take(work, has_ended);
    }
    if (slot == nullptr) slot = std::make_unique<Slot>();
    slot->work = work;
    return *slot;
  }

  // Null if its slot was taken by a later one, so that it has ended. `work` was taken before.
  Slot* find(WorkId work) {
    Slot* slot = slots_[work % slots_.size()].get();
    return slot != nullptr && slot->work == work ? slot : nullptr;
  }

  template <typename Visit>
  void for_each(Visit&& visit) {
    for (const std::unique_ptr<Slot>& slot : slots_) {
      if (slot != nullptr) visit(*slot);
    }
  }

 private:
  void grow() {
    std::vector<std::unique_ptr<Slot>> bigger(2 * slots_.size());
    for (std::unique_ptr<Slot>& slot : slots_) {
      if (slot != nullptr) bigger[slot->work % bigger.size()] = std::move(slot);
    }
    slots_ = std::move(bigger);
  }

  std::vector<std::unique_ptr<Slot>> slots_ = std::vector<std::unique_ptr<Slot>>(64);
};

}  // namespace cortado
