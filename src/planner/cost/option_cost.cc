// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/cost/option_cost.h"

#include <algorithm>
#include <bit>

#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

// Pieces are as many as the square of the ranks: of thousands of nodes more than counts.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;

std::int64_t capped_mul(std::int64_t a, std::int64_t b, std::int64_t most) {
  return std::min(checked_mul(a, b).value_or(most), most);
}

std::int64_t part_of(std::int64_t whole, std::int64_t parts) { return (whole + parts - 1) / parts; }

void add(int resource, std::int64_t time_ns, OperationSteps* steps, StepPart part = StepPart::kOperation) {
  if (time_ns > 0) steps->steps[steps->count++] = {time_ns, static_cast<std::uint8_t>(resource), 0, part};
}

bool gathers(OpKind kind) { return kind == OpKind::kAllGather || kind == OpKind::kGather; }

Resource codec_resource(OpDevice device) { return device == OpDevice::kGpu ? kGpuCodec : kCpuCodec; }

// Of a low-rank codec: a matrix whose factors are larger than itself travels as it is.
std::int64_t whole_payload_bytes(const CodecCost& codec, const JobTensor& tensor) {
  const auto bytes =
      static_cast<std::int64_t>(codec.codec->max_payload_bytes(tensor.rows(), tensor.cols(), tensor.dtype));
  return codec.traits.low_rank ? std::min(bytes, tensor.size_bytes()) : bytes;
}

// As engine/low_rank_message.cc lays them out: both sides of half the rank, or both rounds of `power`.
std::int64_t summed_factor_bytes(const CodecCost& codec, const JobTensor& tensor) {
  const std::int64_t rank = std::min<std::int64_t>({codec.rank, tensor.rows(), tensor.cols()});
  const std::int64_t elems_of_rank = tensor.rows() + tensor.cols();
  const bool shrinks = tensor.shape.size() > 1 && tensor.elems() > rank * elems_of_rank;
  const std::int64_t columns = codec.traits.rounds == 1 ? (rank + 1) / 2 : rank;
  return (shrinks ? columns * elems_of_rank : tensor.elems()) * static_cast<std::int64_t>(sizeof(float));
}

enum What { kEncodeCpu, kEncodeGpu, kDecodeCpu, kDecodeGpu, kPayload, kFactors };

}  // namespace

TensorSums::TensorSums(const std::vector<CodecCost>& codecs, const std::vector<JobTensor>& tensors)
    : codecs_(codecs), tensors_(tensors), sums_(codecs.size()) {}

const TensorSums::Sums& TensorSums::sums(const CodecCost& codec, int what, std::int64_t parts) {
  auto& known = sums_[codec.number][what];
  for (const auto& [of_parts, sums] : known) {
    if (of_parts == parts) return sums;
  }
  Sums sums = {0};
  for (const JobTensor& tensor : tensors_) {
    const std::int64_t elems = part_of(tensor.elems(), parts);
    std::int64_t value = 0;
    if (what == kFactors) {
      value = summed_factor_bytes(codec, tensor);
    } else if (what == kPayload && parts == 1) {
      value = whole_payload_bytes(codec, tensor);
    } else if (what == kPayload && codec.traits.low_rank) {
      value = part_of(whole_payload_bytes(codec, tensor), parts);
    } else if (what == kPayload) {
      value = static_cast<std::int64_t>(codec.codec->max_payload_bytes(1, elems, tensor.dtype));
    } else if (what == kEncodeCpu || what == kEncodeGpu) {
      value = codec.encode_ns(static_cast<OpDevice>(what - kEncodeCpu), elems);
    } else {
      value = codec.decode_ns(static_cast<OpDevice>(what - kDecodeCpu), elems);
    }
    sums.push_back(sums.back() + value);
  }
  known.emplace_back(parts, std::move(sums));
  return known.back().second;
}

std::int64_t TensorSums::encode_ns(const CodecCost& codec, OpDevice device, std::int64_t parts, int first, int last) {
  const Sums& all = sums(codec, kEncodeCpu + static_cast<int>(device), parts);
  return all[last + 1] - all[first];
}

