// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "collective/collective_call.h"
#include "collective/device_wait.h"
#include "core/check.h"
#include "core/format.h"
#include "core/keep_for_ever.h"

namespace cortado {

namespace {

// One block for all members of the group, not one for each.
bool is_undivided(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kBroadcast;
}

}  // namespace

// ---- set-up --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<SchemeRun>> SchemeRun::make(const SchemeSetup& setup) {
  const Topology& topology = setup.levels->topology();
  const LevelRange all = {0, static_cast<int>(topology.levels.size()) - 1};
  CORTADO_ASSIGN_OR_RETURN(SchemeProgram program, compile_scheme(topology, setup.levels->of(all)->rank(), setup.option,
                                                                 setup.codec, setup.tensors, setup.averages));
  std::unique_ptr<SchemeRun> run(new SchemeRun(setup, std::move(program)));
  if (setup.device != nullptr) run->coder_.open_device(*setup.device);
  return run;
}

SchemeRun::SchemeRun(const SchemeSetup& setup, SchemeProgram program)
    : setup_(setup),
      program_(std::move(program)),
      coder_({setup.codec, setup.tensors, setup.has_feedback, setup.seed, setup.clock, setup.lends_memory}, &program_) {
  std::int64_t offset = 0;
  for (const SchemeTensor& tensor : setup_.tensors) {
    offsets_.push_back(offset);
    offset += tensor.elems();
  }
  plan_memory();
  list_collectives();
}

SchemeRun::~SchemeRun() {
  if (state_ != SchemeState::kInFlight && state_ != SchemeState::kFailed) return;
  if (setup_.levels->of(step().op.levels)->abandon("a scheme was destroyed within a step")) return;
  for (AlignedBuffer<float>& values : values_) keep_for_ever(std::move(values));
  for (AlignedBuffer<std::byte>& payloads : payloads_) keep_for_ever(std::move(payloads));
  keep_for_ever(std::move(held_));
  keep_for_ever(std::move(received_));
  keep_for_ever(std::move(counts_));
  keep_for_ever(std::move(received_counts_));
}

bool SchemeRun::is_root_of_broadcast() const { return step().op.kind == OpKind::kBroadcast && step().group_rank == 0; }

// Of payloads that are summed; notes their dtype.
bool SchemeRun::has_headers(const SchemeStep& step) {
  for (const PayloadUnit& unit : step.units) {
    for (const Piece& piece : program_.cells[static_cast<std::size_t>(unit.cell)].pieces) {
      const SumForm form = *setup_.codec->sum_form(piece.rows, piece.cols, DType::kFloat32);
      sum_dtype_ = form.dtype;
      if (form.header_bytes > 0) return true;
    }
  }
  return false;
}

// Whether anything but lent memory holds values.
bool SchemeRun::needs_values() const {
  const auto uses_values = [&](const SchemeStep& step) {
    return is_collective(step.op.kind) ? !step.op.encoded : !coder_.takes_lent(step);
  };
  return program_.steps.empty() || std::any_of(program_.steps.begin(), program_.steps.end(), uses_values);
}

