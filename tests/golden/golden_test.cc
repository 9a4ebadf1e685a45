// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Golden payloads, both ways, and golden errors: what encoders wrote when a format was settled they write for ever, and
// decoders give the same values and the same refusals. tests/oracle/ reads the same file with decoders of its own.
//
// payloads.jsonl holds one object a line: first the inputs (name, dtype, shape, data), then for every example
// specification of the conformance suite and some more, in full, and every input that it takes: the payload, the FNV-1a
// 64 hash of the decoded tensor, and what decoding says of the payload once it is damaged (a bit flipped, cut, a byte
// appended or replaced).
//
// sign_sums.json is one more, too large to be held as bytes: how its values are made, the scale and the payload's hash.
//
// When a format changes on purpose (and its version with it): CORTADO_UPDATE_GOLDEN=1 cortado_golden_test
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "codec/conformance_cases.h"
#include "core/hash.h"

namespace cortado {
namespace {

using Json = nlohmann::ordered_json;
using Bytes = std::vector<std::byte>;

constexpr const char* kFile = "tests/golden/payloads.jsonl";
constexpr std::size_t kLargestPayloadBytes = 3000;
constexpr EncodeContext kContext = {.seed = 11, .step = 12, .tensor = 13};

struct Input {
  std::string name;
  DType dtype;
  std::int64_t rows, cols;
  Bytes data;
};

const std::vector<Input>& inputs() {
  static const std::vector<Input> all = [] {
    std::vector<Input> made;
    const auto add = [&](const char* name, DType dtype, std::int64_t rows, std::int64_t cols, bool special) {
      made.push_back({name, dtype, rows, cols, make_values(dtype, rows * cols, special)});
    };
    add("normal_fp32", DType::kFloat32, 3, 67, false);
    add("special_fp32", DType::kFloat32, 1, 23, true);
    add("normal_fp16", DType::kFloat16, 2, 17, false);
    add("normal_bf16", DType::kBFloat16, 2, 17, false);
    add("special_bf16", DType::kBFloat16, 1, 9, true);
    add("large_fp32", DType::kFloat32, 1, 5001, false);
    add("rows_of_zeros_fp32", DType::kFloat32, 20, 256, false);
    for (std::size_t i = 0; i < made.back().data.size(); ++i) {
      if (i / 1024 % 4 != 1) made.back().data[i] = std::byte{0};
    }
    add("codes_uint8", DType::kUint8, 1, 701, false);
    // 0 to 8, as often as coins would: what rans is for.
    add("few_codes_uint8", DType::kUint8, 1, 5001, false);
    for (std::byte& code : made.back().data) code = std::byte(std::popcount(std::to_integer<unsigned>(code)));
    return made;
  }();
  return all;
}

std::string to_hex(const Bytes& bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte b : bytes) {
    text += kDigits[std::to_integer<int>(b >> 4)];
    text += kDigits[std::to_integer<int>(b & std::byte{15})];
  }
  return text;
}

Bytes from_hex(const std::string& text) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::string hash_of(const Bytes& bytes) {
  char text[20];
  const std::uint64_t hash = fnv1a_64({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

Result<Bytes> encode(const Codec& codec, const Input& input) {
  Bytes payload(codec.max_payload_bytes(input.rows, input.cols, input.dtype));
  Bytes scratch(codec.scratch_bytes(input.rows, input.cols, input.dtype));
  Result<std::uint64_t> bytes =
      codec.encode({input.data.data(), input.dtype, input.rows, input.cols}, kContext, payload, scratch);
  if (!bytes.ok()) return bytes.status();
  payload.resize(bytes.value());
  return payload;
}

// The hash of the decoded tensor, or the error.
std::string decode(const Codec& codec, const Input& input, const Bytes& payload) {
  Bytes output(input.data.size());
  Bytes scratch(codec.scratch_bytes(input.rows, input.cols, input.dtype));
  const Status status = codec.decode(payload, {output.data(), input.dtype, input.rows, input.cols}, scratch);
  return status.ok() ? hash_of(output) : status.to_string();
}

// "flip 17", "cut 5", "append 0", "set 3 255"
Bytes damage(Bytes payload, const std::string& how) {
  const auto number = static_cast<std::size_t>(std::stoull(how.substr(how.find(' ') + 1)));
  if (how[0] == 's') payload[number] = static_cast<std::byte>(std::stoi(how.substr(how.rfind(' ') + 1)));
  if (how[0] == 'f') payload[number / 8] ^= std::byte{1} << (number % 8);
  if (how[0] == 'c') payload.resize(number);
  if (how[0] == 'a') payload.push_back(static_cast<std::byte>(number));
  return payload;
}

std::vector<std::string> damages_of(const Bytes& payload) {
  std::vector<std::string> damages = {"append 0"};
  for (const std::size_t length : {std::size_t{0}, payload.size() / 2, payload.size() - 1}) {
    damages.push_back("cut " + std::to_string(length));
  }
  // Headers are more likely to be read wrongly than values.
  const std::size_t bits = 8 * payload.size();
  for (std::uint32_t i = 0; i < 6; ++i) {
    const std::uint32_t random = philox_block(1, 2, 3, i)[0];
    damages.push_back("flip " + std::to_string(random % (i < 3 ? std::min<std::size_t>(bits, 256) : bits)));
  }
  return damages;
}

// Bytes that chance hardly makes: modes, exponents of scales, illegal codes, bits behind the last one.
std::vector<std::string> more_damages_of(const Bytes& payload) {
  std::vector<std::string> damages = {"set 0 0"};
  for (const std::size_t at : {0, 1, 2, 3, 11, 15, static_cast<int>(payload.size()) - 1}) {
    for (const int value : {127, 255}) {
      if (at < payload.size()) damages.push_back("set " + std::to_string(at) + " " + std::to_string(value));
    }
  }
  return damages;
}

Json make_case(const std::string& spec, const Codec& codec, const Input& input, const Bytes& payload) {
  Json damaged = Json::object();
  if (input.name.starts_with("normal") || input.dtype == DType::kUint8) {
    std::vector<std::string> damages = damages_of(payload);
    if (input.name == "normal_fp32" || input.dtype == DType::kUint8) {
      for (std::string& how : more_damages_of(payload)) damages.push_back(std::move(how));
    }
    for (const std::string& how : damages) damaged[how] = decode(codec, input, damage(payload, how));
  }
  return {{"codec", spec},
          {"input", input.name},
          {"payload", to_hex(payload)},
          {"decoded", decode(codec, input, payload)},
          {"damaged", std::move(damaged)}};
}

void write_golden_file() {
  std::ofstream file(kFile);
  for (const Input& input : inputs()) {
    file << Json{{"name", input.name},
                 {"dtype", dtype_name(input.dtype)},
                 {"rows", input.rows},
                 {"cols", input.cols},
                 {"data", to_hex(input.data)}}
                .dump()
         << "\n";
  }
  for (const std::string& spec : golden_specs()) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    for (const Input& input : inputs()) {
      const Result<Bytes> payload = encode(*codec, input);
      // What hardly gets smaller, or is laid out value by value, shows nothing more on a large tensor.
      const bool is_large = payload.ok() && payload.value().size() > kLargestPayloadBytes;
      if (payload.ok() && !is_large) file << make_case(spec, *codec, input, payload.value()).dump() << "\n";
    }
  }
}

std::vector<Json> read_golden_file() {
  if (std::getenv("CORTADO_UPDATE_GOLDEN") != nullptr) write_golden_file();
  std::ifstream file(kFile);
  std::vector<Json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
  return lines;
}

const std::vector<Json>& golden_lines() {
  static const std::vector<Json> lines = read_golden_file();
  return lines;
}

TEST(Golden, InputsAreThoseOfTheFile) {
  std::size_t found = 0;
  for (const Json& line : golden_lines()) {
    if (!line.contains("name")) continue;
    ASSERT_LT(found, inputs().size());
    const Input& input = inputs()[found++];
    EXPECT_EQ(line["name"], input.name);
    EXPECT_EQ(line["data"], to_hex(input.data)) << input.name;
  }
  EXPECT_EQ(found, inputs().size());
}

TEST(Golden, EveryExampleIsInTheFile) {
  std::map<std::string, int> cases;
  for (const Json& line : golden_lines()) {
    if (line.contains("codec")) ++cases[line["codec"]];
  }
  for (const std::string& spec : golden_specs()) {
    EXPECT_GT(cases[spec], 0) << spec << ": CORTADO_UPDATE_GOLDEN=1 adds it";
  }
}

TEST(Golden, EncodersAndDecodersDoAsTheyDid) {
  for (const Json& line : golden_lines()) {
    if (!line.contains("codec")) continue;
    const std::string spec = line["codec"];
    const auto input =
        std::find_if(inputs().begin(), inputs().end(), [&](const Input& i) { return i.name == line["input"]; });
    ASSERT_NE(input, inputs().end()) << line["input"];
    SCOPED_TRACE(spec + ", " + input->name);
    const Result<std::unique_ptr<Codec>> made = make_codec(spec);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    const Codec& codec = *made.value();
    const Bytes payload = from_hex(line["payload"]);
    // Projections of low-rank codecs have a bound instead of bytes.
    if (!codec.row().traits.low_rank) {
      EXPECT_EQ(to_hex(encode(codec, *input).value()), line["payload"]);
    }
    EXPECT_EQ(decode(codec, *input, payload), line["decoded"]);
    for (const auto& [how, expected] : line["damaged"].items()) {
      EXPECT_EQ(decode(codec, *input, damage(payload, how)), expected) << how;
    }
  }
}

// A mean between two float32, of more parts than a block has sums: added up in another order they give another last
// bit. tests/oracle/ adds them up as spec.md says. Value i is value skip + i of philox_fill_normal(seed, 0, 0) times
// 2^(i mod 32), but for those that are set.
TEST(Golden, SignAddsUpInTheOrderOfItsSpecification) {
  std::ifstream file("tests/golden/sign_sums.json");
  const Json golden = Json::parse(file);
  const std::int64_t elems = golden["elems"], skip = golden["skip"];
  std::vector<float> values(static_cast<std::size_t>(skip + elems));
  philox_fill_normal(golden["seed"], 0, 0, values.data(), skip + elems);
  values.erase(values.begin(), values.begin() + skip);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 32));
  const Bytes set = from_hex(golden["set"]);
  std::memcpy(values.data() + golden["set_at"].get<std::size_t>(), set.data(), set.size());
  Input input{"sums", DType::kFloat32, 1, elems, Bytes(values.size() * sizeof(float))};
  std::memcpy(input.data.data(), values.data(), input.data.size());
  const Bytes payload = encode(*make_codec(std::string(golden["codec"])).value(), input).value();
  EXPECT_EQ(to_hex(Bytes(payload.begin(), payload.begin() + sizeof(float))), golden["scale"]);
  EXPECT_EQ(hash_of(payload), golden["payload_hash"]);
}

}  // namespace
}  // namespace cortado
