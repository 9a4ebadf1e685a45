// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "codec/sign/sign_levels.h"
#include "cortado/codec.h"

namespace cortado {

// `sign`: one bit a value and one or two scales a tensor or block (signSGD, EF-signSGD, 1-bit SGD). See spec.md.
const CodecRow& sign_row();

SignScale sign_scale_named(const std::string& word);

}  // namespace cortado
