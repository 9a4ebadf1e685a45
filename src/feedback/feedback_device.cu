// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_device.cuh"
#include "feedback/feedback_device.h"

namespace cortado {

template void FeedbackLaunches::add_gradients(CudaDevice&, const FeedbackStep&) const;
template void FeedbackLaunches::take_decoded(CudaDevice&, int, int, bool, float, bool) const;
template void FeedbackLaunches::sum_squares(CudaDevice&) const;
template void FeedbackLaunches::take_back(CudaDevice&, const FeedbackStep&) const;

}  // namespace cortado
