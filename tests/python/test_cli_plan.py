# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""`cortado plan` and `cortado simulate` as a user meets them."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "cortado"
DATA = Path(__file__).resolve().parent.parent / "data" / "planner"
JOB = DATA / "jobs" / "lstm.json"
CLUSTER = DATA / "clusters" / "pcie_25g.json"


def cortado(*arguments, **options):
    command = [PROGRAM, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, **options)


def made(tmp_path, *arguments):
    path = tmp_path / "plan.json"
    done = cortado("plan", JOB, CLUSTER, "-o", path, *arguments)
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_a_plan_says_what_it_expects(tmp_path):
    path, text = made(tmp_path)
    plan = json.loads(path.read_text())
    assert plan["format"] == "cortado.plan/1"
    assert 71_450_000 < plan["lower_bound_ns"] <= plan["predicted_step_ns"] <= plan["dense_step_ns"]
    assert plan["options_considered"] > 4341
    assert plan["planner_ns"] > 0
    names = [tensor for bucket in plan["buckets"] for tensor in bucket["tensors"]]
    assert names == [tensor["name"] for tensor in json.loads(JOB.read_text())["tensors"]]
    assert "lower bound" in text


def test_only_allowed_codecs_are_used(tmp_path):
    path, _ = made(tmp_path, "--allow", "topk(0.01)")
    codecs = {b["codec"] for b in json.loads(path.read_text())["buckets"] if "codec" in b}
    assert codecs <= {"none", "topk(density=0.01)"}
    assert "topk(density=0.01)" in codecs


def test_limits(tmp_path):
    path, _ = made(tmp_path, "--max-passes", "1")
    for bucket in json.loads(path.read_text())["buckets"]:
        assert sum(op["op"] == "encode" for op in bucket["option"]) <= 1
    path, _ = made(tmp_path, "--max-memory-bytes", "0")
    assert json.loads(path.read_text())["predicted_step_ns"] == json.loads(path.read_text())["dense_step_ns"]


def test_what_a_plan_loses_is_said_as_far_as_the_job_knows(tmp_path):
    job = json.loads(JOB.read_text())
    for tensor in job["tensors"]:
        tensor["errors"] = {"topk(density=0.01)": 0.75}
    known = tmp_path / "job.json"
    known.write_text(json.dumps(job))
    plan = ("plan", known, CLUSTER, "--allow", "topk(0.01)", "--explain")
    text = cortado(*plan).stdout
    assert "relative error of the gradient, as the job has it measured: " in text
    losses = {float(loss) for loss in re.findall(r", relative error ([0-9.]+):", text)}
    assert losses and losses <= {0.75, 1.5}  # once or twice
    assert "the job has not all that are needed" in cortado("plan", JOB, CLUSTER, "--allow", "topk(0.01)").stdout
    assert "relative error" not in cortado("plan", JOB, CLUSTER, "--strategy", "dense").stdout


