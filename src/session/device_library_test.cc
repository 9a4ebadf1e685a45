// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/device_library.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "collective/rank_threads.h"
#include "core/check.h"
#include "cortado/kfac.h"

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

TEST(DeviceLibrary, PreconditionsOnItsDevice) {
  const DeviceLibrary* const library = load_device_library(CORTADO_EMULATED_LIBRARY).value();
  std::vector<float> gradients[2];
  for (const bool on_device : {false, true}) {
    LocalGroup group(1);
    KfacOptions options;
    if (on_device) options.device = library->create_kfac_device(/*device=*/0).value();
    const auto kfac = Kfac::create({{.name = "fc", .inputs = 3, .outputs = 2}}, options, group.communicator(0)).value();
    const std::vector<float> x = {1, 2, 3, -1, 0, 4}, d = {0.5f, -1, 2, 1};
    ASSERT_TRUE(kfac->add_activations(0, {.data = x.data(), .count = 2}).ok());
    ASSERT_TRUE(kfac->add_output_gradients(0, {.data = d.data(), .count = 2}).ok());
    std::vector<float>& gradient = gradients[on_device];
    gradient = {1, 2, 3, 4, 5, 6};
    const KfacGradient address{.weight = gradient.data()};
    ASSERT_TRUE(kfac->step({}, {&address, 1}).ok());
    EXPECT_NE(gradient[0], 1);
  }
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(gradients[1][i], gradients[0][i], 1e-5 * std::fabs(gradients[0][i]));
}

#endif

}  // namespace
}  // namespace cortado
