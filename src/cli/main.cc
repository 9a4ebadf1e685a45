// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The program `cortado`: the command line. Exit codes: ExitCode in codec_commands.h.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "cli/calibrate_command.h"
#include "cli/codec_commands.h"
#include "cli/option_list.h"
#include "cli/plan_commands.h"
#include "cli/trace_command.h"
#include "cortado/planner.h"
#include "cortado/printable.h"
#include "cortado/version.h"

namespace cortado::cli {

namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  cortado codec list                       all codecs, their parameters and defaults\n"
    "  cortado codec list --json                the same for programs, one object a line\n"
    "  cortado codec check \"acp(4, wire=bf16)\"  is it right? prints acp(rank=4, wire=bf16)\n"
    "  cortado codec bench --codec sign --codec \"cast(bf16)\" gradient.npy\n"
    "                                           size, error and speed on your own data\n"
    "  cortado codec compress --codec sign gradient.npy -o gradient.crtf\n"
    "  cortado codec inspect gradient.crtf      what every byte of it is\n"
    "  cortado codec decompress gradient.crtf -o back.npy\n"
    "  cortado plan job.json cluster.json -o plan.json --explain\n"
    "                                           how each gradient should travel, and why\n"
    "  cortado simulate plan.json job.json cluster.json\n"
    "  mpirun -n 4 cortado calibrate -o cluster.json\n"
    "                                           what links and codecs take here\n"
    "  cortado options --count                  ways in which a tensor can travel over two levels\n"
    "  cortado trace trace.json --summary stage where the time of recorded steps went\n"
    "\n"
    "A specification is the one string that names a codec everywhere: here, in Python\n"
    "(cortado.attach(model, \"acp(rank=4)\")) and in files.\n"
    "\n"
    "Exit codes: 0 done; 1 a file could not be read or written; 2 the command line, an output\n"
    "that is an input, too, a specification or a tensor that can't be compressed; 3 a file is\n"
    "damaged, cut short, of another kind or version, or has a value that is wrong.\n";

constexpr const char* kCompressFooter =
    "Examples:\n"
    "  cortado codec compress --codec sign gradient.npy -o gradient.crtf\n"
    "  cortado codec compress --codec \"acp(rank=4)\" --dtype fp32 --shape 512,1024 raw.bin -o raw.crtf\n"
    "\n"
    "Takes .npy files of float32, float16 and uint8 (formats 1.0 and 2.0, C order, little-endian),\n"
    "bfloat16 with --dtype bf16, and with --dtype files of nothing but values. The result carries\n"
    "a checksum; `decompress` makes a file of the same kind of it. `bench` tells what a codec loses.\n";

constexpr const char* kDecompressFooter =
    "Example:\n"
    "  cortado codec decompress gradient.crtf -o gradient.npy\n"
    "\n"
    "A damaged file is refused (exit code 3) with the place, what was found and what was expected;\n"
    "then OUT is not touched, unless it can only be written to in place, as with several hard links.\n";

constexpr const char* kInspectFooter =
    "Example:\n"
    "  cortado codec inspect gradient.crtf\n"
    "\n"
    "Of a damaged file it shows what is whole, then the error (exit code 3).\n";

constexpr const char* kTraceFooter =
    "Examples:\n"
    "  cortado trace trace.json                   draws each step, one row a message\n"
    "  cortado trace trace.json --summary tensor  which tensors take the time\n"
    "  cortado trace trace.json --chrome chrome.json\n"
    "                                             for chrome://tracing or ui.perfetto.dev\n"
    "\n"
    "Record with state.start_trace(), some steps, state.trace().save(\"trace.json\") in Python; state is\n"
    "what cortado.attach returned, or a Reducer.\n";

constexpr const char* kBenchFooter =
    "Examples:\n"
    "  cortado codec bench --codec sign --codec \"cast(bf16)\" layer1.npy layer2.npy\n"
    "  cortado codec bench --json --codec none --dtype bf16 values.bin\n"
    "\n"
    "ratio: bytes of the tensor over bytes of the payload. rel. L2: |x - decoded| / |x|. encode and\n"
    "decode: bytes of the tensor a second. share: the share of the speed of a memory copy that moves\n"
    "the bytes of tensor and payload. One thread; memory larger than the caches.\n";

constexpr const char* kOptionsFooter =
    "Examples:\n"
    "  cortado options --count                           4341: two levels, both devices, all routines\n"
    "  cortado options --count --device gpu --no-rooted  54\n"
    "  cortado options --levels 1 --allow \"topk(density=0.01)\"\n"
    "  cortado options --levels 3 --device cpu --json    one JSON object a line; \"option\" is as plans have it\n"
    "\n"
    "An option is a list of operations: encode@DEVICE, decode@DEVICE and COLLECTIVE@LEVELS. Levels go from the\n"
    "inside out; with two, intra is within a machine, inter between machines, flat is both.\n";

void add_input_options(CLI::App* command, InputOptions* options) {
  const auto set_dtype = [options](const std::string& name) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8}) {
      if (name == dtype_name(dtype)) options->dtype = dtype;
    }
  };
  command
      ->add_option_function<std::string>("--dtype", set_dtype, "of files that are no .npy: fp32, fp16, bf16 or uint8")
      ->check(CLI::IsMember({"fp32", "fp16", "bf16", "uint8"}))
      ->type_name("DTYPE");
  command->add_option("--shape", options->shape, "of files that are no .npy, such as 512,1024; else one dimension")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::NonNegativeNumber)
      ->type_name("N,N");
}

