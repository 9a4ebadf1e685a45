# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""tools/gpu_check where there is no device: what it does with sections that fail, hang or lack something, what it
repeats, what it packs, and the page it makes of rows."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "codec"))

import checks
import machine
import pack
import report
from sections import Failed, InPart, NotRun, Results, Runner, Section

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"device": "a device", "driver": "1", "CUDA": "13.0", "torch": "2.11", "sources": "abc", "clocks": "none"}


class Bench:
    """Sections that note when they run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ran = []

    def section(self, name: str, outcome=None, **options) -> Section:
        def run(context):
            self.ran.append(name)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome(context) if outcome else "fine"

        return Section(name, f"does {name}", 30, run, **options)

    def run(self, *sections, asked=None, facts=None, limit_s=100.0, results=None):
        self.ran = []
        results = results or Results(self.folder)
        runner = Runner(sections, results, facts or FACTS, limit_s)
        return runner.run(asked, lambda section: SimpleNamespace(deadline=0.0))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_section_that_fails_or_lacks_something_stops_no_other(bench):
    outcomes = bench.run(
        bench.section("one", Failed("3 tests failed")),
        bench.section("two", NotRun("no tc")),
        bench.section("wrong", KeyError("links")),
        bench.section("three"),
    )
    assert [(o.state, o.text) for o in outcomes.values()] == [
        ("failed", "3 tests failed"),
        ("not run", "no tc"),
        ("failed", "KeyError: 'links'"),
        ("done", "fine"),
    ]


def test_only_what_is_not_done_runs_again(bench):
    sections = [bench.section("good"), bench.section("bad", Failed("x")), bench.section("absent", NotRun("y"))]
    bench.run(*sections)
    assert bench.ran == ["good", "bad", "absent"]
    bench.run(*sections)
    assert bench.ran == ["bad", "absent"]


def test_what_is_asked_for_runs_though_it_is_done(bench):
    sections = [bench.section("one"), bench.section("two")]
    bench.run(*sections)
    bench.run(*sections, asked=["two"])
    assert bench.ran == ["two"]


@pytest.mark.parametrize("key", ["device", "driver", "CUDA", "torch", "sources"])
def test_results_of_something_else_are_made_again(bench, key):
    bench.run(bench.section("one"))
    bench.run(bench.section("one"), facts={**FACTS, "clocks": "other"})
    assert bench.ran == []
    bench.run(bench.section("one"), facts={**FACTS, key: "other"})
    assert bench.ran == ["one"]


def test_a_fresh_start_forgets(bench):
    bench.run(bench.section("one"))
    results = Results(bench.folder)
    results.forget()
    bench.run(bench.section("one"), results=results)
    assert bench.ran == ["one"]


def test_what_prepares_runs_when_it_is_needed_and_only_then(bench):
    build = bench.section("build", prepares=True, on_device=False)
    sections = [build, bench.section("one", needs=("build",))]
    bench.run(*sections)
    assert bench.ran == ["build", "one"]
    bench.run(*sections)
    assert bench.ran == []
    bench.run(*sections, asked=["one"])
    assert bench.ran == ["build", "one"]


def test_what_needs_a_section_that_failed_is_not_run(bench):
    build = bench.section("build", Failed("does not compile"), prepares=True)
    module = bench.section("module", prepares=True, needs=("build",))
    outcomes = bench.run(build, module, bench.section("one", needs=("module",)))
    assert bench.ran == ["build"]
    assert outcomes["one"].text == "it needs the section module: not run"


def test_without_a_device_every_section_says_so_and_nothing_is_built(bench):
    build = bench.section("build", prepares=True, on_device=False)
    facts = {**FACTS, "device": machine.NO_DEVICE}
    outcomes = bench.run(build, bench.section("one", needs=("build",)), facts=facts)
    assert bench.ran == []
    assert (outcomes["one"].state, outcomes["one"].text) == ("not run", machine.NO_DEVICE)
    assert not any(bench.folder.iterdir())


def test_when_time_is_up_the_rest_is_left_to_the_next_call(bench):
    outcomes = bench.run(bench.section("one"), limit_s=1)
    assert bench.ran == [] and "next call" in outcomes["one"].text
    bench.run(bench.section("one"))
    assert bench.ran == ["one"]


def make_context(folder: Path, limit_s: float) -> checks.Context:
    section = Section("one", "", limit_s, None)
    context = checks.Context(folder, Results(folder), dict(os.environ), SimpleNamespace(python=sys.executable), section)
    context.deadline = time.monotonic() + limit_s
    return context


def test_a_command_that_hangs_ends_with_all_it_started(tmp_path):
    context = make_context(tmp_path, 5.0)
    file = tmp_path / "child"
    with pytest.raises(Failed, match="bash ran out of its time.*\n.*before"):
        context.command("bash", "-c", f"echo before >&2; sleep 60 & echo $! > {file}; wait")
    status = Path(f"/proc/{file.read_text().strip()}/status")
    for _ in range(100):
        if not status.exists() or "Z (zombie)" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the child of the command outlived it")


def test_a_command_that_fails_is_shown_with_what_it_printed(tmp_path):
    with pytest.raises(Failed, match="bash ended with 7.*\n.*why"):
        make_context(tmp_path, 30).command("bash", "-c", "echo why; exit 7")


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Failed, match="/nothing/here: No such file"):
        make_context(tmp_path, 30).command("/nothing/here")


def test_rows_that_are_none_are_refused(tmp_path):
    context = make_context(tmp_path, 30)
    with pytest.raises(Failed, match="no CUDA device"):
        context.write_rows("codecs.csv", "no CUDA device: nothing was measured\n")
    assert context.write_rows("codecs.csv", 'a,b\n"x, y",1\n') == 1


def make_program(folder: Path, results: list[str]) -> None:
    """One that says of its tests what GoogleTest would."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {"testsuites": [{"testsuite": [{"result": result} for result in results]}]}
    program = folder / f"cortado_{len(list(folder.iterdir()))}_test"
    program.write_text(f"#!/bin/bash\necho '{json.dumps(report)}' > \"${{2#--gtest_output=json:}}\"\n")
    program.chmod(0o755)