// Two buffers each for values and payloads: a collective that can't work in place goes from one to the other.
void SchemeRun::plan_memory() {
  std::uint64_t payload_bytes[2] = {};
  std::size_t entries = 0, group_size = 0, headers = 0;
  bool second_values = false;
  StepMemory now;
  const auto need = [&](int buffer, const std::vector<PayloadUnit>& units) {
    std::uint64_t bytes = 0;
    std::size_t pieces = 0;
    for (const PayloadUnit& unit : units) {
      const Cell& cell = program_.cells[static_cast<std::size_t>(unit.cell)];
      bytes += cell.max_bytes;
      pieces += cell.pieces.size();
    }
    payload_bytes[buffer] = std::max(payload_bytes[buffer], bytes);
    entries = std::max(entries, pieces);
  };
  for (const SchemeStep& step : program_.steps) {
    now.restores_headers = false;
    const OpKind kind = step.op.kind;
    if (kind == OpKind::kEncode) now.payloads = now.payloads_after = 0;
    if (step.op.encoded) {
      if (kind == OpKind::kAllToAll || kind == OpKind::kReduceScatter) {
        need(now.payloads, step.units);
        if (!step.moved_from.empty()) now.payloads = 1 - now.payloads;  // reorder() moves them
      }
      now.restores_headers = is_sum(kind) && has_headers(step);
      if (now.restores_headers) headers = std::max(headers, header_bytes_of(step.units));
      const bool in_place = is_undivided(kind) && !now.restores_headers;
      now.payloads_after = in_place ? now.payloads : 1 - now.payloads;
    } else if (kind == OpKind::kReduceScatter) {
      now.values_after = 1 - now.values;
    }
    if (step.active) {
      need(now.payloads, step.units);
      need(now.payloads_after, step.result_units);
      second_values = second_values || now.values_after == 1;
      group_size = std::max(group_size, static_cast<std::size_t>(step.group_size));
    }
    memory_.push_back(now);
    now.values = now.values_after;
    now.payloads = now.payloads_after;
  }
  result_at_ = now.values;
  const auto elems = static_cast<std::size_t>(program_.elems_of(program_.whole()));
  if (needs_values()) values_[0] = AlignedBuffer<float>(elems);
  if (second_values) values_[1] = AlignedBuffer<float>(elems);
  for (int b = 0; b < 2; ++b) payloads_[b] = AlignedBuffer<std::byte>(payload_bytes[b]);
  for (PayloadSet* set : {&held_, &received_}) {
    set->bytes.reserve(entries);
    set->offsets.reserve(entries);
  }
  headers_.reserve(headers);
  counts_.reserve(group_size);
  received_counts_.reserve(group_size);
}

void SchemeRun::list_collectives() {
  int ordinal = 0;
  for (const SchemeStep& step : program_.steps) {
    if (!is_collective(step.op.kind)) continue;
    const int count = step.op.encoded && !coder_.fixed_size() ? 2 : 1;
    const std::string name =
        std::string(op_kind_name(step.op.kind)) + "@" + setup_.levels->topology().range_name(step.op.levels);
    for (int i = 0; i < count; ++i, ++ordinal) {
      if (!step.active) continue;
      collectives_.push_back({step.op.levels, ordinal, step.op.encoded, i < count - 1 ? name + ", sizes" : name});
    }
  }
}

std::span<float> SchemeRun::tensor_in(AlignedBuffer<float>& values, int tensor) {
  const auto t = static_cast<std::size_t>(tensor);
  return values.span().subspan(static_cast<std::size_t>(offsets_[t]),
                               static_cast<std::size_t>(setup_.tensors[t].elems()));
}

std::int64_t SchemeRun::buffer_bytes() const {
  return static_cast<std::int64_t>((values_[0].size() + values_[1].size()) * sizeof(float) + payloads_[0].size() +
                                   payloads_[1].size());
}

// ---- a step --------------------------------------------------------------------------------------------------------

std::string SchemeRun::name_of_step() const {
  const Operation& op = step().op;
  const std::string place =
      is_collective(op.kind) ? setup_.levels->topology().range_name(op.levels) : std::string(op_device_name(op.device));
  std::string name = "operation " + std::to_string(next_) + " (" + std::string(op_kind_name(op.kind)) + "@" + place;
  if (is_collective(op.kind) && sizes_first_) name += ", sizes";
  const std::string_view first = setup_.tensors.empty() ? std::string_view() : setup_.tensors.front().name;
  return name + ") of " + name_tensors(first, setup_.tensors.size());
}

Status SchemeRun::fail(const Status& status) {
  state_ = SchemeState::kFailed;
  return status.with_context(name_of_step());
}

Status SchemeRun::begin(std::int64_t step) {
  CORTADO_CHECK(state_ == SchemeState::kIdle || state_ == SchemeState::kDone, "a step is under way or has failed");
  next_ = 0;
  next_collective_ = 0;
  sent_bytes_ = 0;
  coder_.begin(step);
  return advance();
}

