// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/hash.h"

#include <gtest/gtest.h>

namespace cortado {
namespace {

// Published test values of FNV-1a (Fowler, Noll, Vo).
static_assert(fnv1a_64("") == 0xcbf29ce484222325ull);
static_assert(fnv1a_64("a") == 0xaf63dc4c8601ec8cull);
static_assert(fnv1a_64("foobar") == 0x85944171f73967e8ull);

TEST(Hash, BytesAreUnsigned) { EXPECT_NE(fnv1a_64("\xff"), fnv1a_64("\x7f")); }

}  // namespace
}  // namespace cortado
