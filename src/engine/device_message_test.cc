// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A message on an emulated device, whose copies to the host are late: payloads, means and residuals are those of
// GatheredTensor to the bit, through steps that are finite and steps that are not.
#include "engine/device_message.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "codec/cast/float_chunks.h"
#include "core/device_emulation.h"
#include "core/emulated_queue.h"
#include "core/finite.h"
#include "core/philox.h"
#include "engine/codec_tensor.h"
#include "engine/emulated_message.h"

namespace cortado::device_message_test {
namespace {

constexpr int kWorldSize = 3, kSteps = 5, kBadStep = 3, kBadRank = 1, kBadSlot = 2;
constexpr std::uint64_t kSeed = 77;

struct Case {
  std::string codec;
  DType dtype = DType::kFloat32;
  bool has_feedback = true;

  // As treat_with_codec() decides.
  DType encoded() const { return has_feedback ? DType::kFloat32 : dtype; }
};

void PrintTo(const Case& the_case, std::ostream* out) {
  *out << the_case.codec << " " << dtype_name(the_case.dtype) << (the_case.has_feedback ? "" : ", no feedback");
}

using Bytes = std::vector<std::byte>;

std::vector<DeviceMessage::Tensor> tensors_of(const Case& the_case) {
  const std::pair<std::int64_t, std::int64_t> shapes[] = {{16, 40}, {1, 1}, {70, 61}, {3, 257}};
  std::vector<DeviceMessage::Tensor> tensors;
  for (const auto& [rows, cols] : shapes) {
    tensors.push_back({.name = "tensor " + std::to_string(tensors.size()),
                       .rows = rows,
                       .cols = cols,
                       .dtype = the_case.dtype,
                       .encoded = the_case.encoded(),
                       .number = 1000 + tensors.size()});
  }
  return tensors;
}

Bytes gradient_of(const DeviceMessage::Tensor& tensor, int rank, int step, std::size_t slot) {
  std::vector<float> values(static_cast<std::size_t>(tensor.rows * tensor.cols));
  philox_fill_normal(static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(rank), slot, values.data(),
                     static_cast<std::int64_t>(values.size()));
  if (step == kBadStep && rank == kBadRank && slot == kBadSlot) {
    values[7] = std::numeric_limits<float>::infinity();
    values[8] = std::numeric_limits<float>::quiet_NaN();
  }
  Bytes bytes(values.size() * dtype_bytes(tensor.dtype));
  for_chunks(static_cast<std::int64_t>(values.size()), [&](std::int64_t at, std::int64_t count) {
    store_floats(values.data() + at, 1.0f, count, bytes.data(), tensor.dtype, at);
  });
  return bytes;
}

std::uint64_t seed_of(int rank) { return kSeed + 5 * static_cast<std::uint64_t>(rank); }

// One rank's tensors on the CPU.
struct CpuRank {
  CpuRank(const Case& the_case, const Codec& codec, int rank) {
    for (const DeviceMessage::Tensor& tensor : tensors_of(the_case)) {
      tensors.push_back(std::make_unique<GatheredTensor>(
          CodecTensor::Setup{.codec = &codec,
                             .rows = tensor.rows,
                             .cols = tensor.cols,
                             .dtype = tensor.dtype,
                             .encoded = tensor.encoded,
                             .world_size = kWorldSize,
                             .rank = rank,
                             .has_feedback = the_case.has_feedback,
                             .key = {.seed = seed_of(rank), .step = 0, .tensor = tensor.number}}));
      residuals.emplace_back(static_cast<std::size_t>(tensor.rows * tensor.cols));
      if (the_case.has_feedback) tensors.back()->set_memory({.residual = residuals.back().data()}, {});
      room.push_back(codec.max_payload_bytes(tensor.rows, tensor.cols, tensor.encoded));
      payloads.emplace_back();
      sizes.merge(tensors.back()->scratch_sizes());
    }
    scratch = CodecScratchPool(1, sizes);
  }

