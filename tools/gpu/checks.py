# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The sections of tools/gpu_check, in the order in which they run."""

import csv
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import machine
from sections import Failed, InPart, NotRun, Results, Section

TAIL_LINES = 12
ERROR, ERROR_LINES = re.compile(r"\berror: |^FAILED |: Failure$|^E  "), 20  # of compilers and of tests
ARCHITECTURES = "80-real;90"  # code for both, and what later devices make theirs from
PYTHON_TESTS_AT_ONCE = 4
MOST_ALONE = 60  # tests that are tried again by themselves
SHARDS = 64  # of the device tests under the sanitizer, which run until half of the section's time is over
TRAINING = (("4", "1gbit"), ("4", "10gbit"), ("2", "1gbit"))  # workers and links
TRAINING_UNSHAPED = (("4", "unshaped"), ("2", "unshaped"))  # where links can't be shaped
CALIBRATION_RANKS, CALIBRATION_S = 2, 20
METHODS = (
    "no-communication",
    "ddp",
    "bf16",
    "powersgd(rank=4)",
    "powersgd-batched(rank=4)",
    "acp(rank=4)",
    "power(rank=4)",
    "quant(bits=8)",
)
DEVICE_LIBRARIES = {  # and their targets; K-FAC's needs cuSOLVER and cuBLAS
    "libcortado_cuda.so": "cortado_cuda_module",
    "libcortado_cuda_kfac.so": "cortado_cuda_kfac_module",
}
LIBRARY_VARIABLES = ("CORTADO_CUDA_LIBRARY", "CORTADO_CUDA_KFAC_LIBRARY")
PYTHON_FOLDERS = ("build/gpu/site", "benchmarks/training", "examples")


class Context:
    """What a section works with. Its commands end by `deadline`, they and all that they have started."""

    def __init__(self, root: Path, results: Results, environment: dict[str, str], options, section: Section):
        self.root, self.build = root, root / "build" / "gpu"
        self.raw, self.python = results.raw, options.python
        self.environment = environment
        self.deadline = float("inf")
        self._log = root / "build" / "gpu_check" / f"{section.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        self._out = self._log.with_suffix(".out")  # of the command that runs

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def python_path(self) -> dict[str, str]:
        folders = [str(self.root / folder) for folder in PYTHON_FOLDERS]
        return {"PYTHONPATH": os.pathsep.join([*folders, self.environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)}

    def try_command(self, *argv: str | Path, **variables: str) -> tuple[int | None, str]:
        """The exit status, None where time ran out, and what was printed to stdout; all of it goes to the log."""
        command = [str(word) for word in argv]
        environment = {**self.environment, **variables}
        with self._log.open("a") as log, self._out.open("w+", errors="replace") as out:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            options = {"stdout": out, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
            try:
                process = subprocess.Popen(command, cwd=self.root, env=environment, **options)
            except OSError as error:
                raise Failed(f"{command[0]}: {error.strerror}") from error
            try:
                status = process.wait(timeout=max(self.left_s(), 0.1))
            except subprocess.TimeoutExpired:
                status = None
            finally:  # also where this program is interrupted
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            out.seek(0)
            printed = out.read()
            log.write(printed)
        return status, printed

    def command(self, *argv: str | Path, **variables: str) -> str:
        status, printed = self.try_command(*argv, **variables)
        if status == 0:
            return printed
        how = "ran out of its time" if status is None else f"ended with {status}"
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-TAIL_LINES] if ERROR.search(line)][:ERROR_LINES]
        printed = "\n    ".join([*(["errors:", *errors, "..."] if errors else []), *lines[-TAIL_LINES:]])
        raise Failed(f"{Path(str(argv[0])).name} {how}; the end of what it printed:\n    {printed}")

    def write_rows(self, name: str, text: str) -> int:
        """Keeps the rows of a program that prints CSV, and returns how many there are."""
        rows = list(csv.reader(text.splitlines()))
        if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
            raise Failed(f"expected rows of CSV, got:\n    {text[:400].strip()}")
        self.raw.mkdir(parents=True, exist_ok=True)
        (self.raw / name).write_text(text)
        return len(rows) - 1