// Until the next collective, or the end.
Status SchemeRun::advance() {
  for (; next_ < program_.steps.size(); ++next_) {
    if (!step().active) continue;
    if (is_collective(step().op.kind)) {
      if (step().op.encoded) prepare_payloads();
      state_ = SchemeState::kReady;
      return {};
    }
    if (coder_.runs_on_device(step())) {
      const Status status =
          coder_.start_on_device(step(), held_, payloads_[memory().payloads].data(), values_[memory().values].data());
      if (!status.ok()) return fail(status);
      state_ = SchemeState::kOnDevice;
      return {};
    }
    CORTADO_RETURN_IF_ERROR(code());
  }
  state_ = SchemeState::kDone;
  return {};
}

// Encodes or decodes, or takes what the device has.
Status SchemeRun::code() {
  float* values = values_[memory().values].data();
  std::byte* payloads = payloads_[memory().payloads].data();
  const Status status = step().op.kind == OpKind::kEncode ? coder_.encode(step(), values, payloads, &held_)
                                                          : coder_.decode(step(), held_, payloads, values);
  return status.ok() ? status : fail(status);
}

void SchemeRun::prepare_payloads() {
  sizes_first_ = !coder_.fixed_size();
  if (!step().moved_from.empty()) reorder();
  received_.bytes.clear();
  for (const PayloadUnit& unit : step().result_units) {
    for (const Piece& piece : program_.cells[static_cast<std::size_t>(unit.cell)].pieces) {
      received_.bytes.push_back(piece.max_bytes);
    }
  }
  received_.place();
}

// Brings together what goes to one rank.
void SchemeRun::reorder() {
  std::byte* to = payloads_[memory().payloads].data();
  const std::byte* from = payloads_[1 - memory().payloads].data();
  received_.bytes.clear();
  for (const std::size_t old : step().moved_from) {
    std::memcpy(to, from + held_.offsets[old], held_.bytes[old]);
    to += held_.bytes[old];
    received_.bytes.push_back(held_.bytes[old]);
  }
  std::swap(held_, received_);
  held_.place();
}

// Calls check(member of the group that sent it, cell, piece, entry) for all that was received.
template <typename Check>
Status SchemeRun::check_received(Check&& check) const {
  const SchemeStep& now = step();
  const std::size_t block = now.result_units.size() / static_cast<std::size_t>(now.group_size);
  std::size_t entry = 0;
  for (std::size_t u = 0; u < now.result_units.size(); ++u) {
    const int member = now.op.kind == OpKind::kBroadcast ? 0 : static_cast<int>(u / block);
    const Cell& cell = program_.cells[static_cast<std::size_t>(now.result_units[u].cell)];
    for (const Piece& piece : cell.pieces) {
      CORTADO_RETURN_IF_ERROR(check(member, cell, piece, entry++));
    }
  }
  return {};
}

// The number in the whole group.
int SchemeRun::rank_of(int member) const {
  const Topology& topology = setup_.levels->topology();
  const LevelRange all = {0, static_cast<int>(topology.levels.size()) - 1};
  int stride = 1;
  for (int level = 0; level < step().op.levels.first; ++level) {
    stride *= topology.levels[static_cast<std::size_t>(level)].ranks;
  }
  return setup_.levels->of(all)->rank() + (member - step().group_rank) * stride;
}

Status SchemeRun::check_sizes() const {
  return check_received([&](int member, const Cell&, const Piece& piece, std::size_t entry) -> Status {
    const std::uint64_t bytes = received_.bytes[entry];
    if (bytes <= piece.max_bytes) return {};
    return make_error(StatusCode::kCorruptData,
                      "rank %d announces %" PRIu64 " bytes for \"%s\", expected at most %" PRIu64, rank_of(member),
                      bytes, setup_.tensors[static_cast<std::size_t>(piece.tensor)].name.c_str(), piece.max_bytes);
  });
}