  std::vector<std::unique_ptr<CodecTensor>> tensors;
  std::vector<std::vector<float>> residuals;
  std::vector<std::uint64_t> room;  // of a payload
  std::vector<Bytes> payloads, gradients;
  std::vector<bool> finite;
  CodecScratchSizes sizes;
  CodecScratchPool scratch;
};

struct DeviceRank {
  DeviceRank(const Case& the_case, int rank) {
    Result<std::unique_ptr<DeviceMessage>> made = make_emulated_message({.codec = the_case.codec,
                                                                         .tensors = tensors_of(the_case),
                                                                         .world_size = kWorldSize,
                                                                         .rank = rank,
                                                                         .has_feedback = the_case.has_feedback,
                                                                         .seed = seed_of(rank),
                                                                         .queue = &queue});
    if (!made.ok()) ADD_FAILURE() << made.status().to_string();
    message = std::move(made).value();
    const Status set_up = message->set_up(queue.allocate_on_device(message->scratch_bytes()).value());
    EXPECT_TRUE(set_up.ok()) << set_up.to_string();
    allocations = queue.allocations();
  }

  template <typename Ask>
  void wait_until(const Ask& ask) {
    Result<bool> is_there = ask();
    ASSERT_TRUE(is_there.ok()) << is_there.status().to_string();
    EXPECT_FALSE(is_there.value()) << "the copies of the emulated queue are late";
    while (is_there.ok() && !is_there.value()) is_there = ask();
    ASSERT_TRUE(is_there.ok()) << is_there.status().to_string();
  }

  EmulatedQueue queue;
  std::unique_ptr<DeviceMessage> message;
  std::vector<Bytes> gradients;
  std::uint64_t allocations = 0;
};

class EmulatedMessage : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    codec_ = make_codec(GetParam().codec).value();
    for (int rank = 0; rank < kWorldSize; ++rank) {
      cpu_.push_back(std::make_unique<CpuRank>(GetParam(), *codec_, rank));
      device_.push_back(std::make_unique<DeviceRank>(GetParam(), rank));
    }
  }

  static double scale_of(int step) { return step % 2 == 0 ? 1.0 : 512.0; }

  void encode(int step) {
    const std::vector<DeviceMessage::Tensor> tensors = tensors_of(GetParam());
    for (int rank = 0; rank < kWorldSize; ++rank) {
      CpuRank& cpu = *cpu_[rank];
      DeviceRank& device = *device_[rank];
      cpu.gradients.clear();
      cpu.finite.clear();
      // Other memory in every other step, as with gradients that are made anew.
      if (step % 2 == 0) device.gradients = std::vector<Bytes>(tensors.size());
      std::vector<void*> pointers;
      for (std::size_t s = 0; s < tensors.size(); ++s) {
        cpu.gradients.push_back(gradient_of(tensors[s], rank, step, s));
        if (step % 2 == 0) device.gradients[s].resize(cpu.gradients[s].size());
        device.gradients[s].assign(cpu.gradients[s].begin(), cpu.gradients[s].end());
        pointers.push_back(device.gradients[s].data());
        cpu.payloads[s].resize(cpu.room[s]);
        const Result<CodecTensor::Encoded> encoded = cpu.scratch.with([&](CodecScratch& scratch) {
          return cpu.tensors[s]->encode(cpu.gradients[s].data(), scale_of(step), step, cpu.payloads[s], scratch);
        });
        ASSERT_TRUE(encoded.ok()) << encoded.status().to_string();
        cpu.payloads[s].resize(encoded.value().bytes);
        has_other_sizes_ = has_other_sizes_ || encoded.value().bytes != cpu.room[s];
        cpu.finite.push_back(encoded.value().finite);
      }
      const Status status = device.message->encode(pointers, {scale_of(step)}, step);
      ASSERT_TRUE(status.ok()) << status.to_string();
      device.wait_until([&] { return device.message->encoded(); });
    }
  }