# ---- building


def configure(context: Context, with_module: bool) -> None:
    nvcc = machine.find_tool("nvcc")
    if nvcc is None:
        raise NotRun("nvcc was not found")
    if shutil.which("cmake", path=context.environment["PATH"]) is None:
        raise NotRun("cmake was not found")
    settings = {
        "CMAKE_BUILD_TYPE": "RelWithDebInfo",
        "CMAKE_CUDA_COMPILER": nvcc,
        "CMAKE_CUDA_ARCHITECTURES": ARCHITECTURES,
        "CORTADO_BUILD_CLI": "OFF",
        "CORTADO_BUILD_PYTHON": "ON" if with_module else "OFF",
        "Python_EXECUTABLE": context.python,
    }
    if with_module and not machine.output_of(
        [context.python, "-c", "import os, sysconfig as s; print(os.path.exists(s.get_path('include') + '/Python.h'))"]
    ).startswith("True"):
        raise NotRun(f"{context.python} has no Python.h, which the module is compiled with")
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=context.environment["PATH"]) else []
    packages = python_packages(context.python)
    context.command(
        *("cmake", "-S", ".", "-B", context.build, *generator),
        *(f"-D{name}={value}" for name, value in settings.items()),
        **({"NCCL_ROOT": str(packages / "nccl"), "CORTADO_CUDA_PACKAGES": str(packages / "cu13")} if packages else {}),
    )


def python_packages(python: str) -> Path | None:
    """The folder of NVIDIA's Python packages, which hold what the toolkit may lack."""
    where = machine.output_of([python, "-c", "import nvidia; print(list(nvidia.__path__)[0])"])
    return Path(where) if where else None


def compile_target(context: Context, target: str) -> None:
    cores = os.cpu_count() or 1
    # A file is compiled for both architectures at once where there are more cores than files.
    threads = {"NVCC_APPEND_FLAGS": "--threads=2"} if cores > 4 else {}
    # All that is wrong is found at once.
    go_on = ["--", "-k", "0"] if (context.build / "build.ninja").exists() else ["--", "-k"]
    context.command("cmake", "--build", context.build, "-j", str(cores), "--target", target, *go_on, **threads)


def build(context: Context) -> str:
    configure(context, with_module=False)
    compile_target(context, "cuda")
    programs = [*context.build.glob("cortado_*_test"), *(context.build / "benchmarks").glob("cuda_*")]
    names = ", ".join(sorted(program.name for program in programs))
    return f"{names} for {ARCHITECTURES.replace(';', ' and ')}"


