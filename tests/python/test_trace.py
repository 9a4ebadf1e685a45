# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Traces: recorded in training, kept in files, shown by Python and by `cortado trace`."""

import json
import subprocess
import sys
from pathlib import Path

import cortado
import pytest
from nets import make_net, train
from test_reducer import reduced, train_reduced

PROGRAM = Path(sys.executable).parent / "cortado"
SAMPLE = Path(__file__).parents[1] / "fuzz/corpus/trace_fuzzer/small.json"


def record(me, way):
    if way == "attach":
        model = me.attach(make_net(), "acp(rank=2)")
        train(me, model, 3)
        model.cortado.start_trace()
        train(me, model, range(3, 5))
    else:
        model = reduced(me, make_net(), "acp(rank=2)")
        train_reduced(me, model, 3)
        model.cortado.start_trace()
        train_reduced(me, model, range(3, 5))
    trace = model.cortado.trace()
    return trace.to_dict(), str(trace), trace.summary(), trace.summary("tensor")


@pytest.mark.parametrize("way", ["attach", "Reducer"])
def test_a_trace_tells_every_stage_of_every_tensor(pools, way):
    names = [name for name, _ in make_net().named_parameters()]
    for rank, (trace, drawing, by_stage, by_tensor) in enumerate(pools(2).run(record, way=way)):
        assert (trace["format"], trace["spec"]) == ("cortado.trace/1", "acp(rank=2)")
        assert (trace["rank"], trace["world_size"], trace["dropped"]) == (rank, 2, 0)
        assert trace["tensors"] == names
        encoded = [event for event in trace["events"] if trace["stages"][event[0]] == "encode"]
        assert sorted((event[1], event[3]) for event in encoded) == [(s, t) for s in (3, 4) for t in range(len(names))]
        assert "step 3: " in drawing and "step 4: " in drawing and max(map(len, drawing.splitlines())) <= 104
        assert [line.split()[0] for line in by_stage.splitlines()[4:]][:2] == ["encode", "communicate"]
        assert sorted(line.split()[-1] for line in by_tensor.splitlines()[4:]) == sorted(names)


def test_a_file_gives_the_same_trace_back(tmp_path):
    trace = cortado.load_trace(SAMPLE)
    path = tmp_path / "again.json"
    trace.save(path)
    again = cortado.load_trace(path)
    assert again.to_dict() == trace.to_dict() == json.loads(SAMPLE.read_text())
    assert str(again) == str(trace)


def show(*arguments):
    return subprocess.run([PROGRAM, "trace", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_program_shows_what_python_shows(tmp_path):
    trace = cortado.load_trace(SAMPLE)
    assert show(SAMPLE).stdout == str(trace)
    for by in ("stage", "tensor"):
        assert show(SAMPLE, "--summary", by).stdout == trace.summary(by)
    done = show(SAMPLE, "--chrome", tmp_path / "chrome.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    trace.save_chrome(tmp_path / "expected.json")
    assert (tmp_path / "chrome.json").read_text() == (tmp_path / "expected.json").read_text()
    assert len(json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]) == 15


@pytest.mark.parametrize(
    "content, exit_code, words",
    [
        (None, 1, ["No such file"]),
        ("{", 3, ["cut short"]),
        ('{"format": "cortado.trace/2"}', 3, ['$.format: expected "cortado.trace/1", got "cortado.trace/2"']),
        ('{"format": "cortado.plan/1"}', 3, ["cortado.trace/1", "cortado.plan/1"]),
        (
            SAMPLE.read_text().replace("[1,3,0,-1,210,400,32]", "[1,3,0,-1,210,40]"),
            3,
            ["events[1]", "[1,3,0,-1,210,40]"],
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_place(tmp_path, content, exit_code, words):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    done = show(path)
    assert done.returncode == exit_code
    with pytest.raises(cortado.CortadoError) as raised:
        cortado.load_trace(path)
    for text in (done.stderr, str(raised.value)):
        assert all(word in text for word in (*words, "trace.json")), text


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="'message'"):
        cortado.load_trace(SAMPLE).summary("message")
    with pytest.raises(cortado.CortadoError, match="/no/such/folder"):
        cortado.load_trace(SAMPLE).save("/no/such/folder/trace.json")
    assert show(SAMPLE, "--summary", "message").returncode == 2
    done = show(SAMPLE, "--chrome", "/no/such/folder/chrome.json")
    assert done.returncode == 1 and "/no/such/folder" in done.stderr