def test_device_tests_that_are_all_skipped_are_not_done(tmp_path):
    context = make_context(tmp_path, 30)
    make_program(context.build, ["SKIPPED", "SKIPPED"])
    with pytest.raises(NotRun, match="every test was skipped; cortado_0_test: 0 tests passed, 2 skipped"):
        checks.tests(context)
    make_program(context.build, ["COMPLETED"])
    assert "1 tests passed, 0 skipped" in checks.tests(context)


def test_device_tests_that_fail_are_tried_alone(tmp_path):
    """After an illegal access all others of the process fail as well: which ones are to blame is told apart."""
    context = make_context(tmp_path, 30)
    names = ("First", "Second", "Third")
    tests = [{"classname": "Cuda", "name": name, "result": "COMPLETED", "failures": [{}]} for name in names[1:]]
    tests.append({"classname": "Cuda", "name": "First", "result": "COMPLETED"})
    context.build.mkdir(parents=True)
    program = context.build / "cortado_cuda_test"
    program.write_text(
        '#!/bin/bash\ncase "$2" in\n'
        f"--gtest_output*) echo '{json.dumps({'testsuites': [{'testsuite': tests}]})}' > \"${{2#*json:}}\"; exit 1 ;;\n"
        "*Cuda.Second) echo the payload differs; exit 1 ;;\nesac\n"
    )
    program.chmod(0o755)
    with pytest.raises(Failed) as failure:
        checks.tests(context)
    text = str(failure.value)
    assert "cortado_cuda_test: 1 tests passed, 0 skipped, 2 failed; of 2 tried alone 1 failed" in text
    assert "cortado_cuda_test Cuda.Second: the payload differs" in text and "Cuda.Third" not in text