// At each collective, so that the error names who sent it. What is this rank's own, too: nobody may deliver what the
// others refuse.
Status SchemeRun::check_payloads() const {
  const OpKind kind = step().op.kind;
  if (is_sum(kind) || (kind == OpKind::kGather && step().group_rank != 0)) return {};
  const std::byte* payloads = payloads_[memory().payloads_after].data();
  return check_received([&](int member, const Cell& cell, const Piece& piece, std::size_t entry) -> Status {
    if (cell.form != PayloadForm::kChecked) return {};
    const Status status = check_payload({payloads + received_.offsets[entry], received_.bytes[entry]});
    if (status.ok()) return {};
    return status.with_context("what rank " + std::to_string(rank_of(member)) + " sent of \"" +
                               setup_.tensors[static_cast<std::size_t>(piece.tensor)].name + "\"");
  });
}

Status SchemeRun::start() {
  CORTADO_CHECK(state_ == SchemeState::kReady, "nothing to start");
  const bool encoded = step().op.encoded;
  if (encoded && !sizes_first_ && memory().restores_headers) set_headers_aside();
  const CollectiveCall call = !encoded ? values_call() : sizes_first_ ? sizes_call() : payload_call();
  const Result<WorkId> work = setup_.levels->of(step().op.levels)->start(call);
  if (!work.ok()) return fail(work.status());
  sent_bytes_ += sent_bytes_of(call);
  work_ = work.value();
  state_ = SchemeState::kInFlight;
  return {};
}

Result<bool> SchemeRun::ended_on_device() {
  const Result<bool> ended = coder_.ended_on_device(step());
  if (!ended.ok()) return fail(ended.status());
  if (ended.value()) state_ = SchemeState::kArrived;
  return ended;
}

Status SchemeRun::wait_for_device(std::chrono::nanoseconds timeout) {
  const LevelRange all = {0, static_cast<int>(setup_.levels->topology().levels.size()) - 1};
  DeviceWait wait(setup_.levels->of(all), setup_.clock == nullptr ? steady_clock() : setup_.clock, timeout,
                  step().op.kind == OpKind::kEncode ? "encoded" : "decoded");
  for (;;) {
    CORTADO_ASSIGN_OR_RETURN(const bool ended, ended_on_device());
    if (ended) return {};
    if (const Status status = wait.pause(); !status.ok()) return fail(status);
  }
}

Result<bool> SchemeRun::test() {
  if (state_ == SchemeState::kOnDevice) return ended_on_device();
  CORTADO_CHECK(state_ == SchemeState::kInFlight, "nothing in flight");
  const Result<bool> ended = setup_.levels->of(step().op.levels)->test(work_);
  if (!ended.ok()) return fail(ended.status());
  if (ended.value()) state_ = SchemeState::kArrived;
  return ended;
}

Status SchemeRun::wait(std::chrono::nanoseconds timeout) {
  if (state_ == SchemeState::kOnDevice) return wait_for_device(timeout);
  CORTADO_CHECK(state_ == SchemeState::kInFlight, "nothing in flight");
  if (const Status status = setup_.levels->of(step().op.levels)->wait(work_, timeout); !status.ok()) {
    return fail(status);
  }
  state_ = SchemeState::kArrived;
  return {};
}

Status SchemeRun::run(std::int64_t step, std::chrono::nanoseconds timeout) {
  CORTADO_RETURN_IF_ERROR(begin(step));
  while (state_ != SchemeState::kDone) {
    if (state_ == SchemeState::kReady) CORTADO_RETURN_IF_ERROR(start());
    CORTADO_RETURN_IF_ERROR(wait(timeout));
    CORTADO_RETURN_IF_ERROR(proceed());
  }
  return {};
}

Status SchemeRun::proceed() {
  CORTADO_CHECK(state_ == SchemeState::kArrived, "nothing has arrived");
  coder_.forget_work();
  if (!is_collective(step().op.kind)) {
    CORTADO_RETURN_IF_ERROR(code());
    ++next_;
    return advance();
  }
  ++next_collective_;
  if (step().op.encoded && sizes_first_) {
    if (is_root_of_broadcast()) {
      received_.bytes.assign(held_.bytes.begin(), held_.bytes.end());
    } else if (const Status status = check_sizes(); !status.ok()) {
      return fail(status);
    }
    received_.place();
    sizes_first_ = false;
    state_ = SchemeState::kReady;
    return {};
  }
  if (step().op.encoded) {
    if (memory().restores_headers) restore_headers();
    if (const Status status = check_payloads(); !status.ok()) return fail(status);
    std::swap(held_, received_);
  }
  ++next_;
  return advance();
}

