// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `randk(density=0.01)`: values at random positions, which follow from the payload's key alone. See spec.md.
const CodecRow& randk_row();

}  // namespace cortado
