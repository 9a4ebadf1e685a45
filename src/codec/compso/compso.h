// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "codec/compso/compso_layers.h"
#include "cortado/codec.h"

namespace cortado {

// `compso(bound=0.004)`: multiples of a share of the range, small values as 0, entropy-coded. See spec.md.
const CodecRow& compso_row();

// What a codec made from that row does with each layer of a message; nullptr for other codecs. Lives as long as the
// codec.
const CompsoSettings* compso_settings_of(const Codec& codec);

}  // namespace cortado