std::int64_t TensorSums::decode_ns(const CodecCost& codec, OpDevice device, std::int64_t parts, int first, int last) {
  const Sums& all = sums(codec, kDecodeCpu + static_cast<int>(device), parts);
  return all[last + 1] - all[first];
}

std::int64_t TensorSums::payload_bytes(const CodecCost& codec, std::int64_t parts, int first, int last) {
  const Sums& all = sums(codec, kPayload, parts);
  return all[last + 1] - all[first];
}

std::int64_t TensorSums::factor_bytes(const CodecCost& codec, int first, int last) {
  const Sums& all = sums(codec, kFactors, 1);
  return all[last + 1] - all[first];
}

bool sums_factors(const CodecCost& codec, const Option& option, int levels) {
  const std::vector<Operation>& ops = option.operations;
  return codec.traits.low_rank && ops.size() == 3 && ops[0].kind == OpKind::kEncode &&
         ops[1].kind == OpKind::kAllReduce && ops[1].levels == LevelRange{0, levels - 1};
}

Option sum_of_factors(OpDevice encode_device, OpDevice decode_device, int levels) {
  return {{{.kind = OpKind::kEncode, .device = encode_device},
           {.kind = OpKind::kAllReduce, .levels = {0, levels - 1}, .encoded = true},
           {.kind = OpKind::kDecode, .device = decode_device}}};
}

bool can_go(const CodecCost& codec, const Option& option, int levels, bool has_vectors) {
  if (option.encodes() == 0 || !codec.traits.low_rank || sums_factors(codec, option, levels)) return true;
  if (has_vectors || option.encodes() > 1) return false;
  bool encoded = false;
  for (const Operation& operation : option.operations) {
    if (operation.kind == OpKind::kEncode) {
      encoded = true;
    } else if (!encoded && operation.kind != OpKind::kReduce) {
      return false;
    } else if (operation.encoded && !codec.sums && is_sum(operation.kind)) {
      return false;
    }
  }
  return true;
}

Status check_for_planning(const Cluster& cluster) {
  CORTADO_RETURN_IF_ERROR(cluster.check().with_context("cluster"));
  if (cluster.levels.size() <= static_cast<std::size_t>(kMaxLevels)) return {};
  return make_error(StatusCode::kUnsupported, "cluster: $.levels: expected at most %d levels, got %zu", kMaxLevels,
                    cluster.levels.size());
}

OptionCost::OptionCost(const CostModel& model, const CodecCost* codec, const BucketShape& shape)
    : model_(model), codec_(codec), shape_(shape), elem_bytes_(static_cast<std::int64_t>(dtype_bytes(shape.dtype))) {}

PathState OptionCost::begin() const {
  PathState state;
  state.place = model_.home;
  if (model_.home == OpDevice::kCpu) state.packing = Packing::kPack;
  return state;
}

bool OptionCost::apply(const Operation& operation, PathState* state, OperationSteps* steps) const {
  if (operation.kind == OpKind::kEncode) return encode(operation, state, steps);
  if (operation.kind == OpKind::kDecode) return decode(operation, state, steps);
  travel(operation, state, steps);
  return true;
}

void OptionCost::finish(PathState* state, OperationSteps* steps) const {
  move_to(model_.home, values_bytes(*state), state, steps);
  if (state->packing == Packing::kUnpack) add(kCpuCodec, model_.unpack_ns(shape_.elems), steps, StepPart::kPacking);
  state->packing = Packing::kNone;
}

// Whether an encode reads gradients where they lie, if it is first, and a decode writes averages there, if it is last.
bool OptionCost::goes_in_place(const Operation& operation) const {
  return codec_->traits.elementwise && operation.device == OpDevice::kCpu;
}