def test_programs_of_device_tests_that_die_or_fail_otherwise_are_named(tmp_path):
    context = make_context(tmp_path, 30)
    make_program(context.build, ["COMPLETED"])
    for name, then in (("late", "exit 3"), ("dead", "")):
        program = context.build / f"cortado_{name}_test"
        program.write_text((context.build / "cortado_0_test").read_text() + then if then else "#!/bin/bash\nexit 139\n")
        program.chmod(0o755)
    with pytest.raises(Failed) as failure:
        checks.tests(context)
    text = str(failure.value)
    assert "cortado_dead_test ran no test; it ended with 139" in text
    assert "cortado_late_test ended with 3, though its tests passed" in text
    assert "cortado_0_test: 1 tests passed, 0 skipped" in text


def test_errors_of_a_compiler_are_shown_however_early_they_came(tmp_path):
    program = "echo 'a.cc:1:2: error: no such thing'; seq 100; exit 2"
    with pytest.raises(Failed, match="bash ended with 2(.*\n)+.*errors:\n.*a.cc:1:2: error: no such thing(.*\n)+.*100"):
        make_context(tmp_path, 30).command("bash", "-c", program)


@pytest.mark.parametrize(("parts", "outcome"), [(64, None), (3, InPart), (0, Failed)])
def test_the_sanitizer_is_done_when_all_parts_are(tmp_path, monkeypatch, parts, outcome):
    """Each of two checks has time for so many."""
    context = make_context(tmp_path, 300)
    left = {"memcheck": parts, "racecheck": 64}

    def try_command(_, __, check, *___, **____):
        left[check] -= 1
        return (0, "") if left[check] >= 0 else (None, "")

    monkeypatch.setattr(machine, "find_tool", lambda _: "compute-sanitizer")
    monkeypatch.setattr(context, "try_command", try_command)
    if outcome is None:
        assert "memcheck: 64 of 64 parts" in checks.sanitizer(context)
        return
    with pytest.raises(outcome, match=f"memcheck: {parts} of 64 parts"):
        checks.sanitizer(context)


def test_a_section_that_was_run_in_part_says_so_and_is_tried_again(bench):
    section = bench.section("one", InPart("3 of 64 parts"))
    assert bench.run(section)["one"].state == "in part"
    assert "| `one` | **in part** | 0 | 3 of 64 parts |" in report.write(Results(bench.folder), (section,)).read_text()
    bench.run(section)
    assert bench.ran == ["one"]


def test_python_tests_that_are_all_skipped_are_not_done(tmp_path):
    context = make_context(tmp_path, 300)  # two runs of pytest, on a machine that may be busy
    file = tmp_path / "tests" / "python" / "test_cuda_one.py"
    file.parent.mkdir(parents=True)
    file.write_text("import pytest\ndef test_one():\n    pytest.skip('no CUDA device')\n")
    with pytest.raises(NotRun, match="no test ran: 1 skipped"):
        checks.python_tests(context)
    file.write_text(file.read_text() + "def test_two():\n    pass\n")
    assert checks.python_tests(context).startswith("1 passed, 1 skipped")


def test_libraries_that_were_built_are_found(tmp_path):
    context = make_context(tmp_path, 100)
    with pytest.raises(NotRun, match="libcortado_cuda_kfac.so was not built"):
        checks.kfac(context)
    library = context.build / "site" / "cortado" / "libcortado_cuda_kfac.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert checks.library_paths(context) == {"CORTADO_CUDA_KFAC_LIBRARY": str(library)}
    file = tmp_path / "tests" / "python" / "test_cuda_one.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import os\ndef test_one():\n    assert os.environ['CORTADO_CUDA_KFAC_LIBRARY'].endswith('kfac.so')\n"
    )
    assert checks.python_tests(context).startswith("1 passed")


@pytest.mark.parametrize(
    "printed", ["all: phony\ncortado_cuda_module: phony", "... all (the default)\n... cortado_cuda_module"]
)
def test_targets_of_both_generators_are_known(tmp_path, monkeypatch, printed):
    context = make_context(tmp_path, 30)
    monkeypatch.setattr(context, "command", lambda *_: printed)
    assert "cortado_cuda_module" in checks.targets(context)


