// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cortado/codec.h"

namespace cortado {

// `none`: the tensor's bytes as they are. See spec.md.
const CodecRow& none_row();

}  // namespace cortado