// Before anything reads the values from the bucket's buffer.
void OptionCost::pack(PathState* state, OperationSteps* steps) const {
  if (state->packing == Packing::kPack) add(kCpuCodec, model_.pack_ns(shape_.elems), steps, StepPart::kPacking);
  state->packing = Packing::kNone;
}

bool OptionCost::encode(const Operation& operation, PathState* state, OperationSteps* steps) const {
  if (codec_ == nullptr || !codec_->runs_on(operation.device)) return false;
  if (codec_->traits.low_rank && state->parts > 1) return false;
  if (!goes_in_place(operation)) pack(state, steps);
  state->packing = Packing::kNone;
  move_to(operation.device, values_bytes(*state), state, steps);
  add(codec_resource(operation.device), encode_ns(operation.device, state->parts), steps);
  state->encoded = true;
  state->pieces = 1;
  state->piece_parts = state->parts;
  return true;
}

bool OptionCost::decode(const Operation& operation, PathState* state, OperationSteps* steps) const {
  if (codec_ == nullptr || !codec_->runs_on(operation.device)) return false;
  if (codec_->traits.low_rank && state->piece_parts > 1) return false;
  move_to(operation.device, held_payload_bytes(*state), state, steps);
  const std::int64_t piece_ns = decode_ns(operation.device, state->piece_parts);
  add(codec_resource(operation.device), capped_mul(state->pieces, piece_ns, kMaxNs), steps);
  state->encoded = false;
  state->pieces = 0;
  state->piece_parts = 1;
  if (model_.home == OpDevice::kCpu && !goes_in_place(operation)) state->packing = Packing::kUnpack;
  return true;
}

void OptionCost::travel(const Operation& operation, PathState* state, OperationSteps* steps) const {
  std::int64_t ranks = 1, groups = 1;  // groups: ranks of a unit, each with a part of its own to send over its link
  unsigned levels = 0;
  for (int l = 0; l <= operation.levels.last; ++l) {
    const int ranks_of_level = model_.cluster->levels[l].ranks;
    if (l >= operation.levels.first) {
      ranks *= ranks_of_level;
      levels |= 1u << l;
    } else if ((state->parted >> l & 1) != 0) {
      groups *= ranks_of_level;
    }
  }
  if (!state->encoded) {
    pack(state, steps);
    if (model_.home == OpDevice::kCpu) state->packing = Packing::kUnpack;
  }
  add_transfer(operation, *state, ranks, groups, steps);
  arrive(operation.kind, ranks, levels, state);
}

void OptionCost::add_transfer(const Operation& operation, const PathState& state, std::int64_t ranks,
                              std::int64_t groups, OperationSteps* steps) const {
  const int link = model_.collectives.link_of(operation.levels);
  if (link < 0) return;
  const bool has_factors = state.encoded && codec_->traits.low_rank && operation.kind == OpKind::kAllReduce &&
                           operation.levels == LevelRange{0, static_cast<int>(model_.cluster->levels.size()) - 1};
  const std::int64_t held = has_factors     ? factor_bytes()
                            : state.encoded ? held_payload_bytes(state)
                                            : values_bytes(state);
  // Of a codec with several rounds the collective runs once a round, with its share of the factors.
  const std::int64_t rounds = has_factors ? codec_->traits.rounds : 1;
  const std::int64_t bytes = part_of(gathers(operation.kind) ? capped_mul(held, ranks, kMostBytes) : held, rounds);
  const DType summed = state.encoded ? codec_->sum_dtype : shape_.dtype;
  std::int64_t time_ns = rounds * model_.collectives.time_ns(operation.kind, operation.levels, bytes, groups, summed);
  const bool has_sizes = state.encoded && !codec_->traits.fixed_size && model_.gathers_sizes;
  const std::int64_t starts = rounds + (has_sizes ? 1 : 0);
  add(kCpuCodec, starts * model_.start_ns(), steps, StepPart::kStart);
  if (model_.start_ns() > 0) steps->steps[steps->count - 1].starts = static_cast<std::uint8_t>(starts);
  if (has_sizes) {
    const std::int64_t sizes_ns = announcement_ns(operation, state, ranks, groups);
    if (model_.home == OpDevice::kCpu) {  // the thread of the backward pass has to see that they have come
      add(kLink + link, sizes_ns, steps);
    } else {
      time_ns += sizes_ns;
    }
  }
  add(kLink + link, time_ns, steps);
}