def test_what_nvidia_smi_prints_is_understood():
    line = "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB, 345 MHz, 1980 MHz, 2619 MHz, 2619 MHz, 700.00 W\nsecond"
    facts = machine.parse_device(line)
    assert facts["device"] == "NVIDIA H100 80GB HBM3, 81559 MiB"
    assert facts["driver"] == "580.159.04"
    assert "1980 MHz" in facts["clocks"]
    assert machine.parse_device("") == {"device": machine.NO_DEVICE}


# ---- the page

CODECS = """\
codec,direction,tensors,values,payload_bytes,moved_bytes,entropy_bits,median_us,slowest_us,moved_GB_per_s,input_GB_per_s,share_of_copy
copy,copy,1,67108864,1,1,,180,190,3000,1500,1.000
"cast(bf16)",encode,1,67108864,1,1,,150,160,2700,1400,0.900
"sign",encode,1,67108864,1,1,,150,160,2100,1400,0.700
"topk(density=0.01)",encode,1,67108864,1,1,,1000.0,1100,900,900,0.300
"topk(density=0.01, select=sampled)",encode,1,67108864,1,1,,400,410,1600,900,0.550
"rans(chunk_codes=4096)",encode,64,268435456,1,1,2.9512,500,510,900,536.0,0.300
"rans(chunk_codes=4096)",decode,64,268435456,1,1,2.9512,800,810,900,335.0,0.300
"low rank 4",project rows,64,67108864,1,1,,150,160,2700,1400,0.850
"low rank 4",orthogonalise cols,64,67108864,1,1,,150,160,2700,1400,0.010
"""
TOPK = "what,values,kept,median_us,slowest_us\ntorch.topk,67108864,671088,4000.0,4100\n"
ACP = """\
what,elems,tokens,median_us,slowest_us
acp(rank=4) step,354000000,,2000,2100
backward,354000000,8192,40000,41000
backward,354000000,32768,160000,161000
powersgd hook,354000000,,9000,9100
powersgd batched hook,354000000,,5000,5100
"""
KFAC = """\
model,what,who,median_ms,slowest_ms,difference
gpt,factors,cortado,8.0,8.1,1e-07
gpt,factors,torch,10.0,10.1,
gpt,inverses,cortado,900,900,
gpt,inverses,torch,800,800,
gpt,precondition,cortado,3.0,3.1,2e-05
gpt,precondition,torch,2.4,2.5,
"""
TRAINING = """\
model,workers,rate,method,step_ms,slowest_ms,sent_bytes,error,replicas_equal,links
gpt,4,1gbit,ddp,600,610,1,0,True,shaped
gpt,4,1gbit,bf16,300,310,1,0,True,shaped
gpt,4,1gbit,powersgd(rank=4),100,110,1,0,True,shaped
gpt,4,1gbit,acp(rank=4),50,51,1,0,True,shaped
gpt,4,1gbit,power(rank=4),60,61,1,0,True,shaped
gpt,4,10gbit,bf16,30,31,1,0,True,shaped
gpt,4,10gbit,acp(rank=4),40,41,1,0,True,shaped
"""


def write_rows(raw: Path) -> None:
    raw.mkdir(parents=True, exist_ok=True)
    for name, text in (("codecs", CODECS), ("topk", TOPK), ("acp", ACP), ("kfac", KFAC), ("training", TRAINING)):
        (raw / f"{name}.csv").write_text(text)


def results_with_rows(bench, *others) -> tuple[Results, tuple[Section, ...]]:
    """Of sections that are done, and of the others."""
    write_rows(bench.folder / "gpu")
    measuring = [bench.section(name) for name in ("kernels", "topk", "acp", "kfac", "training")]
    sections = (*(section for section in measuring if section.name not in {o.name for o in others}), *others)
    bench.run(*sections)
    return Results(bench.folder), sections


def test_times_of_two_devices_are_not_compared(bench):
    results, _ = results_with_rows(bench)
    results.outcomes["topk"].facts["device"] = "another"
    assert not [number for number in report.numbers(results) if "torch.topk" in number.what]