  void compare_payloads(int step) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      for (int s = 0; s < device_[rank]->message->slot_count(); ++s) {
        const auto found = device_[rank]->message->payload(s);
        EXPECT_EQ(Bytes(found.begin(), found.end()), cpu_[rank]->payloads[s])
            << "step " << step << ", rank " << rank << ", slot " << s;
        EXPECT_EQ(device_[rank]->message->finite(s), cpu_[rank]->finite[s]);
        EXPECT_EQ(cpu_[rank]->finite[s], !(step == kBadStep && rank == kBadRank && s == kBadSlot));
      }
    }
  }

  void decode(int step) {
    const int slots = device_[0]->message->slot_count();
    const bool is_finite = step != kBadStep;
    for (int rank = 0; rank < kWorldSize; ++rank) {
      DeviceMessage& message = *device_[rank]->message;
      for (int from = 0; from < kWorldSize; ++from) {
        for (int s = 0; s < slots; ++s) ASSERT_TRUE(message.take(from, s, cpu_[from]->payloads[s]).ok());
      }
      bool finite[8];
      for (int s = 0; s < slots; ++s) finite[s] = is_finite || s != kBadSlot;
      const Status status = message.decode(is_finite, std::span<const bool>(finite, static_cast<std::size_t>(slots)));
      ASSERT_TRUE(status.ok()) << status.to_string();
      device_[rank]->wait_until([&] { return message.decoded(); });
      for (int s = 0; s < slots; ++s) decode_on_cpu(rank, s, step, finite[s], is_finite);
    }
  }

  void decode_on_cpu(int rank, int s, int step, bool slot_finite, bool is_finite) {
    CpuRank& cpu = *cpu_[rank];
    const auto payload = [&](int from, std::span<std::byte>) {
      return std::span<const std::byte>(cpu_[from]->payloads[s]);
    };
    Bytes& gradient = cpu.gradients[s];
    const Bytes local = gradient;
    const Status status = cpu.scratch.with([&](CodecScratch& scratch) -> Status {
      const auto settle = is_finite ? CodecTensor::Settle::kYes : CodecTensor::Settle::kNever;
      CORTADO_RETURN_IF_ERROR(cpu.tensors[s]->decode({.payload = payload, .summed = {}, .finite = slot_finite},
                                                     scale_of(step), settle, gradient.data(), scratch));
      return is_finite ? cpu.tensors[s]->commit(payload, scratch)
                       : cpu.tensors[s]->rollback(local.data(), payload, scratch);
    });
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  void compare_results(int step) {
    const std::vector<DeviceMessage::Tensor> tensors = tensors_of(GetParam());
    for (int rank = 0; rank < kWorldSize; ++rank) {
      for (std::size_t s = 0; s < tensors.size(); ++s) {
        const std::string where =
            "step " + std::to_string(step) + ", rank " + std::to_string(rank) + ", slot " + std::to_string(s);
        const Bytes &found = device_[rank]->gradients[s], &expected = cpu_[rank]->gradients[s];
        const std::int64_t elems = tensors[s].rows * tensors[s].cols;
        if (step == kBadStep && s == kBadSlot) {
          EXPECT_FALSE(all_finite(found.data(), elems, tensors[s].dtype)) << where;
          EXPECT_FALSE(all_finite(expected.data(), elems, tensors[s].dtype)) << where;
        } else {
          EXPECT_EQ(found, expected) << where;
        }
        if (step != kBadStep) {
          const DifferenceSquares squares = device_[rank]->message->squares(static_cast<int>(s));
          EXPECT_NEAR(squares.of_values, cpu_[rank]->tensors[s]->sum_squares(), 1e-5 * squares.of_values) << where;
          EXPECT_NEAR(squares.of_differences, cpu_[rank]->tensors[s]->error_squares(), 1e-5 * squares.of_values);
        }
        if (!GetParam().has_feedback) continue;
        std::vector<float> residual(static_cast<std::size_t>(elems));
        const Status status = device_[rank]->message->read_residual(static_cast<int>(s), residual);
        ASSERT_TRUE(status.ok()) << status.to_string();
        EXPECT_EQ(std::memcmp(residual.data(), cpu_[rank]->residuals[s].data(), residual.size() * sizeof(float)), 0)
            << "residual, " << where;
      }
    }
  }

  std::unique_ptr<Codec> codec_;
  bool has_other_sizes_ = false;  // than the largest
  std::vector<std::unique_ptr<CpuRank>> cpu_;
  std::vector<std::unique_ptr<DeviceRank>> device_;
};

TEST_P(EmulatedMessage, HasTheBitsOfTheEngineOnTheCpu) {
  for (int step = 0; step < kSteps && !HasFatalFailure(); ++step) {
    EmulatedDevice::order() = step % 2 == 0 ? EmulatedOrder::kForwards : EmulatedOrder::kBackwards;
    ASSERT_NO_FATAL_FAILURE(encode(step));
    compare_payloads(step);
    ASSERT_NO_FATAL_FAILURE(decode(step));
    compare_results(step);
  }
  EmulatedDevice::order() = EmulatedOrder::kForwards;
  for (const auto& rank : device_) EXPECT_EQ(rank->queue.allocations(), rank->allocations) << "memory made in a step";
  EXPECT_EQ(has_other_sizes_, !codec_->row().traits.fixed_size);
}