def test_a_quality_knows_a_codec_however_the_file_spells_it(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(CLUSTER.read_text().replace('"topk(density=0.01)"', '"topk"'))
    plans = [cortado("plan", JOB, cluster, "--quality", "aggressive") for cluster in (CLUSTER, path)]
    steps = [plan.stdout.partition(",")[0] for plan in plans]
    assert "step" in steps[0] and steps[0] == steps[1]


def test_quality_allows_what_auto_may_use(tmp_path):
    cluster = json.loads(Path(CLUSTER).read_text())
    curves = [times for times in cluster["codecs"] if times["codec"] == "topk(density=0.01)"]
    cluster["codecs"] += [{**times, "codec": "cast(bf16)"} for times in curves]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster))
    done = cortado("plan", JOB, path, "--quality", "safe", "-o", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    buckets = json.loads((tmp_path / "plan.json").read_text())["buckets"]
    assert {bucket.get("codec", "none") for bucket in buckets} <= {"none", "cast(bf16)", "cast(fp16)"}
    cluster["codecs"] = curves
    path.write_text(json.dumps(cluster))
    refused = cortado("plan", JOB, path, "--quality", "safe")
    assert refused.returncode == 2 and "no times of a codec that auto may use in plans" in refused.stderr
    assert cortado("plan", JOB, CLUSTER, "--quality", "best").returncode != 0
    assert cortado("plan", JOB, CLUSTER, "--quality", "safe", "--allow", "topk(0.01)").returncode != 0


def test_plans_of_balanced_are_those_of_auto(tmp_path):
    plan = tmp_path / "plan.json"
    path = tmp_path / "cluster.json"
    path.write_text(CLUSTER.read_text().replace('"topk(density=0.01)"', '"quant(bits=4, round=dead_zone)"'))
    assert cortado("plan", JOB, path, "--quality", "balanced", "-o", plan).returncode == 0
    codecs = {bucket.get("codec", "none") for bucket in json.loads(plan.read_text())["buckets"]}
    assert codecs <= {"none", "cast(fp16)"}
    allowed = ["--allow", "quant(bits=4, round=dead_zone)"]
    assert cortado("plan", JOB, path, *allowed, "-o", plan).returncode == 0
    assert "quant" in plan.read_text(), "it pays there, so that --quality had to leave it out"


def test_a_search_may_spend_more(tmp_path):
    bert = ("plan", DATA / "jobs" / "bert_base.json", CLUSTER, "--allow", "topk(0.01)", "-o", tmp_path / "plan.json")
    steps_ns, texts = [], []
    for steps in (1000, 800_000):
        texts.append(cortado(*bert, "--search-steps", steps).stdout)
        steps_ns.append(json.loads((tmp_path / "plan.json").read_text())["predicted_step_ns"])
    assert "spent the 1000 steps it may, with more search_steps" in texts[0]
    assert float(re.search(r"gap ([0-9.]+) %", texts[1]).group(1)) < 3
    assert steps_ns[1] < 0.9 * steps_ns[0]


def test_strategies_are_no_better(tmp_path):
    best = json.loads(made(tmp_path)[0].read_text())["predicted_step_ns"]
    for strategy in ("dense", "bf16", "compress_all", "myopic", "espresso", "gpu_only", "cpu_only", "hitopk_like"):
        path, _ = made(tmp_path, "--strategy", strategy)
        assert json.loads(path.read_text())["predicted_step_ns"] >= best, strategy
    assert cortado("plan", JOB, CLUSTER, "--strategy", "best").returncode != 0


def test_notes_give_the_reason_of_this_plan(tmp_path):
    """Not that of another one: a comparator has not chosen, and its gap is its own."""
    _, dense = made(tmp_path, "--strategy", "dense", "--explain")
    assert "nothing is encoded" not in dense and "the bound lets" not in dense
    assert re.search(r"^  cortado +[0-9.]+ ms +0\.", dense, re.MULTILINE)
    _, none = made(tmp_path, "--allow", "none")
    assert "nothing is encoded: the cluster file has no times of an allowed codec" in none
    _, limited = made(tmp_path, "--max-passes", "0")
    assert "no allowed codec makes the step shorter within the limits" in limited
    assert "without the limits; gap" in limited
    _, cast = made(tmp_path, "--strategy", "bf16", "--explain")
    assert "the cluster file has no times of cast(bf16): cast(fp16) stands for it" in cast
    assert re.search(r"^  bf16 \(as cast\(fp16\)\) +[0-9.]+ ms +1\.000x", cast, re.MULTILINE)
    path, _ = made(tmp_path, "--strategy", "bf16", "--allow", "none")  # which is no codec that the cast is
    plan = json.loads(path.read_text())
    assert 0 < plan["lower_bound_ns"] <= plan["predicted_step_ns"]
    bounds = re.findall(r"lower bound +([0-9.]+) ms", cast)
    assert len(set(bounds)) == 1 and len(bounds) > 1, cast


def test_explain_prints_the_factor_over_the_best_that_compresses(tmp_path):
    _, text = made(tmp_path, "--explain")
    factor, name = re.search(
        r"^([0-9.]+)x as fast as the best of them that compresses, (.+)$", text, re.MULTILINE
    ).groups()
    row = re.search(rf"^  {re.escape(name)} +[0-9.]+ ms +([0-9.]+)x$", text, re.MULTILINE)
    assert row[1] == factor and float(factor) >= 1


def test_simulate_says_that_a_plan_is_of_another_cluster(tmp_path):
    path, _ = made(tmp_path)
    assert cortado("simulate", path, JOB, CLUSTER).stderr == ""
    other = tmp_path / "cluster.json"
    content = json.loads(CLUSTER.read_text())
    other.write_text(json.dumps({**content, "name": "elsewhere"}))
    done = cortado("simulate", path, JOB, other)
    assert (
        done.returncode == 0 and 'note: the plan was made for cluster "' in done.stderr and '"elsewhere"' in done.stderr
    )
    content["levels"][0]["ranks"] = 4
    other.write_text(json.dumps(content))
    done = cortado("simulate", path, JOB, other)
    assert (
        done.returncode == 2 and "$.levels[0].ranks: expected 4, as cluster" in done.stderr and "got 8" in done.stderr
    )


def test_explain_names_every_tensor_and_what_else_there_was(tmp_path):
    _, text = made(tmp_path, "--explain")
    for tensor in json.loads(JOB.read_text())["tensors"]:
        assert f"  {tensor['name']}\n" in text
    for word in ("espresso", "free compression", "runner-up", "rejected", "gained over dense"):
        assert word in text


def test_simulate_shows_the_predicted_time(tmp_path):
    path, _ = made(tmp_path)
    trace = tmp_path / "trace.json"
    done = cortado("simulate", path, JOB, CLUSTER, "--trace", trace)
    assert done.returncode == 0, done.stderr
    step_ms = json.loads(path.read_text())["predicted_step_ns"] / 1e6
    assert done.stdout.startswith(f"step {step_ms:.3f} ms")
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(step_ms * 1e3, abs=1e-3)
    assert {"backward", "compute"} & {event["name"] for event in events}


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (r'"ready_ns": 35223000', '"ready_ns": NaN', "$.tensors[1].ready_ns: expected a finite number, got NaN"),
        (r'"ready_ns": 35223000', '"ready_ns": -1', "$.tensors[1].ready_ns: expected from 0"),
        (r"cortado.job/1", "cortado.job/7", '$.format: expected "cortado.job/1"'),
        (r'"rnns.1.weight_hh_l0"', '"decoder.bias"', "$.tensors[2].name: expected each tensor once"),
    ],
)
def test_bad_jobs_are_refused_with_their_place(tmp_path, pattern, replacement, message):
    bad = tmp_path / "job.json"
    bad.write_text(re.sub(pattern, replacement, JOB.read_text(), count=1))
    done = cortado("plan", bad, CLUSTER)
    assert done.returncode in (2, 3)
    assert message in done.stderr
    assert str(bad) in done.stderr


