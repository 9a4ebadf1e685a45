// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The planner: options, and what it makes of them. Pure: no clock, no files, no device; any thread may call it.
#pragma once

#include <vector>

#include "cortado/option.h"

namespace cortado {

// ---- options: the decision tree of Espresso (EuroSys 2023, section 4.2) for any number of levels -------------------

struct OptionSpace {
  int levels = 2;
  std::vector<OpDevice> devices = {OpDevice::kCpu, OpDevice::kGpu};  // where encode and decode may run
  bool rooted = true;                                                // reduce, gather and broadcast too
  bool sum_payloads = false;  // beyond the tree: all_reduce, reduce_scatter and reduce of payloads (linear codecs)
};

// Distinct, each one passes Option::check(), the plain ones first. With two levels, both devices and rooted
// collectives 4341; with one device 174, and 54 without rooted ones.
std::vector<Option> generate_options(const OptionSpace& space);

}  // namespace cortado
