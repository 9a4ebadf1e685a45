// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/simd_target.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

std::int64_t OwnTarget() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(OwnTarget);

std::int64_t simd_target() { return HWY_DYNAMIC_DISPATCH(OwnTarget)(); }

const char* simd_target_name(std::int64_t target) { return hwy::TargetName(target); }

std::vector<std::int64_t> simd_targets() { return hwy::SupportedAndGeneratedTargets(); }

ForcedSimdTarget::ForcedSimdTarget(std::int64_t target) { hwy::SetSupportedTargetsForTest(target); }

ForcedSimdTarget::~ForcedSimdTarget() { hwy::SetSupportedTargetsForTest(0); }

}  // namespace cortado
#endif