def test_a_plan_for_another_model_is_refused(tmp_path):
    path, _ = made(tmp_path)
    done = cortado("simulate", path, DATA / "jobs" / "vgg16.json", CLUSTER)
    assert done.returncode == 2
    assert '$.buckets[0].tensors[0]: expected a tensor of job "vgg16"' in done.stderr
    done = cortado("simulate", path, JOB, JOB)
    assert '$.format: expected "cortado.cluster/1"' in done.stderr


def test_missing_files(tmp_path):
    assert cortado("plan", tmp_path / "none.json", CLUSTER).returncode == 1
    assert cortado("plan", JOB, CLUSTER, "-o", tmp_path / "no" / "folder.json").returncode == 1


# ---- where it is written ----


def appended(path, *arguments):
    """What a shell does with `cortado ARGUMENTS >> path; echo later >> path`."""
    path.write_text("before\n")
    with path.open("a") as out:
        done = subprocess.run(
            [PROGRAM, *map(str, arguments)], check=False, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        out.write("later\n")
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("later\n"), text[:200]
    return text.removeprefix("before\n").removesuffix("later\n"), done.stderr


def test_outputs_go_through_stdout(tmp_path):
    """The file that stdout was led to was replaced, and the summary stood in it."""
    plan, summary = appended(tmp_path / "out", "plan", JOB, CLUSTER, "-o", "/dev/stdout")
    assert json.loads(plan)["format"] == "cortado.plan/1"
    assert "lower bound" in summary
    page, summary = appended(tmp_path / "out", "plan", JOB, CLUSTER, "--html", "/proc/self/fd/1")
    assert page.startswith("<!DOCTYPE html>") and "lower bound" in summary
    path, _ = made(tmp_path)
    trace, drawing = appended(tmp_path / "out", "simulate", path, JOB, CLUSTER, "--trace", "/dev/fd/1")
    assert json.loads(trace)["traceEvents"] and "one column" in drawing
    assert len(list(tmp_path.iterdir())) == 2  # no parts
    piped = cortado("plan", JOB, CLUSTER, "-o", "/dev/stdout")
    assert json.loads(piped.stdout)["format"] == "cortado.plan/1" and "lower bound" in piped.stderr
    both = cortado("plan", "/dev/stdin", CLUSTER, "-o", "/dev/stdout", input=Path(JOB).read_text())
    assert json.loads(both.stdout)["buckets"] == json.loads(piped.stdout)["buckets"]  # two pipes are not one file


def test_no_output_is_written_over_an_input_or_another_output(tmp_path):
    job, cluster, trace, plan = (tmp_path / name for name in ("job", "cluster", "trace", "plan"))
    shutil.copy(JOB, job)
    shutil.copy(CLUSTER, cluster)
    made(tmp_path)[0].rename(plan)
    trace.write_text(TRACE)
    (tmp_path / "link").symlink_to("cluster")
    before = {path: path.read_bytes() for path in (job, cluster, trace, plan)}
    new = tmp_path / "new"
    for arguments, names in (
        (("plan", job, cluster, "-o", cluster), ("-o", "CLUSTER")),
        (("plan", job, cluster, "-o", tmp_path / "link"), ("-o", "CLUSTER")),
        (("plan", job, cluster, "--html", tmp_path / "." / "job"), ("--html", "JOB")),
        (("plan", job, cluster, "--measured", trace, "-o", trace), ("-o", "--measured")),
        (("plan", job, cluster, "-o", new, "--html", f"{tmp_path}/./new"), ("--html", "-o")),
        (("simulate", plan, job, cluster, "--trace", plan), ("--trace", "PLAN")),
        (("trace", trace, "--chrome", trace), ("--chrome", "FILE")),
    ):
        done = cortado(*arguments)
        assert done.returncode == 2, arguments
        assert re.search(rf"cortado: {names[0]} \S+: .* is the file of {names[1]} /", done.stderr), done.stderr
        assert {path: path.read_bytes() for path in before} == before
        assert not new.exists()
    assert cortado("plan", job, cluster, "-o", "/dev/null", "--html", "/dev/null").returncode == 0


# ---- what was measured, and names of files ----

TRACE = json.dumps(
    {
        "format": "cortado.trace/1",
        "spec": "sign",
        "rank": 0,
        "world_size": 2,
        "dropped": 0,
        "tensors": ["decoder.bias", "of.another.model\x1b[2J"],
        "stages": ["encode"],
        "events": [[0, 0, 0, 0, 1000, 2_001_000, 64]],
    }
)


def test_a_measured_trace_is_of_the_job(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text(TRACE)
    done = cortado("plan", JOB, CLUSTER, "--measured", trace)
    assert done.returncode == 0, done.stderr
    assert 'lacks 1 of the 2 tensors of the trace, such as "of.another.model?[2J"' in done.stderr
    trace.write_text(json.dumps({**json.loads(TRACE), "events": []}))
    done = cortado("plan", JOB, CLUSTER, "--measured", trace, "-o", tmp_path / "plan.json")
    assert done.returncode == 3 and f"{trace}: " in done.stderr and "no events" in done.stderr
    assert not (tmp_path / "plan.json").exists()


def test_names_of_files_do_nothing_to_a_terminal(tmp_path):
    escape = "\x1b]0;title\x07"
    job, cluster, trace = (tmp_path / name for name in ("job.json", "cluster.json", "trace.json"))
    content = json.loads(JOB.read_text())
    content["name"] += escape
    content["tensors"][0]["name"] += escape
    job.write_text(json.dumps(content))
    content = json.loads(CLUSTER.read_text())
    content["name"] += escape
    content["levels"][0]["name"] += "\x1b"
    cluster.write_text(json.dumps(content))
    content = json.loads(TRACE)
    content["spec"] += escape
    trace.write_text(json.dumps(content))
    plan = tmp_path / "plan.json"
    for arguments in (
        ("plan", job, cluster, "-o", plan, "--explain", "--measured", trace),
        ("simulate", plan, job, cluster),
        ("simulate", plan, JOB, cluster),  # an error
        ("trace", trace),
        ("trace", trace, "--summary", "tensor"),
    ):
        done = cortado(*arguments)
        assert not set(done.stdout + done.stderr) & {"\x1b", "\x07"}, done.stdout + done.stderr
        assert "?" in done.stdout + done.stderr


# ---- the report ----


def report(tmp_path, *arguments):
    path = tmp_path / "report.html"
    done = cortado("plan", JOB, CLUSTER, "--html", path, *arguments)
    assert done.returncode == 0, done.stderr
    return path


def data_of(path):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', path.read_text(), re.DOTALL).group(1))


def test_the_report_needs_nothing_from_elsewhere(tmp_path):
    text = report(tmp_path).read_text()
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "DATA" not in text.replace("JSON", "")
    data = data_of(tmp_path / "report.html")
    assert [timeline["title"] for timeline in data["timelines"]] == ["Baseline: dense", "This plan"]
    assert len(data["tensors"]) == 10
    assert data["timelines"][1]["step_ns"] == data["step_ns"]


def test_the_report_shows_a_measured_trace(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text(
        json.dumps(
            {
                "format": "cortado.trace/1",
                "spec": "sign",
                "rank": 0,
                "world_size": 2,
                "dropped": 0,
                "tensors": ["decoder.bias"],
                "stages": ["encode", "communicate", "wait", "decode", "orthogonalise"],
                "events": [[0, 0, 0, 0, 1000, 2_001_000, 64], [1, 0, 0, -1, 2_001_000, 9_001_000, 32]],
            }
        )
    )
    done = cortado("plan", JOB, CLUSTER, "--html", tmp_path / "report.html", "--measured", trace)
    assert done.returncode == 0, done.stderr
    data = data_of(tmp_path / "report.html")
    assert data["timelines"][2]["step_ns"] == 9_000_000
    # The like of the trace in the plan: without the computation before the first encode and after the last decode.
    events = [event for event in data["timelines"][1]["events"] if event[3] >= 0]
    span_ns = max(event[2] for event in events) - min(event[1] for event in events)
    assert data["compared"][0] == ["exchange", span_ns, 9_000_000]
    assert span_ns < data["step_ns"]
    assert f"exchange: predicted {span_ns / 1e6:.3f} ms, measured 9.000 ms" in done.stdout


# ---- the report in a browser ----

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install chromium to draw the report")
DESKTOP, PHONE = 1280, 390

# Errors of the page's own scripts, from its first line on.
WATCH = """<head><script>
  const problems = [];
  addEventListener("error", (event) => problems.push(event.message));
</script>"""

# What a reader would see and do, told to the page around this one.
LOOK = """<script>
  const count = (what) => document.querySelectorAll(what).length;
  const drawn = [...document.querySelectorAll("svg")].map((svg) => svg.querySelectorAll("rect.event").length);
  const rows = {tensors: count("#tensors tbody tr"), totals: count("#totals tbody tr")};
  document.querySelectorAll("#tensors th button")[1].click();
  const shown = [...document.querySelectorAll("#tensors tbody tr td:nth-child(2)")];
  const elems = shown.map((cell) => Number(cell.textContent.replaceAll(",", "")));
  document.querySelector("rect.event").dispatchEvent(new PointerEvent("pointermove", {clientX: 5, clientY: 5}));
  const bucket = document.querySelector("#tensors td button");
  bucket.click();
  const ways = [...document.querySelectorAll("tr.why li")].map((item) => item.textContent);
  const result = {
    problems, drawn, rows, ways,
    bucket: Number(bucket.textContent),
    sorted: elems.every((value, i) => i === 0 || elems[i - 1] >= value),
    tip: document.getElementById("tip").textContent,
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    cut: [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth).length,
  };
  bucket.click();
  parent.document.body.dataset.result = JSON.stringify({...result, left: count("tr.why")});
</script></body>"""


def chromium(tmp_path, page, *arguments):
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, *arguments, page.as_uri()], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_chromium
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_report_draws_itself_in_a_browser(tmp_path, width):
    page = report(tmp_path).read_text().replace("<head>", WATCH, 1).replace("</body>", LOOK)
    # In a frame, as windows are never as narrow as a phone.
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{html.escape(page)}"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{frame}</body>')
    dom = chromium(tmp_path, outer, "--window-size=1400,1000", "--dump-dom")
    found = re.search(r'data-result="([^"]*)"', dom)
    assert found, dom[-2000:]
    result = json.loads(html.unescape(found.group(1)))
    assert result["problems"] == []
    assert result["width"] == width
    baseline, plan = result["drawn"]
    assert baseline > 5
    assert plan > 20
    assert result["rows"] == {"tensors": 10, "totals": 13}
    assert result["sorted"]
    assert result["ways"] == [": ".join(way) for way in data_of(tmp_path / "report.html")["ways"][result["bucket"]]]
    assert len(result["ways"]) > 1
    assert result["left"] == 0
    assert "ms long" in result["tip"]
    assert result["overflow"] <= 0
    assert result["cut"] == 0  # nothing that one has to scroll sideways for


@needs_chromium
def test_the_report_prints(tmp_path):
    pdf = tmp_path / "report.pdf"
    chromium(tmp_path, report(tmp_path), f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 4
