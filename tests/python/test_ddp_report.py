# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What cortado.report() and the trace say, against independent counts."""

import contextlib
import io
import json

import cortado
import pytest
import torch
from nets import COMPOSED, TOPK, loss_of, make_batch, make_net, train

KEYS = {
    "auto",
    "bytes_per_step",
    "communicator",
    "dense_bytes_per_step",
    "fallbacks",
    "hook_ns",
    "device_wait_ns",
    "runs_on",
    "last_non_finite",
    "memory_bytes",
    "messages_per_step",
    "passed_steps",
    "hook_stays",
    "non_finite_steps",
    "ratio",
    "relative_error",
    "spec",
    "steps",
    "tensors",
    "time_by_stage_ns",
    "world_size",
}
STAGES = {"encode", "communicate", "wait", "decode", "orthogonalise"}


def train_and_report(me, plan, steps):
    model = me.attach(make_net(), plan)
    train(me, model, steps)
    report = cortado.report(model)
    layout = model.cortado.state_dict()["layout"]
    return report.to_dict(), str(report), layout


def count_bytes(shapes, matrix_rank, sides, flag_elems, messages, elem_bytes):
    """Bytes a rank hands over in one step; `sides` says 0 for a row factor, 1 for a column factor, by name."""
    elems = messages * flag_elems
    for name, shape in shapes.items():
        if name in sides:
            elems += matrix_rank * shape[sides[name]]
        else:
            elems += shape.numel()
    return elems * elem_bytes


SHAPES = {name: parameter.shape for name, parameter in make_net().named_parameters()}
DENSE_BYTES = 4 * sum(shape.numel() for shape in SHAPES.values())


