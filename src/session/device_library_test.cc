// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/device_library.h"

#include <gtest/gtest.h>

#include <cstring>

#include "collective/rank_threads.h"
#include "core/check.h"

namespace cortado {
namespace {

TEST(DeviceLibrary, SaysWhatIsNone) {
  const Result<const DeviceLibrary*> missing = load_device_library("/no/such/library.so");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound) << missing.status().to_string();
  const Result<const DeviceLibrary*> other = load_device_library("libz.so.1");
  EXPECT_EQ(other.status().code(), StatusCode::kMismatch) << other.status().to_string();
}

TEST(DeviceLibrary, OfAnotherBuildIsRefused) {
  EXPECT_TRUE(check_same_build(this_build(), "lib.so").ok());
  EXPECT_EQ(std::strlen(this_build().headers), 64u);
  DeviceLibraryBuild other = this_build();
  ++other.version;
  EXPECT_EQ(check_same_build(other, "lib.so").code(), StatusCode::kMismatch);
  other = this_build();
  other.compiler[0] ^= 1;
  EXPECT_EQ(check_same_build(other, "lib.so").code(), StatusCode::kMismatch);
  other = this_build();
  other.headers[63] ^= 1;
  const Status refused = check_same_build(other, "lib.so");
  EXPECT_EQ(refused.code(), StatusCode::kMismatch);
  EXPECT_NE(refused.message().find("\"lib.so\" is of another build"), std::string::npos) << refused.message();
}

#ifdef CORTADO_EMULATED_LIBRARY

TEST(DeviceLibrary, TrainsOnItsDevice) {
  for (const Status& status : run_ranks(2, [](Communicator& communicator) -> Status {
         CORTADO_ASSIGN_OR_RETURN(const DeviceLibrary* const library, load_device_library(CORTADO_EMULATED_LIBRARY));
         CORTADO_ASSIGN_OR_RETURN(const EngineOptions options, EngineOptions::parse("acp(rank=2, start_step=0)"));
         CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                                  library->create_engine({{.name = "weight", .rows = 40, .cols = 30}}, options,
                                                         &communicator, /*device=*/0));
         CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> on_cpu,
                                  Engine::create(engine->tensors(), options, &communicator));
         std::vector<float> means[2];
         for (Engine* const each : {engine.get(), on_cpu.get()}) {
           std::vector<float>& gradient = means[each == on_cpu.get()];
           gradient.assign(40 * 30, 1.0f + static_cast<float>(communicator.rank()));
           const Gradient gradients[] = {{0, gradient.data()}};
           CORTADO_RETURN_IF_ERROR(each->begin_step({}));
           CORTADO_RETURN_IF_ERROR(each->submit(gradients));
           CORTADO_RETURN_IF_ERROR(each->finish_step({}).status());
           EXPECT_TRUE(each->report().tensors[0].compressed);
         }
         for (std::size_t i = 0; i < means[0].size(); ++i) EXPECT_NEAR(means[0][i], means[1][i], 1e-5) << i;
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

#endif

}  // namespace
}  // namespace cortado
