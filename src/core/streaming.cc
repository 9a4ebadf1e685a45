// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/streaming.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/streaming.cc"
#include "core/simd.h"

#if HWY_ONCE
namespace cortado {

void finish_streams() { hwy::FlushStream(); }

}  // namespace cortado
#endif
