// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <list>
#include <utility>

#include "core/thread_annotations.h"

namespace cortado {

// What owns memory that somebody else may still read or write when its owner goes, such as the buffers of a collective
// whose end was not seen: never freed, and reachable, so that nobody takes it for a leak. Any thread.
template <typename Owner>
void keep_for_ever(Owner&& owner) {
  static Mutex mutex;
  static auto* const kept = new std::list<Owner>;
  const MutexLock lock(mutex);
  kept->push_back(std::forward<Owner>(owner));
}

}  // namespace cortado
