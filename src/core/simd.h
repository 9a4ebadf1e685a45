// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// READ FIRST: no include guard, on purpose. The one door to Google Highway: a kernel file defines HWY_TARGET_INCLUDE as
// its own path and includes this header; Highway then compiles the file once for every instruction set.
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "codec/cast/cast_kernels.cc"
//   #include "core/simd.h"
//   HWY_BEFORE_NAMESPACE();
//   namespace cortado::HWY_NAMESPACE { ... kernels ... }
//   HWY_AFTER_NAMESPACE();
//   #if HWY_ONCE
//   namespace cortado { HWY_EXPORT(Kernel); ... HWY_DYNAMIC_DISPATCH(Kernel)(...) }
//   #endif
//
// The build forbids contraction (-ffp-contract=off): Mul then Add stay two roundings on every target.
// Kernels keep vectors in arrays, which sizeless SVE and RISC-V vectors do not allow; NEON serves Arm.
//
// No SSSE3: what has it and not SSE4 is older than torch supports, and each target costs as much to compile as any
// other. CORTADO_FEW_SIMD_TARGETS: sanitized builds keep the plainest target and AVX2; the release build tests them
// all.
#ifndef HWY_DISABLED_TARGETS
#define CORTADO_UNUSED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#ifdef CORTADO_FEW_SIMD_TARGETS
#define HWY_DISABLED_TARGETS (CORTADO_UNUSED_TARGETS | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS CORTADO_UNUSED_TARGETS
#endif
#endif

#include <hwy/foreach_target.h>
// foreach_target comes first: it includes the kernel file again for each target.
#include <hwy/cache_control.h>
#include <hwy/highway.h>