def module(context: Context) -> str:
    configure(context, with_module=True)
    compile_target(context, "_core")
    site = context.build / "site" / "cortado"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(context.root / "python" / "cortado", site, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in context.build.glob("_core*.so"):
        shutil.copy(file, site)
    for library, target in DEVICE_LIBRARIES.items():
        if target in targets(context):
            compile_target(context, target)
            shutil.copy(context.build / library, site)
    ask = "import cortado; print(cortado.__version__)"
    version = context.command(context.python, "-c", ask, **context.python_path()).strip()
    found = [library for library in DEVICE_LIBRARIES if (site / library).exists()]
    return f"cortado {version} with {' and '.join(found) or 'no library of devices'}"


def targets(context: Context) -> set[str]:
    """Ninja prints `name: rule`, Make `... name`."""
    printed = context.command("cmake", "--build", context.build, "--target", "help")
    return {line.removeprefix("... ").partition(":")[0].strip() for line in printed.splitlines()}


def library_paths(context: Context) -> dict[str, str]:
    """As tests look for them, which do not look beside the module."""
    site = context.build / "site" / "cortado"
    paths = {name: site / library for name, library in zip(LIBRARY_VARIABLES, DEVICE_LIBRARIES, strict=True)}
    return {name: str(path) for name, path in paths.items() if path.exists()}


# ---- tests


def tests(context: Context) -> str:
    """Every program of device tests; each says how many tests it ran. After an illegal access nothing works any more in
    a process, so what failed is tried again, each test in a process of its own."""
    found, passed, broken = [], 0, []
    for program in sorted(context.build.glob("cortado_*_test")):
        report = context.build / f"{program.name}.json"
        report.unlink(missing_ok=True)
        status, _ = context.try_command(program, "--gtest_brief=1", f"--gtest_output=json:{report}")
        if not report.exists():
            broken.append(f"{program.name} ran no test; it ended with {status}")
            continue
        results = json.loads(report.read_text())
        all_tests = [test for suite in results["testsuites"] for test in suite["testsuite"]]
        failed = [f"{test['classname']}.{test['name']}" for test in all_tests if "failures" in test]
        tried = failed[:MOST_ALONE]
        alone = [(name, why) for name in tried if (why := failure_of(context, program, name))]
        broken += [f"{program.name} {name}: {why}" for name, why in alone]
        skipped = sum(test["result"] == "SKIPPED" for test in all_tests)
        found.append(f"{program.name}: {len(all_tests) - skipped - len(failed)} tests passed, {skipped} skipped")
        if status != 0 and not failed:
            broken.append(f"{program.name} ended with {status}, though its tests passed")
        if failed:
            found[-1] += f", {len(failed)} failed; of {len(tried)} tried alone {len(alone)} failed"
        passed += len(all_tests) - skipped
    if not (found or broken):
        raise Failed("the build has no program of device tests")
    if broken or "failed" in " ".join(found):
        raise Failed("\n    ".join(["; ".join(found), *broken]))
    if not passed:
        raise NotRun(f"every test was skipped; {'; '.join(found)}")
    return "; ".join(found)


def failure_of(context: Context, program: Path, name: str) -> str:
    """What is wrong with one test by itself, in a line; empty where it passes."""
    status, printed = context.try_command(program, "--gtest_brief=1", f"--gtest_filter={name}")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return "" if status == 0 else " ".join(lines)[:300] or f"ended with {status}"


def sanitizer(context: Context) -> str:
    tool = machine.find_tool("compute-sanitizer")
    if tool is None:
        raise NotRun("compute-sanitizer was not found")
    program = context.build / "cortado_cuda_test"
    half_s = context.left_s() / 2
    found, is_whole = [], True
    # A test asks for a device that there is not: errors of calls are for the tests to find.
    for check, *options in (("memcheck", "--report-api-errors", "no"), ("racecheck",)):
        passed, start = 0, time.monotonic()
        for shard in range(SHARDS):
            if time.monotonic() - start > 0.7 * half_s and passed:
                break
            status, printed = context.try_command(
                *(tool, "--tool", check, *options, "--error-exitcode", "9", program, "--gtest_brief=1"),
                GTEST_TOTAL_SHARDS=str(SHARDS),
                GTEST_SHARD_INDEX=str(shard),
            )
            if "Device not supported" in printed:
                raise NotRun("compute-sanitizer says: Device not supported")
            if status is None:
                break  # no finding, and no time for more
            if status != 0:
                raise Failed(f"{check} in part {shard} of {SHARDS}:\n    " + "\n    ".join(printed.splitlines()[-12:]))
            passed += 1
        found.append(f"{check}: {passed} of {SHARDS} parts of the tests without a finding")
        if not passed:
            raise Failed(f"{'; '.join(found)}: it ran out of its time")
        is_whole = is_whole and passed == SHARDS
    if not is_whole:
        raise InPart(f"{'; '.join(found)}; there was no time for the others")
    return "; ".join(found)


def python_tests(context: Context) -> str:
    files = sorted((context.root / "tests" / "python").glob("test_cuda_*.py"))
    if not files:
        raise NotRun("there is no tests/python/test_cuda_*.py")
    if not machine.output_of([context.python, "-c", "import pytest; print(pytest.__version__)"]):
        raise NotRun(f"{context.python} has no pytest")
    variables = {**context.python_path(), **library_paths(context)}
    # Several at once where pytest can: most of their time goes into starting ranks.
    has_xdist = machine.output_of([context.python, "-c", "import xdist; print(xdist.__version__)"])
    at_once = (
        ["-n", str(PYTHON_TESTS_AT_ONCE)] if has_xdist and (os.cpu_count() or 1) > 2 * PYTHON_TESTS_AT_ONCE else []
    )
    printed = context.command(context.python, "-m", "pytest", "-q", *at_once, *files, **variables)
    summary = printed.strip().rpartition("\n")[2].strip("= ")
    if " passed" not in summary:
        raise NotRun(f"no test ran: {summary}")
    return summary


# ---- measurements


def kernels(context: Context) -> str:
    rows = context.write_rows("codecs.csv", context.command(context.build / "benchmarks" / "cuda_codec_bench"))
    return f"{rows} rows, each compared with the codec on the CPU before it was timed"


def selection(context: Context) -> str:
    program = context.root / "benchmarks" / "codec" / "torch_topk_cuda.py"
    bench = context.build / "benchmarks" / "cuda_codec_bench"
    return f"{context.write_rows('topk.csv', context.command(context.python, program, bench))} rows"


def low_rank_step(context: Context) -> str:
    ours = context.command(context.build / "benchmarks" / "cuda_acp_step_bench")
    peer = context.root / "benchmarks" / "codec" / "torch_acp_step_cuda.py"
    theirs = context.command(context.python, peer)
    head, _, rows = theirs.partition("\n")
    if head != ours.partition("\n")[0]:
        raise Failed(f"the columns of the two programs differ: {head}")
    return f"{context.write_rows('acp.csv', ours + rows)} rows"


def kfac(context: Context) -> str:
    library = library_paths(context).get(LIBRARY_VARIABLES[1])
    if library is None:
        raise NotRun("libcortado_cuda_kfac.so was not built: cuSOLVER or cuBLAS was not found")
    program = context.root / "benchmarks" / "training" / "kfac_cuda.py"
    printed = context.command(context.python, program, library, **context.python_path())
    return f"{context.write_rows('kfac.csv', printed)} rows, factors and results compared with torch's before"


def training(context: Context) -> str:
    """Speed of training, by the program and the methods of docs/results/speed.md, on the device."""
    folder = context.root / "benchmarks" / "training"
    why_not, _ = probe(context, context.root / "tools" / "gpu" / "attach_probe.py")
    if why_not:
        raise NotRun(f"cortado.attach on CUDA tensors: {why_not}")
    why_unshaped, _ = probe(context, folder / "links_probe.py", "1gbit")
    runs = TRAINING_UNSHAPED if why_unshaped else TRAINING
    scratch = context.build / "training"
    shutil.rmtree(scratch, ignore_errors=True)
    for workers, rate in runs:
        context.command(
            *(context.python, folder / "speed.py", "--device", "cuda", "--models", "gpt", "--rates", rate),
            *("--workers", workers, "--methods", ";".join(METHODS), "--out", scratch),
            *("--rounds", "3", "--discard", "1", "--timed", "4"),
            **context.python_path(),
        )
        records = [json.loads(line) for line in (scratch / "speed.jsonl").read_text().splitlines()]
        write_training(context.raw / "training.csv", records)
    found = "; ".join(f"{workers} workers at {rate}" for workers, rate in runs)
    return f"{found}; links can't be shaped: {why_unshaped}" if why_unshaped else found


def calibrate(context: Context) -> str:
    """Of ranks that share the device, over loopback."""
    file = context.build / "cluster.json"
    context.command(
        *(context.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(CALIBRATION_RANKS)),
        *("-m", "cortado.calibrate", "--device", "cuda", "--again", "--budget", str(CALIBRATION_S), "-o", file),
        **context.python_path(),
    )
    cluster = json.loads(file.read_text())
    rows = [("codec", "device", "direction", "elems", "time_us", "spread_us")]
    for curve in cluster["codecs"]:
        points = zip(curve["elems"], curve["time_ns"], curve["spread_ns"], strict=True)
        name = curve["codec"], curve["device"], curve["direction"]
        rows += [(*name, elems, f"{time_ns / 1e3:.1f}", f"{spread / 1e3:.1f}") for elems, time_ns, spread in points]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    context.write_rows("calibration.csv", text.getvalue())
    copies = {
        direction: 8 * curve["bytes"][-1] / curve["time_ns"][-1]
        for direction, curve in cluster["copies"].items()
        if "bytes" in curve
    }
    if not any(curve["device"] == "gpu" for curve in cluster["codecs"]):
        raise Failed("no codec was measured on the device")
    slows = cluster["contention"]["gpu_codec_slows_backward"]
    copied = ", ".join(f"{direction} {rate:.0f} Gb/s" for direction, rate in copies.items())
    return (
        f"{len(rows) - 1} rows; copies: {copied}; while a codec runs there the backward pass stands still for {slows}"
    )


def probe(context: Context, script: Path, *arguments: str) -> tuple[str, str]:
    """Why something can't be done: the last line that the script printed, empty where it can."""
    status, printed = context.try_command(context.python, script, *arguments, **context.python_path())
    lines = [line for line in printed.splitlines() if line.strip()]
    return ("" if status == 0 else lines[-1] if lines else f"{script.name} ended with {status}"), printed


def write_training(path: Path, records: list[dict]) -> None:
    columns = [
        "model",
        "workers",
        "rate",
        "method",
        "step_ms",
        "slowest_ms",
        "sent_bytes",
        "error",
        "replicas_equal",
        "links",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for record in records:
            for method, result in record["results"].items():
                blocks = [block for block in record["blocks"] if block["method"] == method]
                steps = [block["step_ms"] for block in blocks]
                sent = [block["sent_bytes_per_step"] for block in blocks if block["sent_bytes_per_step"] is not None]
                writer.writerow(
                    [
                        *(record["model"], record["workers"], record["rate"], method),
                        *(f"{statistics.median(steps):.3f}", f"{max(steps):.3f}"),
                        round(statistics.median(sent)) if sent else "",
                        *(f"{result['error']:.5f}", result["replicas_equal"], record["links"]),
                    ]
                )


SECTIONS = (
    Section("build", "device variants, their tests and benchmarks", 200, build, prepares=True, on_device=False),
    Section("tests", "every device test", 90, tests, needs=("build",)),
    Section(
        "module", "the Python module and its libraries", 110, module, needs=("build",), prepares=True, on_device=False
    ),
    Section("python", "Python tests that need a device", 120, python_tests, needs=("module",)),
    Section("training", "steps of training over links", 200, training, needs=("module",)),
    Section("kernels", "share of copy bandwidth of every codec", 100, kernels, needs=("build",)),
    Section("kfac", "K-FAC's work against torch's own products", 55, kfac, needs=("module",)),
    Section("calibrate", "codecs, copies and contention, as plans need them", 60, calibrate, needs=("module",)),
    Section("acp", "ACP's step against a backward pass and PowerSGD", 80, low_rank_step, needs=("build",)),
    Section("topk", "exact and sampled top-k against torch.topk", 40, selection, needs=("build",)),
    Section("sanitizer", "device tests under compute-sanitizer", 60, sanitizer, needs=("build",)),
)
