# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""cortado.calibrate and cortado.profile: what they measure is a job and a cluster that the planner takes."""

import copy
import faulthandler
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cortado
import pytest
import torch
import torch.utils.checkpoint
from cortado import calibration
from nets import loss_of, make_batch, make_net, make_optimizer, train
from ranks import Program, RanksFailed, free_port
from test_device_engine import EMULATED, needs_emulated
from torch.nn.functional import cross_entropy

CODECS = ["cast(bf16)", "topk(density=0.1)"]
IN_FILES = ["cast(bf16)", "topk(density=0.1, select=exact, block=tensor, index=auto, values=fp32)"]  # one spelling


def calibrated(me, path=None, plan=None):
    calls = []
    cluster = cortado.calibrate(codecs=CODECS, budget_s=0.5, progress=lambda done, following: calls.append(done))
    if path is not None and me.rank == 0:
        cluster.save(path)
    me.gather(None)  # the file is there
    if plan is not None:
        model = me.attach(make_net(), plan)
        while not model.cortado.decision()["decided"]:  # settings that are close are tried longer
            train(me, model, 20)
        return model.cortado.decision()
    return cluster.to_json(), calls


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(tmp_path):
    path = tmp_path / "nowhere" / "cluster.json"
    code, _, said = calibrate_to(path)
    assert code == 2 and f'no file can be written at "{path}"' in said
    damaged = tmp_path / "cluster.json"
    damaged.write_text('{"format": "cortado.cluster/1", "levels": [')
    code, _, said = calibrate_to(damaged)
    assert code == 2 and "--again measures anew" in said