constexpr const char* kCalibrateFooter =
    "Examples:\n"
    "  mpirun -n 4 cortado calibrate -o cluster.json\n"
    "  mpirun -n 4 cortado calibrate -o cluster.json --budget 20 --codec \"topk(density=0.01)\"\n"
    "  mpirun -n 4 cortado calibrate -o cluster.json --device-library build/release/libcortado_cuda.so\n"
    "                                           each rank's GPU, too\n"
    "  torchrun --nproc-per-node 4 -m cortado.calibrate -o cluster.json\n"
    "                                           the same over the process group that training has\n"
    "\n"
    "If the file is there and of these machines and this communicator, what it holds is kept and only what is missing\n"
    "measured; a file of others is measured anew and replaced, and a line says so.\n"
    "Over MPI this needs a program that was built where MPI is (build/release/cortado); that of wheels has none.\n"
    "Let nothing else run meanwhile. The file is for these machines and this communicator only.\n";

constexpr const char* kPlanFooter =
    "Examples:\n"
    "  cortado plan job.json cluster.json -o plan.json --explain\n"
    "  cortado plan job.json cluster.json --allow \"randk(density=0.01)\" --allow \"cast(fp16)\"\n"
    "  cortado plan job.json cluster.json --quality balanced   what auto makes plans of, and no more\n"
    "  cortado plan job.json cluster.json --strategy espresso\n"
    "  cortado plan job.json cluster.json --html report.html\n"
    "  cortado plan job.json cluster.json --measured trace.json\n"
    "                                             what was predicted against what was measured\n"
    "\n"
    "With -o /dev/stdout the summary is on stderr. No output may be an input or another output.\n"
    "Errors are relative L2 errors as the job file has them measured. docs/planner.md says what is\n"
    "modelled and what is not.\n";

constexpr const char* kSimulateFooter =
    "Example:\n"
    "  cortado simulate plan.json job.json cluster.json --trace trace.json\n"
    "\n"
    "One row for everything that can be busy, one letter a bucket. The trace opens in\n"
    "chrome://tracing and Perfetto.\n";

constexpr const char* kSpecHelp = "such as \"acp(rank=4)\"; quote it, shells read parentheses";

void add_compress_command(CLI::App* compress, CompressOptions* options) {
  compress->add_option("--codec", options->spec, kSpecHelp)->required()->type_name("SPEC");
  compress->add_option("IN", options->input_path, "an .npy file, or with --dtype raw values")->required();
  compress->add_option("-o,--output", options->output_path, "the file to write")->required()->type_name("OUT");
  add_input_options(compress, &options->input);
  compress
      ->add_option("--chunk-elems", options->chunk_elems,
                   "elements that are encoded together; 0: about 2^26, so only larger tensors are cut")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  compress->add_option("--seed", options->seed, "of codecs that draw random numbers")->type_name("N");
  compress->footer(kCompressFooter);
}

void add_bench_command(CLI::App* bench, BenchOptions* options) {
  bench->add_option("--codec", options->specs, kSpecHelp + std::string("; may be given several times"))
      ->required()
      ->type_name("SPEC")
      ->allow_extra_args(false);  // what follows a SPEC is a FILE
  bench->add_option("FILE", options->paths, ".npy files, or with --dtype raw values")->required();
  bench->add_flag("--json", options->as_json, "one JSON object a line, one a file and codec");
  add_input_options(bench, &options->input);
  bench->footer(kBenchFooter);
}

