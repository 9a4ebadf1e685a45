// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/mpi_job.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <thread>

#include "core/check.h"
#include "core/float16.h"

namespace cortado {
namespace {

constexpr int kTag = 0;
constexpr std::chrono::seconds kRollCall(1);
constexpr std::size_t kTextBytes = 512;  // MPI sends so little at once, without the receiver

// What travels on the channel: a status code, then text.
using Announcement = std::array<char, 1 + kTextBytes>;

template <float (*Load)(std::uint16_t), std::uint16_t (*Store)(float)>
void sum_halves(void* given, void* sums, int* count, MPI_Datatype*) {
  const auto* from = static_cast<const std::uint16_t*>(given);
  auto* to = static_cast<std::uint16_t*>(sums);
  for (int i = 0; i < *count; ++i) to[i] = Store(Load(from[i]) + Load(to[i]));
}

}  // namespace

Status mpi_status(int code, const std::string& context) {
  if (code == MPI_SUCCESS) return Status();
  char text[MPI_MAX_ERROR_STRING] = "";
  int chars = 0;
  MPI_Error_string(code, text, &chars);
  return make_error(StatusCode::kPeerFailed, "%s: %.*s", context.c_str(), chars, text);
}

Result<std::shared_ptr<MpiJob>> MpiJob::create(MPI_Comm parent) {
  MPI_Comm control = MPI_COMM_NULL;
  CORTADO_RETURN_IF_ERROR(mpi_status(MPI_Comm_dup(parent, &control), "MPI_Comm_dup"));
  MPI_Comm_set_errhandler(control, MPI_ERRORS_RETURN);
  const std::shared_ptr<MpiJob> job(new MpiJob(control));
  MPI_Comm_rank(control, &job->rank_);
  MPI_Comm_size(control, &job->world_size_);
  job->heard_.resize(static_cast<std::size_t>(job->world_size_));
  constexpr int kCommutes = 1;
  CORTADO_RETURN_IF_ERROR(
      mpi_status(MPI_Op_create(sum_halves<fp16_to_float, float_to_fp16>, kCommutes, &job->sum_fp16_), "MPI_Op_create"));
  CORTADO_RETURN_IF_ERROR(
      mpi_status(MPI_Op_create(sum_halves<bf16_to_float, float_to_bf16>, kCommutes, &job->sum_bf16_), "MPI_Op_create"));
  return job;
}

MpiJob::~MpiJob() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  MPI_Op_free(&sum_fp16_);
  MPI_Op_free(&sum_bf16_);
  // Freeing a communicator may wait for the other ranks, which may be gone.
  if (failure_.ok()) MPI_Comm_free(const_cast<MPI_Comm*>(&control_));
}

const Status& MpiJob::failure() {
  for (;;) {
    int waiting = 0;
    MPI_Status from;
    if (MPI_Iprobe(MPI_ANY_SOURCE, kTag, control_, &waiting, &from) != MPI_SUCCESS || waiting == 0) return failure_;
    Announcement news{};
    const int bytes = static_cast<int>(news.size());
    if (MPI_Recv(news.data(), bytes, MPI_CHAR, from.MPI_SOURCE, kTag, control_, &from) != MPI_SUCCESS) return failure_;
    heard_[static_cast<std::size_t>(from.MPI_SOURCE)] = true;
    news.back() = '\0';
    set_failure(Status(static_cast<StatusCode>(news[0]), news.data() + 1));
  }
}

const Status& MpiJob::fail(const Status& why) {
  set_failure(why);
  if (failure_.code() == StatusCode::kTimeout && !roll_called_) {
    roll_called_ = true;
    failure_ = Status(failure_.code(), failure_.message() + "; " + call_roll());
  }
  return failure_;
}

void MpiJob::set_failure(const Status& why) {
  if (!failure_.ok()) return;
  failure_ = why;
  outgoing_.resize(sizeof(Announcement));
  outgoing_[0] = static_cast<char>(why.code());
  std::memcpy(outgoing_.data() + 1, why.message().data(), std::min(why.message().size(), kTextBytes - 1));
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    const int bytes = static_cast<int>(outgoing_.size());
    if (MPI_Isend(outgoing_.data(), bytes, MPI_CHAR, peer, kTag, control_, &request) == MPI_SUCCESS) {
      MPI_Request_free(&request);  // it goes out by itself; outgoing_ stays as it is
    }
  }
}

std::string MpiJob::call_roll() {
  const auto deadline = std::chrono::steady_clock::now() + kRollCall;
  heard_[static_cast<std::size_t>(rank_)] = true;
  const auto all_heard = [this] { return std::find(heard_.begin(), heard_.end(), false) == heard_.end(); };
  while (!all_heard() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)failure();
  }
  if (all_heard()) return "every rank answered";
  std::string missing;
  for (std::size_t peer = 0; peer < heard_.size(); ++peer) {
    if (!heard_[peer]) missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
  }
  return "rank " + missing + " did not answer within 1 s: gone, stuck, or in another step";
}

}  // namespace cortado