def calibrate_to(path, *arguments, ranks=1):
    """The exit code of `python -m cortado.calibrate` on all ranks, and what rank 0 wrote to stdout and stderr."""
    whole = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    whole["GLOO_SOCKET_IFNAME"] = "lo"
    programs = [
        Program(run_calibrate, "-o", str(path), *arguments, environment={**whole, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        said = [program.communicate() for program in programs]
    finally:
        for program in programs:
            program.kill()
    codes = [program.returncode for program in programs]
    assert len(set(codes)) == 1, (codes, said)
    return codes[0], *said[0]


def run_calibrate(*arguments):
    faulthandler.dump_traceback_later(90, exit=True)
    sys.exit(calibration.main(arguments))


def calibrated_on(me, library=None, device="cuda", computes=lambda: None):
    """On an emulated device, if its library is given; the rank's cluster as a dict."""
    told = {"device_library": library, "device": 0, "computation": computes}
    find = calibration._on_device if library is None else lambda _: told
    with mock.patch.object(calibration, "_on_device", find):
        return cortado.calibrate(codecs=CODECS, budget_s=0.5, device=device).to_dict()


def raises():
    raise RuntimeError("no such kernel")


@needs_emulated
def test_a_device_is_measured_beside_the_cpu(pools):
    of_ranks = pools(2).run(calibrated_on, library=EMULATED)
    assert of_ranks[0] == of_ranks[1]
    measured = [(entry["codec"], entry["device"], entry["direction"]) for entry in of_ranks[0]["codecs"]]
    directions = ("encode", "decode")
    assert measured == [(codec, device, d) for device in ("cpu", "gpu") for codec in IN_FILES for d in directions]
    for name in ("host_to_device", "device_to_host"):
        assert len(of_ranks[0]["copies"][name]["bytes"]) >= 2
    assert of_ranks[0]["contention"]["gpu_codec"] in IN_FILES


@needs_emulated
def test_an_error_of_the_computation_on_a_device_is_told(pools):
    with pytest.raises(RanksFailed) as raised:
        pools(2).run(calibrated_on, library=EMULATED, computes=raises)
    assert "computation on the device: no such kernel" in str(raised.value)


def test_a_device_that_cannot_be_measured_is_refused_on_all_ranks(pools):
    with pytest.raises(RanksFailed) as raised:
        pools(2).run(calibrated_on, device="cpu")
    assert str(raised.value).count('device: expected "cuda" or a device of it, got "cpu"') >= 2
    if not torch.cuda.is_available():
        with pytest.raises(RanksFailed) as raised:
            pools(2).run(calibrated_on)
        assert str(raised.value).count("nothing can be measured on cuda: ") >= 2


def test_all_ranks_get_the_same_cluster(pools):
    answers = pools(3).run(calibrated)
    assert len({text for text, _ in answers}) == 1
    content = json.loads(answers[0][0])
    assert content["format"] == "cortado.cluster/1"
    assert [level["ranks"] for level in content["levels"]] == [3]
    assert set(content["levels"][0]["collectives"]) == {
        *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast", "gather")
    }
    assert {entry["codec"] for entry in content["codecs"]} == set(IN_FILES)
    assert content["host"]["communicator"] == f"callback(gloo), torch {torch.__version__}"
    assert content["host"]["fingerprint"].startswith("3 ranks on ")
    all_reduce = content["levels"][0]["collectives"]["all_reduce"]
    assert len(all_reduce["spread_ns"]) == len(all_reduce["time_ns"])
    assert answers[0][1][-1] == 1
    assert sorted(answers[0][1]) == answers[0][1]


def calibrate_wrong(me):
    errors = []
    for arguments in (
        {"known": "cluster.json" if me.rank == 0 else None},
        {"codecs": ["sign"] if me.rank == 0 else ["cast(bf16)"]},
        {"codecs": ["sign", "gzip"] if me.rank == 0 else ["sign"]},
        {"budget_s": "long" if me.rank == 0 else 1},
    ):
        start = time.monotonic()
        with pytest.raises(Exception) as raised:
            cortado.calibrate(**arguments)
        assert time.monotonic() - start < 20
        errors.append(str(raised.value))
    return errors


def test_wrong_arguments_of_one_rank_are_an_error_of_all(pools):
    for known, codecs, unknown, budget in pools(2).run(calibrate_wrong):
        assert "expected a Cluster, such as Cluster.load(path), got str" in known
        assert "the arguments of calibrate differ" in codecs and "cast(bf16)" in codecs
        assert 'unknown codec "gzip"' in unknown
        assert "long" in budget


def test_auto_takes_the_file(pools, tmp_path):
    path = str(tmp_path / "cluster.json")
    decisions = pools(2).run(calibrated, path=path, plan=f"auto(cluster={path})")
    assert decisions[0]["decided"]
    assert decisions[0]["candidates"][0]["predicted_ns"] > 0


def attach_with(me, path):
    me.attach(make_net(), f"auto(cluster={path})")


def test_a_file_from_elsewhere_is_refused_on_all_ranks(pools, tmp_path):
    path = tmp_path / "cluster.json"
    pools(2).run(calibrated, path=str(path))
    content = json.loads(path.read_text())
    for field, other in (("communicator", "mpi, Open MPI v4.1.4"), ("fingerprint", "2 ranks on Z80, 1 cores")):
        changed = json.loads(json.dumps(content))
        changed["host"][field] = other
        path.write_text(json.dumps(changed))
        with pytest.raises(RanksFailed) as raised:
            pools(2).run(attach_with, path=str(path))
        text = str(raised.value)
        assert text.count(f'{path}: $.host.{field}: expected "') >= 2
        assert f'got "{other}": the file was measured elsewhere; measure here with torchrun' in text


def test_under_torchrun(tmp_path):
    path = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "cortado.calibrate", "-o", str(path), "--budget", "0.5", "--codec", "cast(bf16)"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    cluster = cortado.Cluster.load(path).to_dict()
    assert [(level["name"], level["ranks"]) for level in cluster["levels"]] == [("all", 2)]
    assert "2 ranks" in done.stdout


def test_the_backend_is_one_that_sends_host_memory(tmp_path, monkeypatch):
    """Also where there is a GPU: a group of NCCL alone is refused."""
    asked = []

    def note(backend, **_):
        asked.append(backend)
        raise ValueError("no further")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", note)
    with pytest.raises(SystemExit):
        calibration.main(["-o", str(tmp_path / "cluster.json")])
    assert asked == ["gloo"]


def test_what_the_file_has_is_not_measured_again(tmp_path):
    path = tmp_path / "cluster.json"

    def measure(*arguments):
        code, _, said = calibrate_to(path, "--budget", "0.5", "--codec", "cast(bf16)", *arguments, ranks=2)
        assert code == 0, said
        return said, json.loads(path.read_text())

    _, known = measure()
    said, content = measure("--codec", "none")
    assert f"{path}: keeps 9 of 11 curves, which are known; measures 2" in said
    # What there was no time for the first time is added.
    for level, before in zip(content["levels"], known["levels"], strict=True):
        assert {key: level[key] for key in before} == before
    assert content["codecs"][:2] == known["codecs"]
    assert [entry["codec"] for entry in content["codecs"][2:]] == ["none", "none"]
    said, content = measure("--again")
    assert "keeps" not in said
    assert content["levels"] != known["levels"]


def test_the_program_needs_mpi_or_says_so(tmp_path):
    program = Path(sys.executable).parent / "cortado"
    done = subprocess.run(
        [program, "calibrate", "-o", str(tmp_path / "c.json"), "--budget", "0.3", "--codec", "cast(bf16)"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 0:
        assert (tmp_path / "c.json").exists()
    else:
        assert "built without MPI" in done.stderr
        assert "torchrun" in done.stderr


# ---- jobs


def test_a_job_has_the_tensors_in_the_order_of_the_backward_pass():
    net = make_net()
    job = cortado.profile(net, make_batch(0, 0)[:1], loss=lambda out: cross_entropy(out, make_batch(0, 0)[1]), steps=2)
    content = job.to_dict()
    names = [tensor["name"] for tensor in content["tensors"]]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    assert names.index("4.weight") < names.index("0.weight")
    assert content["device"] == "cpu"
    assert content["forward_ns"] > 0
    ready = [tensor["ready_ns"] for tensor in content["tensors"]]
    assert ready == sorted(ready)
    assert ready[-1] <= content["backward_ns"]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_errors_are_those_of_the_real_gradients():
    net = make_net()
    job = cortado.profile(net, lambda: loss_of(net, make_batch(0, 0)), codecs=CODECS, steps=1)
    loss_of(net, make_batch(0, 0)).backward()
    weight = {tensor["name"]: tensor for tensor in job.to_dict()["tensors"]}["0.weight"]
    gradient = dict(net.named_parameters())["0.weight"].grad
    rounded = gradient.bfloat16().float()
    expected = ((rounded - gradient).norm() / gradient.norm()).item()
    assert weight["errors"]["cast(bf16)"] == pytest.approx(expected, rel=1e-3)
    assert 0.1 < weight["errors"]["topk(density=0.1)"] < 1
    assert weight["rms"] == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-5)


def test_nothing_is_lost_of_a_tensor_that_was_not_used():
    net = make_net()
    net.register_parameter("unused", torch.nn.Parameter(torch.ones(3, 3)))
    job = cortado.profile(net, lambda: loss_of(net, make_batch(0, 0)), codecs=CODECS, steps=1)
    tensors = {tensor["name"]: tensor for tensor in job.to_dict()["tensors"]}
    assert tensors["unused"]["rms"] == 0
    assert tensors["0.weight"]["rms"] > 0


def test_a_codec_that_can_not_hold_a_gradient_has_no_error():
    net = make_net()
    job = cortado.profile(net, lambda: loss_of(net, make_batch(0, 0)) * 1e8, codecs=CODECS + ["cast(fp16)"], steps=1)
    errors = [tensor["errors"] for tensor in job.to_dict()["tensors"]]
    assert not all("cast(fp16)" in of_tensor for of_tensor in errors)
    assert all(codec in of_tensor for codec in CODECS for of_tensor in errors)


def test_a_gradient_that_comes_in_parts_is_ready_with_the_last():
    shared = torch.nn.Linear(8, 8)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.05)
            return gradient

    def loss():
        values = torch.ones(4, 8, requires_grad=True)
        for _ in range(2):
            values = Slow.apply(torch.utils.checkpoint.checkpoint(shared, values, use_reentrant=True))
        return values.sum()

    job = cortado.profile(shared, loss, codecs=[], steps=2).to_dict()
    assert all(tensor["ready_ns"] > 90e6 for tensor in job["tensors"])


def test_a_step_may_make_backward_passes_of_its_own():
    net = torch.nn.ModuleList([make_net(), make_net()])

    def step():
        sum(loss_of(part, make_batch(0, 0)) for part in net).backward()
        return loss_of(net[1], make_batch(0, 1))

    job = cortado.profile(net, step, codecs=[], steps=2).to_dict()
    for tensor in job["tensors"]:
        assert (tensor["ready_ns"] == 0) == tensor["name"].startswith("0.")
        assert tensor["ready_ns"] <= job["backward_ns"]


def test_the_optimizer_is_timed_when_it_is_given():
    net = make_net()
    step = lambda: loss_of(net, make_batch(0, 0))  # noqa: E731
    assert cortado.profile(net, step, codecs=[], steps=1).to_dict()["optimizer_ns"] is None
    timed = cortado.profile(net, step, codecs=[], steps=1, optimizer=make_optimizer(net))
    assert timed.to_dict()["optimizer_ns"] > 0


def test_profiling_changes_nothing():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.Adam(net.parameters(), weight_decay=0.1)
    batch = torch.randn(8, 6)
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()["state"]))
    cortado.profile(net, batch, loss=lambda y: y.square().mean(), optimizer=optimizer, codecs=[], steps=2)
    after = (net.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    with pytest.raises(ZeroDivisionError):
        cortado.profile(net, batch, loss=lambda y: y.sum() / (1 // 0), codecs=[])
    torch.testing.assert_close(net.state_dict(), before[0], rtol=0, atol=0)
    wrapper = SimpleNamespace(step=optimizer.step)  # no torch.optim.Optimizer: only timed
    assert cortado.profile(net, batch, loss=torch.sum, optimizer=wrapper, codecs=[]).to_dict()["optimizer_ns"] > 0


def test_profiling_changes_nothing_that_only_the_optimizer_holds():
    net, criterion = make_net(), torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *criterion.parameters()], lr=0.1)
    criterion.weight.grad = torch.ones_like(criterion.weight)
    before = copy.deepcopy(criterion.state_dict())
    batch = make_batch(0, 0)[0]
    job = cortado.profile(net, batch, loss=lambda y: criterion(y).sum(), optimizer=optimizer, codecs=[], steps=2)
    assert job.to_dict()["optimizer_ns"] > 0
    torch.testing.assert_close(criterion.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(criterion.weight.grad, torch.ones_like(criterion.weight)) and criterion.bias.grad is None


def profile_beside(me):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    loss = lambda: net(torch.ones(2, 4)).sum()  # noqa: E731
    errors = []
    for make in (cortado.Reducer, cortado.KFAC):
        beside = make(net, verbose=False)
        with pytest.raises(cortado.SpecError, match=f"cortado.{make.__name__}") as refused:
            cortado.profile(net, loss)
        errors.append(str(refused.value))
        beside.close() if make is cortado.Reducer else beside.detach()
        cortado.profile(net, loss, codecs=[])
    return len(errors)


def test_a_model_that_takes_part_in_an_exchange_is_not_profiled(pools):
    assert pools(2).run(profile_beside) == [2, 2]


def profile_on_one_rank(me):
    """DDP would broadcast the statistics of the norm, and wait for the other rank."""
    torch.manual_seed(0)
    model = me.wrap(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    if me.rank == 0:
        cortado.profile(model, torch.randn(8, 6), loss=lambda y: y.sum(), optimizer=optimizer, codecs=[], steps=1)
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()


def test_a_model_under_ddp_on_one_rank_only(pools):
    pools(2).run(profile_on_one_rank)


def profile_ddp(me):
    model = me.wrap(make_net())
    job = cortado.profile(model, lambda: loss_of(model, make_batch(me.rank, 0)), codecs=CODECS, steps=1)
    train(me, model, 3)  # and goes on as before
    return len(job.to_dict()["tensors"])


def test_a_model_under_ddp(pools):
    assert pools(2).run(profile_ddp) == [len(list(make_net().parameters()))] * 2


def test_job_and_cluster_make_a_plan(pools, tmp_path):
    net = make_net()
    job, cluster, plan = tmp_path / "job.json", tmp_path / "cluster.json", tmp_path / "plan.json"
    cortado.profile(net, lambda: loss_of(net, make_batch(0, 0)), codecs=CODECS, steps=1).save(job)
    pools(2).run(calibrated, path=str(cluster))
    program = Path(sys.executable).parent / "cortado"
    done = subprocess.run(
        [program, "plan", job, cluster, "-o", plan], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert pools(2).run(run_plan, path=str(plan)) == [True, True]


def run_plan(me, path):
    train(me, me.attach(make_net(), path), 3)
    return True


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.nn.ReLU(), ()), "no parameter that is trained"),
        (("net", ()), "needs a module, got str"),
        ((make_net(), torch.zeros(4, 24)), "needs a scalar loss to run backward from, got (4, 8): say loss="),
    ],
)
def test_bad_input(arguments, text):
    with pytest.raises(cortado.SpecError) as raised:
        cortado.profile(*arguments)
    assert text in str(raised.value)


def test_files_that_are_wrong_say_where(tmp_path):
    path = tmp_path / "job.json"
    tensor = {"name": "w", "shape": [2], "dtype": "float32", "ready_ns": -1}
    path.write_text(json.dumps({"format": "cortado.job/1", "name": "x", "tensors": [tensor]}))
    with pytest.raises(cortado.CortadoError) as raised:
        cortado.Job.load(path)
    assert str(raised.value).startswith(f"{path}: $.tensors[0].ready_ns: expected ")


@pytest.mark.parametrize(("devices", "expected"), [(4, 3), (2, 1), (1, 0), (0, 3)])
def test_ranks_of_a_machine_share_its_devices_where_they_are_fewer(monkeypatch, devices, expected):
    """Without any, the error of the one that was asked for says so."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert calibration.own_device("cuda") == torch.device("cuda", expected)