// What a rank holds after a collective of `ranks` over `levels` (bits).
void OptionCost::arrive(OpKind kind, std::int64_t ranks, unsigned levels, PathState* state) const {
  switch (kind) {
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      state->parted = static_cast<std::uint8_t>(state->parted | levels);
      state->parts *= ranks;
      if (!state->encoded) break;
      state->piece_parts *= ranks;
      if (kind == OpKind::kAllToAll) state->pieces *= ranks;
      break;
    case OpKind::kAllGather:
      if ((state->parted & levels) != 0) {  // it answers a first step
        state->parted = static_cast<std::uint8_t>(state->parted & ~levels);
        state->parts /= ranks;
        if (state->encoded && codec_->traits.low_rank) {  // parts of payloads become payloads again
          state->piece_parts /= ranks;
          break;
        }
      }
      if (state->encoded) state->pieces *= ranks;
      break;
    case OpKind::kGather:
      state->pieces *= ranks;
      break;
    default:
      break;
  }
}

// Payloads whose size is not known beforehand are preceded by their sizes, in a collective of the same kind.
std::int64_t OptionCost::announcement_ns(const Operation& operation, const PathState& state, std::int64_t ranks,
                                         std::int64_t groups) const {
  const std::int64_t tensors = shape_.sums != nullptr ? shape_.last - shape_.first + 1 : 1;
  const OpKind kind = gathers(operation.kind) ? OpKind::kAllGather : operation.kind;
  const std::int64_t piece_bytes = tensors * static_cast<std::int64_t>(sizeof(std::uint64_t));
  const std::int64_t bytes = capped_mul(state.pieces, piece_bytes, kMostBytes);
  const std::int64_t gathered_bytes = gathers(operation.kind) ? capped_mul(bytes, ranks, kMostBytes) : bytes;
  return model_.collectives.time_ns(kind, operation.levels, gathered_bytes, groups);
}

void OptionCost::move_to(OpDevice place, std::int64_t bytes, PathState* state, OperationSteps* steps) const {
  if (state->place == place) return;
  state->place = place;
  const bool to_host = place == OpDevice::kCpu;
  add(to_host ? kDeviceToHost : kHostToDevice,
      (to_host ? model_.cluster->device_to_host : model_.cluster->host_to_device).at(bytes), steps);
}

std::int64_t OptionCost::values_bytes(const PathState& state) const {
  return part_of(shape_.elems, state.parts) * elem_bytes_;
}

template <typename Make>
std::int64_t OptionCost::once(int what, std::int64_t parts, Make make) const {
  const int slot = what * kSlots + std::bit_width(static_cast<std::uint64_t>(parts)) % kSlots;
  Known& known = known_[static_cast<std::size_t>(slot)];
  if ((is_known_ >> slot & 1) == 0 || known.parts != parts) known = {parts, make()};
  is_known_ |= std::uint64_t{1} << slot;
  return known.value;
}

std::int64_t OptionCost::payload_bytes(std::int64_t parts) const {
  if (shape_.sums != nullptr) return shape_.sums->payload_bytes(*codec_, parts, shape_.first, shape_.last);
  if (codec_->traits.low_rank) {
    return static_cast<std::int64_t>(shape_.low_rank_share * static_cast<double>(shape_.elems * elem_bytes_)) / parts +
           1;
  }
  return once(kPayload, parts, [&] {
    return static_cast<std::int64_t>(codec_->codec->max_payload_bytes(1, part_of(shape_.elems, parts), shape_.dtype));
  });
}

std::int64_t OptionCost::held_payload_bytes(const PathState& state) const {
  return capped_mul(state.pieces, payload_bytes(state.piece_parts), kMostBytes);
}