def test_goals_are_held_against_the_rows(bench):
    results, _ = results_with_rows(bench)
    found = {number.what: (number.found, number.is_met) for number in report.numbers(results)}
    expected = {
        "`cast(bf16)` encode, 1 tensors: share of copy bandwidth": ("0.90", True),
        "`sign` encode, 1 tensors: share of copy bandwidth": ("0.70", False),
        "`topk(density=0.01, select=sampled)` encode, 1 tensors: share of copy bandwidth": ("0.55", True),
        "`low rank 4` project rows, 64 tensors: share of copy bandwidth": ("0.85", True),
        "`rans(chunk_codes=4096)` encode, 64 tensors, 256 MiB of codes of 2.95 bits: GB/s of codes": ("536", True),
        "`rans(chunk_codes=4096)` decode, 64 tensors, 256 MiB of codes of 2.95 bits: GB/s of codes": ("335", False),
        "`topk(density=0.01)` encode, 67108864 values: times faster than torch.topk": ("4.00", True),
        "ACP's step over a backward pass of 8192 tokens in bf16": ("0.050", False),
        "ACP's step over a backward pass of 32768 tokens in bf16": ("0.013", True),
        "PowerSGD's hook over ACP's step": ("2.50", True),
        "K-FAC, gpt, factors: times faster than torch's own products": ("1.25", True),
        "K-FAC, gpt, precondition: times faster than torch's own products": ("0.80", False),
        "gpt, 4 workers, 1gbit: `acp(rank=4)` faster than `powersgd(rank=4)`, the better of bf16 and PowerSGD": (
            "2.00x",
            True,
        ),
        "gpt, 4 workers, 10gbit: `acp(rank=4)` faster than `bf16`, the better of bf16 and PowerSGD": ("0.75x", False),
    }
    assert found == expected


def test_the_page_names_device_sections_and_reasons(bench):
    lacking = bench.section("sanitizer", NotRun("links can't be shaped: no | tc"))
    results, sections = results_with_rows(bench, bench.section("tests"), lacking)
    text = report.write(results, (*sections, bench.section("later"))).read_text()
    assert "device a device; driver 1; CUDA 13.0; torch 2.11" in text and "clocks: none" in text
    assert "| `tests` | done | 0 | fine |" in text
    assert "| `sanitizer` | **not run** | 0 | links can't be shaped: no \\| tc |" in text
    assert "| `later` | **not run** |  | not tried yet |" in text
    assert "| `sign` encode, 1 tensors: share of copy bandwidth | 0.70 | at least 0.80 | **no** |" in text
    assert "| torch.topk | 67108864 | 671088 | 4000.0 | 4100 |" in text
    assert "`gpu/training.csv`; shaped. Nothing was compared with the CPU." in text
    assert "Every result was compared" not in text


@pytest.mark.parametrize("why", [NotRun("no tc"), Failed("it hangs")])
def test_rows_that_another_call_has_left_are_not_shown(bench, why):
    results, sections = results_with_rows(bench, bench.section("training", why), bench.section("topk", why))
    text = report.write(results, sections).read_text()
    assert "`gpu/codecs.csv`" in text and "`gpu/acp.csv`" in text
    assert "`gpu/training.csv`" not in text and "`gpu/topk.csv`" not in text
    assert "times faster than torch.topk" not in text and "gpt, 4 workers" not in text


def test_a_page_without_rows_has_the_sections_alone(bench):
    bench.run(bench.section("tests", Failed("first line\nsecond")))
    text = report.write(Results(bench.folder), (bench.section("tests"),)).read_text()
    assert "| `tests` | **failed** | 0 | first line second |" in text and "goals" not in text


def test_rows_of_training_are_medians_of_rounds(tmp_path):
    blocks = [{"method": "ddp", "step_ms": ms, "sent_bytes_per_step": 10} for ms in (3.0, 1.0, 2.0)]
    record = {
        **{"model": "gpt", "workers": 4, "rate": "1gbit", "links": "shaped", "blocks": blocks},
        "results": {"ddp": {"error": 0.0, "replicas_equal": True}},
    }
    checks.write_training(tmp_path / "training.csv", [record])
    with (tmp_path / "training.csv").open() as file:
        row = next(csv.DictReader(file))
    assert (row["step_ms"], row["slowest_ms"], row["sent_bytes"]) == ("2.000", "3.000", "10")