std::size_t SchemeRun::header_bytes_of(std::span<const PayloadUnit> units) const {
  std::size_t bytes = 0;
  for (const PayloadUnit& unit : units) {
    for (const Piece& piece : program_.cells[static_cast<std::size_t>(unit.cell)].pieces) {
      bytes += setup_.codec->sum_form(piece.rows, piece.cols, DType::kFloat32)->header_bytes;
    }
  }
  return bytes;
}

// Of payloads that are summed. They are no values, and might be any: zeros are added in their place.
void SchemeRun::set_headers_aside() {
  std::byte* sent = payloads_[memory().payloads].data();
  headers_.clear();
  std::size_t from = 0;
  for (const PayloadUnit& unit : step().units) {
    for (const Piece& piece : program_.cells[static_cast<std::size_t>(unit.cell)].pieces) {
      const SumForm form = *setup_.codec->sum_form(piece.rows, piece.cols, DType::kFloat32);
      std::byte* header = sent + held_.offsets[from++];
      headers_.insert(headers_.end(), header, header + form.header_bytes);
      std::fill_n(header, form.header_bytes, std::byte{});
    }
  }
}

// They are what this rank had for the same cells.
void SchemeRun::restore_headers() {
  if (step().op.kind == OpKind::kReduce && step().group_rank != 0) return;
  std::byte* received = payloads_[memory().payloads_after].data();
  std::size_t to = 0, skipped = 0;
  if (step().op.kind == OpKind::kReduceScatter) {
    skipped =
        step().units.size() / static_cast<std::size_t>(step().group_size) * static_cast<std::size_t>(step().group_rank);
  }
  const std::byte* header = headers_.data() + header_bytes_of(std::span(step().units).first(skipped));
  for (const PayloadUnit& unit : step().result_units) {
    for (const Piece& piece : program_.cells[static_cast<std::size_t>(unit.cell)].pieces) {
      const SumForm form = *setup_.codec->sum_form(piece.rows, piece.cols, DType::kFloat32);
      std::memcpy(received + received_.offsets[to++], header, form.header_bytes);
      header += form.header_bytes;
    }
  }
}

// ---- collectives ---------------------------------------------------------------------------------------------------

// Blocks of elems_of(member) elements; counts only if they differ. What they are is known to all members alike, except
// for payloads whose sizes vary: they always have counts.
template <typename ElemsOf>
void SchemeRun::set_blocks(CollectiveCall* call, bool vary, ElemsOf&& elems_of) {
  counts_.clear();
  for (int member = 0; member < step().group_size; ++member) counts_.push_back(elems_of(member));
  call->elems = counts_.front();
  const bool equal = std::all_of(counts_.begin(), counts_.end(), [&](std::int64_t c) { return c == counts_.front(); });
  if (vary || !equal) call->counts = counts_;
}

CollectiveCall SchemeRun::values_call() {
  const SchemeStep& now = step();
  float* values = values_[memory().values].data();
  CollectiveCall call{.kind = collective_of(now.op.kind),
                      .dtype = DType::kFloat32,
                      .sent = values + program_.begin_of(now.before),
                      .received = values_[memory().values_after].data() + program_.begin_of(now.after)};
  if (is_undivided(now.op.kind)) {
    call.elems = program_.elems_of(now.before);
    return call;
  }
  const Region whole = now.op.kind == OpKind::kAllGather ? now.after : now.before;
  const int count = whole.count / now.group_size;
  set_blocks(&call, false, [&](int member) { return program_.elems_of({whole.first + member * count, count}); });
  return call;
}

// Units stand in blocks of equally many, one for each member of the group.
std::size_t SchemeRun::first_entry_of_block(const std::vector<std::size_t>& first_entry, int member) const {
  const std::size_t units = (first_entry.size() - 1) / static_cast<std::size_t>(step().group_size);
  return first_entry[static_cast<std::size_t>(member) * units];
}