TEST_P(EmulatedMessage, GoesOnFromResidualsThatWereWritten) {
  if (!GetParam().has_feedback) GTEST_SKIP() << "nothing is kept";
  encode(0);
  decode(0);
  for (int rank = 0; rank < kWorldSize; ++rank) {
    auto resumed = std::make_unique<DeviceRank>(GetParam(), rank);
    for (int s = 0; s < resumed->message->slot_count(); ++s) {
      const Status status = resumed->message->write_residual(s, cpu_[rank]->residuals[s]);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    resumed->gradients = device_[rank]->gradients;
    device_[rank] = std::move(resumed);
  }
  encode(1);
  compare_payloads(1);
}

TEST_P(EmulatedMessage, SaysWhoseDamagedPayloadTheDecoderRefuses) {
  if (GetParam().codec.starts_with("cast")) GTEST_SKIP() << "every payload of that size is one";
  encode(0);
  DeviceMessage& message = *device_[0]->message;
  for (int from = 0; from < kWorldSize; ++from) {
    for (int s = 0; s < message.slot_count(); ++s) {
      Bytes payload = cpu_[from]->payloads[s];
      if (from == 2 && s == 1) std::fill(payload.begin(), payload.end(), std::byte{0xff});
      ASSERT_TRUE(message.take(from, s, payload).ok());
      payload.resize(cpu_[from]->room[s] + 1);
      EXPECT_EQ(message.take(from, s, payload).code(), StatusCode::kCorruptData);
    }
  }
  const bool finite[] = {true, true, true, true};
  ASSERT_TRUE(message.decode(true, finite).ok());
  Result<bool> decoded = message.decoded();
  while (decoded.ok() && !decoded.value()) decoded = message.decoded();
  ASSERT_FALSE(decoded.ok());
  EXPECT_EQ(decoded.status().code(), StatusCode::kCorruptData);
  EXPECT_NE(decoded.status().message().find("rank 2 of \"tensor 1\""), std::string::npos) << decoded.status().message();
}

INSTANTIATE_TEST_SUITE_P(Codecs, EmulatedMessage,
                         testing::Values(Case{"sign"}, Case{"sign(scale=two_means)", DType::kFloat16},
                                         Case{"fp8(e4m3)"}, Case{"fp8(e5m2, block=tensor)", DType::kBFloat16},
                                         Case{"quant(bits=4)"}, Case{"quant(bits=3, block=64, round=stochastic)"},
                                         Case{"quant(bits=4)", DType::kBFloat16, false},
                                         Case{"fp8(e4m3)", DType::kFloat32, false}, Case{"cast(bf16)"},
                                         Case{"cast(bf16)", DType::kFloat16, false}, Case{"topk(density=0.1)"},
                                         Case{"topk(density=0.05, select=sampled)", DType::kFloat16},
                                         Case{"topk(density=0.3, index=delta, values=fp16)", DType::kBFloat16, false},
                                         Case{"compso"}, Case{"compso(bound=0.01, filter=off, chunk_codes=4096)"},
                                         Case{"float_rans", DType::kFloat32, false},
                                         Case{"float_rans(chunk_codes=4096)", DType::kBFloat16, false}));

TEST(DeviceMessage, SaysWhatItCanNotSend) {
  EmulatedQueue queue;
  const std::pair<const char*, const char*> cases[] = {
      {"topk(block=1024)", "block=tensor"}, {"rans", "expected uint8"},     {"acp", "factors are summed"},
      {"sign(vote=majority)", "a vote"},    {"quant(error=0.1)", "error="}, {"topk | quant", "no device variant"}};
  for (const auto& [codec, reason] : cases) {
    const auto made =
        make_emulated_message({.codec = codec, .tensors = tensors_of({}), .world_size = 2, .queue = &queue});
    ASSERT_FALSE(made.ok()) << codec;
    EXPECT_EQ(made.status().code(), StatusCode::kUnsupported) << codec;
    EXPECT_NE(made.status().message().find(reason), std::string::npos) << made.status().message();
  }
}

}  // namespace
}  // namespace cortado::device_message_test