# ---- the pack


def test_a_library_of_several_names_is_packed_once(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "libx-1.2.so").write_bytes(b"x" * 100)
    (there / "libx.so").symlink_to("libx-1.2.so")
    (there / "libx.so.1").symlink_to("libx.so")
    for name in ("libx.so", "libx.so.1", "libx-1.2.so"):
        pack.add_library(there / name, tmp_path / "here" / name)
    names = {path.name: path.is_symlink() for path in (tmp_path / "here").iterdir()}
    assert names == {"libx.so": True, "libx.so.1": True, "libx-1.2.so": False}
    assert (tmp_path / "here" / "libx.so.1").read_bytes() == b"x" * 100


@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
def test_a_packed_program_runs_with_its_own_libraries(tmp_path):
    assert pack.add_program("tc", tmp_path)
    done = subprocess.run([tmp_path / "bin" / "tc", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tc utility")


def make_manifest(root: Path, **changes) -> None:
    manifest = {"made": "now", "commit": "abc", "machine": os.uname().machine, "libc": "glibc 2.1", **changes}
    (root / pack.FOLDER).mkdir(parents=True)
    (root / pack.FOLDER / "manifest.json").write_text(json.dumps(manifest))


def test_a_pack_is_used_where_it_is(tmp_path):
    assert pack.describe(tmp_path) == "none"
    assert pack.environment(tmp_path) == dict(os.environ)
    make_manifest(tmp_path)
    assert pack.describe(tmp_path) == "made at now from abc"
    variables = pack.environment(tmp_path)
    assert variables["CMAKE_PREFIX_PATH"].startswith(str(tmp_path / pack.FOLDER))
    assert variables["PATH"] == f"{os.environ['PATH']}:{tmp_path / pack.FOLDER / 'bin'}"


@pytest.mark.parametrize("changes", [{"machine": "pdp11"}, {"libc": "glibc 999.0"}])
def test_a_pack_of_another_machine_is_left_alone_and_says_why(tmp_path, changes):
    make_manifest(tmp_path, **changes)
    assert next(iter(changes.values())) in pack.describe(tmp_path)
    assert pack.environment(tmp_path) == dict(os.environ)


# ---- the command, and the peers' programs


def call(*arguments: str, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "gpu_check", "--out", out, "--python", sys.executable, *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)


@pytest.mark.skipif(machine.query_device()["device"] != machine.NO_DEVICE, reason="there is a device here")
def test_here_it_says_by_name_that_there_is_no_device(tmp_path):
    done = call(out=tmp_path)
    assert done.returncode == 3, done.stderr
    for section in checks.SECTIONS:
        if section.on_device:
            assert f"== {section.name}: not run, 0 s: {machine.NO_DEVICE}" in done.stdout
    assert not any(tmp_path.iterdir())


def test_the_sections_are_listed(tmp_path):
    done = call("--list", out=tmp_path)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [section.name for section in checks.SECTIONS]
    assert call("--section", "nothing", out=tmp_path).returncode == 2


def test_the_limits_of_the_sections_leave_time_for_all(tmp_path):
    """A call of ten minutes gets through when no section hangs: these take half of their limits, or less."""
    assert sum(section.limit_s for section in checks.SECTIONS) / 2 < 570


KEPT_GROUPS = []


def test_powersgd_is_timed_through_its_hook():
    from torch_acp_step_cuda import GPT, PowerStep

    model = GPT(vocabulary=50, context=8, blocks=1, width=32, heads=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A thread of the group that still ends the hook's Future must not drop the last reference: it would join itself.
    KEPT_GROUPS.append(dist.group.WORLD)
    try:
        for batched in (False, True):
            PowerStep([parameter.shape for parameter in model.parameters()], "cpu", batched).check()
    finally:
        dist.destroy_process_group()