@pytest.mark.parametrize("wire, elem_bytes", [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("side", [0, 1])
def test_bytes_of_the_published_algorithm_are_one_side_of_every_matrix(pools, wire, elem_bytes, side):
    plan = f"acp(rank=2, phase=global, start_step=0, wire={wire})"
    report, _, layout = pools(2).run(train_and_report, plan=plan, steps=side + 1)[0]
    sides = {name: side for name in SHAPES if len(SHAPES[name]) == 2}
    messages = len(layout[side])
    assert report["messages_per_step"] == messages
    assert report["bytes_per_step"] == count_bytes(SHAPES, 2, sides, 2, messages, elem_bytes)
    assert report["ratio"] == pytest.approx(DENSE_BYTES / report["bytes_per_step"])


@pytest.mark.parametrize("plan, elem_bytes", [("none", 4), ("cast(bf16)", 2), ("acp(rank=2)", 4)])
def test_bytes_of_a_dense_step_are_the_model(pools, plan, elem_bytes):
    report, _, _ = pools(2).run(train_and_report, plan=plan, steps=1)[0]
    flags = 0 if plan == "none" else 2 * report["messages_per_step"]
    assert report["bytes_per_step"] == (DENSE_BYTES // 4 + flags) * elem_bytes
    assert report["dense_bytes_per_step"] == DENSE_BYTES


@pytest.mark.parametrize(
    "plan", ["acp(rank=2)", "power(rank=2)", "acp(rank=2, wire=bf16)", "cast(fp16)", "none", TOPK, COMPOSED]
)
def test_report_has_every_key_and_sane_values(pools, plan):
    for report, text, _ in pools(3).run(train_and_report, plan=plan, steps=5):
        assert report.keys() == KEYS
        assert report["time_by_stage_ns"].keys() == STAGES
        assert (report["steps"], report["world_size"], report["spec"]) == (5, 3, plan)
        assert report["communicator"] == "callback(gloo)"
        assert report["ratio"] == pytest.approx(DENSE_BYTES / report["bytes_per_step"])
        assert report["hook_ns"] > report["time_by_stage_ns"]["encode"] > 0
        lowest, highest = {"none": (0, 0), "cast(fp16)": (1e-6, 1e-3)}.get(plan, (0.05, 1))
        assert lowest <= report["relative_error"] <= highest
        assert sum(t["elems"] for t in report["tensors"]) * 4 == DENSE_BYTES
        assert f"ratio           {report['ratio']:.1f} at relative L2 error" in text and plan in text


def test_payload_by_tensor_adds_up(pools):
    report, _, _ = pools(3).run(train_and_report, plan="acp(rank=2, wire=bf16)", steps=5)[0]
    flags = report["messages_per_step"] * 3 * 2
    assert sum(t["payload_bytes"] for t in report["tensors"]) + flags == report["bytes_per_step"]


def test_every_fallback_is_named_with_its_reason(pools):
    plan = "acp(rank=4, dense=[0.w*])"
    report, text, _ = pools(2).run(train_and_report, plan=plan, steps=4)[0]
    reasons = {f["tensor"]: f["reason"] for f in report["fallbacks"]}
    vectors = {name: "1-D" for name in SHAPES if len(SHAPES[name]) == 1}
    assert reasons.pop("") == "warm-up (start_step): dense"
    assert reasons == {**vectors, "0.weight": "dense=", "4.weight": "min_compression_rate"}
    assert "1-D" in text and "warm-up" in text
    assert [f["steps"] for f in report["fallbacks"] if not f["tensor"]] == [2]


def test_one_rank_has_nothing_to_exchange_and_says_so(pools):
    report, _, _ = pools(1).run(train_and_report, plan="acp", steps=3)[0]
    assert (report["bytes_per_step"], report["messages_per_step"], report["ratio"]) == (0, 0, 1)
    assert any("world size 1" in f["reason"] for f in report["fallbacks"])


def report_of_nothing(me):
    model = me.attach(make_net(), None)
    with pytest.raises(cortado.CortadoError, match="has not been attached"):
        cortado.report(model)
    return cortado.report(me.attach(make_net(), "acp").cortado).to_dict()["steps"]


def test_report_needs_an_attached_model_or_a_state(pools):
    assert pools(2).run(report_of_nothing) == [0, 0]


def attach_aloud(me):
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        cortado.attach(me.wrap(make_net()), "acp(rank=2)")
    return printed.getvalue()


def test_rank_0_prints_what_is_compressed_and_the_memory_bill_before_the_first_step(pools):
    first, other = pools(2).run(attach_aloud)
    assert other == ""
    what, memory = first.splitlines()
    assert what.startswith("cortado: acp(rank=2) over callback(gloo), 2 ranks; 3 of 8 tensors compressed")
    assert all(word in memory for word in ("residual", "factors", "messages", "MiB"))


def train_one_matrix(me, plan, view=True):
    """What rank 0 prints when the model is attached, and the memory in the report after some steps."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(24, 256, bias=False), torch.nn.Linear(256, 512, bias=False)]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        model = me.wrap(torch.nn.Sequential(*layers), gradient_as_bucket_view=view)
        cortado.attach(model, plan)
    for step in range(4):
        loss_of(model, make_batch(me.rank, step)).backward()
    return printed.getvalue(), cortado.report(model).to_dict()["memory_bytes"]


@pytest.mark.parametrize("rollback, residuals", [("rounded", 1), ("exact", 2)])
def test_the_memory_bill_is_what_is_allocated(pools, rollback, residuals):
    plan = f"acp(rank=16, rollback={rollback}, dense=[0.weight])"
    text, memory = pools(2).run(train_one_matrix, plan=plan)[0]
    assert memory["residual"] == residuals * 4 * 512 * 256
    assert memory["factors"] == pytest.approx(5 * 4 * 16 * (512 + 256), rel=0.1)  # docs/training.md
    for kind in ("residual", "factors"):
        assert f"{kind} {memory[kind] / 2**20:.2f} MiB" in text


# Gradients that DDP keeps beside its buckets undo a step; without them what is decoded early needs memory for that.
def test_gradients_that_ddp_keeps_save_memory(pools):
    plan = "quant(bits=4, min_elems=0, start_step=0, bucket_cap_mib=0)"
    messages = [pools(2).run(train_one_matrix, plan=plan, view=view)[0][1]["messages"] for view in (True, False)]
    assert messages[0] - messages[1] == 4 * 512 * 256  # of all messages but the last, which is that of the first layer


def trace(me, folder):
    model = me.attach(make_net(), "acp(rank=2)", bucket_cap_mb=0.002)
    train(me, model, 3)
    model.cortado.start_trace()
    train(me, model, range(3, 5))
    path = f"{folder}/rank{me.rank}.json"
    model.cortado.write_trace(path)
    with open(path, encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def test_chrome_trace_holds_every_stage_of_the_steps_traced(pools, tmp_path):
    for rank, events in enumerate(pools(2).run(trace, folder=str(tmp_path))):
        rows = {e["args"]["name"].split()[0] for e in events if e["name"] == "thread_name"}
        assert rows == STAGES  # with a row more where events of a stage overlap
        spans = [e for e in events if e["ph"] == "X"]
        stages = {e["name"].split()[0] for e in spans}
        assert STAGES - {"wait"} <= stages <= STAGES  # nobody waits when all messages end in time
        assert all(e["dur"] >= 0 and e["pid"] == rank for e in spans)
        assert {e["args"]["step"] for e in spans} == {3, 4}
        assert {f"encode {name}" for name in SHAPES} <= {e["name"] for e in spans}


def trace_to_nowhere(me):
    model = me.attach(make_net(), "acp(rank=2)")
    with pytest.raises(ValueError, match="no trace was started"):
        model.cortado.write_trace("unused.json")
    model.cortado.start_trace()
    with pytest.raises(cortado.CortadoError, match="/no/such/folder"):
        model.cortado.write_trace("/no/such/folder/trace.json")


def test_trace_errors_are_clear(pools):
    pools(1).run(trace_to_nowhere)