void add_options_command(CLI::App* list, OptionListOptions* options) {
  list->add_option("--levels", options->levels, "of the topology; 2 if not given")
      ->check(CLI::Range(1, kMaxLevels))
      ->type_name("N");
  list->add_option("--allow", options->codecs,
                   "list options with this codec, sums of its payloads too if it has them; may be given several times")
      ->allow_extra_args(false)
      ->type_name("SPEC");
  list->add_option("--device", options->device, "encode and decode only there: cpu or gpu; both if not given")
      ->check(CLI::IsMember({"cpu", "gpu"}))
      ->type_name("DEVICE");
  list->add_flag("!--no-rooted", options->rooted, "without reduce, gather and broadcast");
  list->add_flag("--count", options->only_count, "print only how many there are");
  list->add_flag("--json", options->as_json, "one JSON object a line");
  list->footer(kOptionsFooter);
}

void add_trace_command(CLI::App* trace, TraceOptions* options) {
  trace->add_option("FILE", options->path, "a trace, format cortado.trace/1")->required();
  trace->add_option("--summary", options->summary, "a table, one row a stage or a tensor, instead of the drawing")
      ->check(CLI::IsMember({"stage", "tensor"}))
      ->type_name("stage|tensor");
  trace->add_option("--chrome", options->chrome_path, "write it for Chrome or Perfetto")->type_name("OUT");
  trace->footer(kTraceFooter);
}

void add_plan_command(CLI::App* plan, PlanOptions* options) {
  PlannerConstraints& limits = options->constraints;
  plan->add_option("JOB", options->job_path, "cortado.job/1: the tensors and when they are ready")->required();
  plan->add_option("CLUSTER", options->cluster_path, "cortado.cluster/1: what links and codecs take")->required();
  plan->add_option("-o,--output", options->plan_path, "the plan to write")->type_name("PLAN");
  plan->add_option("--allow", limits.allowed_codecs,
                   "a codec that may be used, again for more; else all that were measured")
      ->type_name("SPEC")
      ->allow_extra_args(false);
  plan->add_option("--quality", options->quality, "only codecs that auto makes plans of at this quality (docs/auto.md)")
      ->check(CLI::IsMember({"safe", "balanced", "aggressive"}))
      ->excludes("--allow")
      ->type_name("NAME");
  plan->add_option("--strategy", options->strategy, "cortado, or a way to choose to compare with")
      ->check(CLI::IsMember(planner_strategies()))
      ->type_name("NAME");
  plan->add_option("--max-passes", limits.max_lossy_passes, "most encodes of a tensor that lose something")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  plan->add_option("--max-memory-bytes", limits.max_memory_bytes, "most memory of residuals and payloads on a rank")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  plan->add_option("--max-tensor-error", limits.max_tensor_error, "most relative L2 error of each tensor")
      ->check(CLI::NonNegativeNumber)
      ->type_name("X");
  plan->add_option("--max-total-error", limits.max_total_error, "most relative L2 error of the whole gradient")
      ->check(CLI::NonNegativeNumber)
      ->type_name("X");
  plan->add_option("--search-steps", limits.search_steps,
                   "what the search may spend; by default 60,000 and 225 a tensor, some milliseconds")
      ->check(CLI::Range(std::int64_t{1}, kMaxSearchSteps))
      ->type_name("N");
  plan->add_flag("--explain", options->explain, "every bucket: what was chosen, gained, and why not otherwise");
  plan->add_option("--html", options->html_path, "write a report: one page with timelines and a table")
      ->type_name("REPORT");
  plan->add_option("--measured", options->trace_path,
                   "a trace of the engine (cortado.trace/1) to compare with what is predicted, here and in the report")
      ->type_name("TRACE");
  plan->footer(kPlanFooter);
}

void add_simulate_command(CLI::App* simulate, SimulateOptions* options) {
  simulate->add_option("PLAN", options->plan_path, "cortado.plan/1")->required();
  simulate->add_option("JOB", options->job_path, "cortado.job/1")->required();
  simulate->add_option("CLUSTER", options->cluster_path, "cortado.cluster/1")->required();
  simulate->add_option("--trace", options->trace_path, "write a Chrome trace")->type_name("TRACE");
  simulate->add_option("--width", options->width, "columns of the text")->check(CLI::Range(10, 1000))->type_name("N");
  simulate->footer(kSimulateFooter);
}

void add_calibrate_command(CLI::App* calibrate, CalibrateCommand* command) {
  calibrate->add_option("-o,--output", command->cluster_path, "the file to write")->required()->type_name("CLUSTER");
  calibrate->add_option("--codec", command->codecs, "measure this one, again for more; else those that auto knows")
      ->type_name("SPEC")
      ->allow_extra_args(false);
  calibrate
      ->add_option("--device-library", command->device_library,
                   "libcortado_cuda.so: codecs and copies on each rank's GPU are measured, too; what codecs take "
                   "there from computation only python -m cortado.calibrate --device cuda measures")
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
  calibrate->add_flag("--again", command->again, "measures everything, also what the file holds if it is there");
  calibrate->add_option("--budget", command->budget_s, "about how long it may take; 50 if not given")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  calibrate->add_option("--name", command->name, "of the cluster, for reports")->type_name("NAME");
  calibrate->footer(kCalibrateFooter);
}