std::int64_t SchemeRun::block_entries(const std::vector<std::size_t>& first_entry, int member) const {
  return static_cast<std::int64_t>(first_entry_of_block(first_entry, member + 1) -
                                   first_entry_of_block(first_entry, member));
}

std::int64_t SchemeRun::block_bytes(const PayloadSet& set, const std::vector<std::size_t>& first_entry,
                                    int member) const {
  std::uint64_t bytes = 0;
  for (std::size_t entry = first_entry_of_block(first_entry, member);
       entry < first_entry_of_block(first_entry, member + 1); ++entry) {
    bytes += set.bytes[entry];
  }
  return static_cast<std::int64_t>(bytes);
}

// In a gather those that send have to know the sizes too.
CollectiveCall SchemeRun::sizes_call() {
  const SchemeStep& now = step();
  constexpr auto kSizeBytes = static_cast<std::int64_t>(sizeof(std::uint64_t));
  CollectiveCall call{
      .kind = collective_of(now.op.kind), .sent = held_.bytes.data(), .received = received_.bytes.data()};
  if (now.op.kind == OpKind::kGather) call.kind = CollectiveKind::kAllGather;
  if (now.op.kind == OpKind::kBroadcast) {
    call.elems = static_cast<std::int64_t>(received_.bytes.size()) * kSizeBytes;
    return call;
  }
  const bool divides = now.op.kind == OpKind::kAllToAll;
  const std::vector<std::size_t>& first_entry = divides ? now.first_entry : now.first_result_entry;
  set_blocks(&call, false, [&](int member) { return block_entries(first_entry, member) * kSizeBytes; });
  if (divides && !call.counts.empty()) {
    received_counts_.assign(static_cast<std::size_t>(now.group_size),
                            block_entries(now.first_result_entry, 0) * kSizeBytes);
    call.received_counts = received_counts_;
  }
  return call;
}

CollectiveCall SchemeRun::payload_call() {
  const SchemeStep& now = step();
  CollectiveCall call{.kind = collective_of(now.op.kind),
                      .sent = payloads_[memory().payloads].data(),
                      .received = payloads_[memory().payloads_after].data()};
  if (is_sum(now.op.kind)) call.dtype = sum_dtype_;
  const auto elem_bytes = static_cast<std::int64_t>(dtype_bytes(call.dtype));
  if (is_undivided(now.op.kind)) {
    call.elems = static_cast<std::int64_t>(received_.total_bytes) / elem_bytes;
    return call;
  }
  if (now.op.kind == OpKind::kReduceScatter) {
    set_blocks(&call, false, [&](int member) { return block_bytes(held_, now.first_entry, member) / elem_bytes; });
    return call;
  }
  const bool vary = !coder_.fixed_size();
  if (now.op.kind != OpKind::kAllToAll) {
    set_blocks(&call, vary, [&](int member) { return block_bytes(received_, now.first_result_entry, member); });
    return call;
  }
  set_blocks(&call, vary, [&](int member) { return block_bytes(held_, now.first_entry, member); });
  if (call.counts.empty()) return call;
  received_counts_.clear();
  for (int member = 0; member < now.group_size; ++member) {
    received_counts_.push_back(block_bytes(received_, now.first_result_entry, member));
  }
  call.received_counts = received_counts_;
  return call;
}

// What this rank hands over, its own block included.
std::int64_t SchemeRun::sent_bytes_of(const CollectiveCall& call) const {
  const auto elem_bytes = static_cast<std::int64_t>(dtype_bytes(call.dtype));
  const auto own = static_cast<std::size_t>(step().group_rank);
  switch (call.kind) {
    case CollectiveKind::kBroadcast:
      return own == 0 ? call.elems * elem_bytes : 0;
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
      return (call.counts.empty() ? call.elems : call.counts[own]) * elem_bytes;
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll: {
      if (call.counts.empty()) return call.elems * step().group_size * elem_bytes;
      std::int64_t elems = 0;
      for (const std::int64_t count : call.counts) elems += count;
      return elems * elem_bytes;
    }
    default:
      return call.elems * elem_bytes;
  }
}

}  // namespace cortado