std::int64_t OptionCost::factor_bytes() const {
  return shape_.sums != nullptr ? shape_.sums->factor_bytes(*codec_, shape_.first, shape_.last) : payload_bytes(1);
}

std::int64_t OptionCost::encode_ns(OpDevice device, std::int64_t parts) const {
  if (shape_.sums != nullptr) return shape_.sums->encode_ns(*codec_, device, parts, shape_.first, shape_.last);
  return once(kEncodeCpu + static_cast<int>(device), parts,
              [&] { return codec_->encode_ns(device, part_of(shape_.elems, parts)); });
}

std::int64_t OptionCost::decode_ns(OpDevice device, std::int64_t parts) const {
  if (shape_.sums != nullptr) return shape_.sums->decode_ns(*codec_, device, parts, shape_.first, shape_.last);
  return once(kDecodeCpu + static_cast<int>(device), parts,
              [&] { return codec_->decode_ns(device, part_of(shape_.elems, parts)); });
}

bool make_chain(const CostModel& model, const CodecCost* codec, const BucketShape& shape, const Option& option,
                OptionChain* chain) {
  chain->steps.clear();  // keeps its memory
  static_cast<ChainCosts&>(*chain) = {};
  const OptionCost cost(model, codec, shape);
  PathState state = cost.begin();
  std::int64_t residual_bytes = 0, buffers[2] = {};
  int buffer = 0;
  const auto take = [&](const OperationSteps& steps, std::size_t operation) {
    for (int i = 0; i < steps.count; ++i) {
      Step step = steps.steps[i];
      step.operation = static_cast<std::uint8_t>(operation);
      chain->loads[step.resource] += step.time_ns;
      chain->own_ns += step.time_ns;
      if (step.resource >= kLink) chain->longest_link_ns = std::max(chain->longest_link_ns, step.time_ns);
      // Not behind what other buckets encode.
      if (step.part == StepPart::kStart && !chain->steps.empty() && chain->steps.back().resource == kCpuCodec) {
        chain->steps.back().time_ns += step.time_ns;
        chain->steps.back().starts = step.starts;
        continue;
      }
      chain->steps.push_back(step);
    }
  };
  const bool has_factors =
      codec != nullptr && sums_factors(*codec, option, static_cast<int>(model.cluster->levels.size()));
  chain->steps.reserve(option.operations.size() + 4);
  for (std::size_t i = 0; i < option.operations.size(); ++i) {
    const Operation& operation = option.operations[i];
    OperationSteps steps;
    if (!cost.apply(operation, &state, &steps)) return false;
    take(steps, i);
    if (!state.encoded) continue;
    // An encode writes to the first buffer; a collective that does not work in place goes from one to the other.
    const bool in_place = operation.kind == OpKind::kAllReduce || operation.kind == OpKind::kReduce ||
                          operation.kind == OpKind::kBroadcast;
    if (!in_place) buffer = operation.kind == OpKind::kEncode ? 0 : 1 - buffer;
    buffers[buffer] = std::max(buffers[buffer], has_factors ? cost.factor_bytes() : cost.held_payload_bytes(state));
    if (operation.kind != OpKind::kEncode || codec->traits.lossless) continue;
    ++chain->lossy_passes;
    const std::int64_t values = part_of(shape.elems, state.parts);
    // The last step's stays until this one's is known to be finite.
    if (codec->traits.needs_residual) residual_bytes += 2 * values * static_cast<std::int64_t>(sizeof(float));
  }
  OperationSteps home;
  cost.finish(&state, &home);
  const std::size_t last = std::max<std::size_t>(option.operations.size(), 1) - 1;
  take(home, last);
  std::int64_t rest_ns = 0;
  for (auto step = chain->steps.rbegin(); step != chain->steps.rend(); ++step) {
    step->rest_ns = rest_ns;
    rest_ns += step->time_ns;
  }
  chain->memory_bytes = residual_bytes + buffers[0] + buffers[1];
  return true;
}

}  // namespace cortado