int run(int argc, char** argv) {
  CLI::App app("Cortado: gradient compression for data-parallel training on slow networks", "cortado");
  app.set_version_flag("--version", std::string("cortado ") + version());
  app.footer(kFooter);

  CLI::App* codec = app.add_subcommand("codec", "what codecs there are, and what they do to your data");

  CLI::App* list = codec->add_subcommand("list", "list all codecs with parameters, defaults and ranges");
  bool list_as_json = false;
  list->add_flag("--json", list_as_json, "one JSON object a line");

  CLI::App* check = codec->add_subcommand("check", "check a specification and print its canonical form");
  std::string checked_spec;
  check->add_option("SPEC", checked_spec, kSpecHelp)->required();

  CLI::App* compress = codec->add_subcommand("compress", "compress the tensor of a file");
  CompressOptions compressed;
  add_compress_command(compress, &compressed);

  CLI::App* decompress = codec->add_subcommand("decompress", "write the tensor of a compressed file");
  std::string decompressed_input, decompressed_output;
  decompress->add_option("IN", decompressed_input, "what compress wrote")->required();
  decompress->add_option("-o,--output", decompressed_output, "the file to write")->required()->type_name("OUT");
  decompress->footer(kDecompressFooter);

  CLI::App* inspect = codec->add_subcommand("inspect", "explain a compressed file byte by byte");
  std::string inspected;
  bool inspect_as_json = false;
  inspect->add_option("FILE", inspected, "what compress wrote")->required();
  inspect->add_flag("--json", inspect_as_json, "one JSON object a line");
  inspect->footer(kInspectFooter);

  CLI::App* bench = codec->add_subcommand("bench", "size, error and speed of codecs on your data");
  BenchOptions measured;
  add_bench_command(bench, &measured);

  CLI::App* options = app.add_subcommand("options", "list the ways in which a tensor can travel");
  OptionListOptions listed;
  add_options_command(options, &listed);
  CLI::App* trace = app.add_subcommand("trace", "show a recorded trace: what the engine did and when");
  TraceOptions shown;
  add_trace_command(trace, &shown);

  CLI::App* calibrate = app.add_subcommand("calibrate", "measure what links and codecs take, on all ranks of mpirun");
  CalibrateCommand calibrated;
  add_calibrate_command(calibrate, &calibrated);
  CLI::App* plan = app.add_subcommand("plan", "how each gradient should travel, for a job on a cluster");
  PlanOptions planned;
  add_plan_command(plan, &planned);
  CLI::App* simulate = app.add_subcommand("simulate", "what a plan would do, as a timeline");
  SimulateOptions simulated;
  add_simulate_command(simulate, &simulated);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kBadCommandLine;
  }
  if (check->parsed()) return check_codec(checked_spec);
  if (list->parsed()) return list_codecs(list_as_json);
  if (compress->parsed()) return compress_file(compressed);
  if (decompress->parsed()) return decompress_file(decompressed_input, decompressed_output);
  if (inspect->parsed()) return inspect_file(inspected, inspect_as_json);
  if (bench->parsed()) return bench_codecs(measured);
  if (options->parsed()) return list_options(listed);
  if (trace->parsed()) return show_trace(shown);
  if (calibrate->parsed()) return calibrate_cluster(calibrated);
  if (plan->parsed()) return make_plan_file(planned);
  if (simulate->parsed()) return simulate_plan_file(simulated);
  // A command is missing: show those there are. (require_subcommand would say the same of one that is misspelt.)
  std::fputs((codec->parsed() ? codec->help("cortado") : app.help()).c_str(), stderr);
  return kBadCommandLine;
}

}  // namespace

int report_error(const std::string& place, const Status& status, const std::string& next_step) {
  const std::string where = place.empty() ? "" : place + ": ";
  std::fprintf(stderr, "cortado: %s%s\n", where.c_str(), printable(status.to_string()).c_str());
  if (!next_step.empty()) std::fprintf(stderr, "%s\n", next_step.c_str());
  if (status.code() == StatusCode::kIoError) return kIoFailed;
  return status.code() == StatusCode::kCorruptData ? kDamagedFile : kBadCommandLine;
}

int report_wrong_codec(const Status& status) {
  return report_error("--codec", status, "`cortado codec list` shows all codecs.");
}

}  // namespace cortado::cli

int main(int argc, char** argv) {
  const int code = cortado::cli::run(argc, argv);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    std::perror("cortado: standard output");
    return code == 0 ? cortado::cli::kIoFailed : code;
  }
  return code;
}
