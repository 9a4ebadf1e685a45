# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Attaching within Lightning, Accelerate and Transformers, and states in their checkpoints.

What needs one of them runs its example, and is skipped where it is not installed; tools/ci/frameworks installs them.
"""

import contextlib
import hashlib
import importlib
import io
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cortado import CortadoError, MismatchError, frameworks
from nets import make_net, train

EXAMPLES = Path(__file__).parents[2] / "examples"


# ---- what they share -------------------------------------------------------------------------------------------------


def attach_to(me, plan="acp(rank=1)", **options):
    return frameworks.attach_to(me.wrap(make_net(0)), plan, {"verbose": False, **options})


def error_of(call, *arguments):
    try:
        call(*arguments)
    except CortadoError as error:
        return type(error), str(error)
    return None


def save_damage_and_load(me, folder):
    """What each kind of damage on rank 1 says on this rank, whether the state stayed as it was, and what it is without
    damage."""
    state = attach_to(me)
    train(me, state._ddp(), 4)
    frameworks.save_in_folder(state, folder)
    saved = state.state_dict()
    own = Path(folder) / f"cortado_{me.rank}.pt"
    whole, errors = own.read_bytes(), {}
    for kind in ("cut short", "another rank's"):
        dist.barrier()
        if me.rank == 1:
            own.write_bytes(whole[:100] if kind == "cut short" else (Path(folder) / "cortado_0.pt").read_bytes())
        fresh = attach_to(me)
        errors[kind] = error_of(frameworks.load_from_folder, fresh, folder)
    dist.barrier()
    if me.rank == 1:
        own.write_bytes(whole)
    fresh = attach_to(me)
    frameworks.load_from_folder(fresh, folder)
    for name, entry in saved["tensors"].items():
        assert torch.equal(entry["residual"], fresh.state_dict()["tensors"][name]["residual"]), name
    assert any(entry["residual"].any() for entry in saved["tensors"].values())
    return errors


def test_a_damaged_state_is_refused_on_all_ranks(pools, tmp_path):
    errors = pools(2).run(save_damage_and_load, folder=str(tmp_path))
    for rank in (0, 1):
        kind, text = errors[rank]["cut short"]
        assert kind is MismatchError and "cortado_1.pt: expected a state of cortado" in text, text
        kind, text = errors[rank]["another rank's"]
        assert kind is MismatchError and "this is the state of rank 0, here is rank 1" in text, text


def load(me, folder):
    """What loading raises or says, and whether anything is owed afterwards."""
    state = attach_to(me)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        error = error_of(frameworks.load_from_folder, state, folder)
    is_owed = any(entry["residual"].any() for entry in state.state_dict()["tensors"].values())
    return error, said.getvalue(), bool(is_owed), state.state_dict()["step"]


def save(me, folder):
    state = attach_to(me)
    train(me, state._ddp(), 4)
    frameworks.save_in_folder(state, folder)


def test_without_a_state_it_starts_anew_and_says_so(pools, tmp_path):
    (_, said, *_), (_, quiet, *_) = ends = pools(2).run(load, folder=str(tmp_path))
    assert said == f"cortado: {tmp_path} holds no state of cortado: residuals and factors start anew\n" and not quiet
    assert [(error, owed, step) for error, _, owed, step in ends] == [(None, False, 0)] * 2


def save_over_those_of_more_ranks(me, folder):
    for stale in (2, 10):  # of a larger run
        Path(folder, f"cortado_{stale}.pt").write_bytes(b"stale")
    Path(folder, "cortado_1_2.pt").write_bytes(b"of the accelerator's second model")
    dist.barrier()
    save(me, folder)


def test_files_of_more_ranks_do_not_stay(pools, tmp_path):
    pools(2).run(save_over_those_of_more_ranks, folder=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cortado_0.pt", "cortado_1.pt", "cortado_1_2.pt"]
    for error, _, is_owed, step in pools(2).run(load, folder=str(tmp_path)):
        assert (error, is_owed, step) == (None, True, 4)


def test_files_of_another_model_are_not_taken(pools, tmp_path):
    (tmp_path / "cortado_1_0.pt").write_bytes(b"of the accelerator's second model")
    for error, _, is_owed, step in pools(2).run(load, folder=str(tmp_path)):
        assert (error, is_owed, step) == (None, False, 0)


def load_where_rank_1_has_none(me, folder):
    return load(me, folder if me.rank == 0 else folder + "/elsewhere")[0]


def test_a_rank_without_a_state_is_named(pools, tmp_path):
    pools(2).run(save, folder=str(tmp_path))
    for kind, text in pools(2).run(load_where_rank_1_has_none, folder=str(tmp_path)):
        assert kind is MismatchError and "holds a state of cortado differs: ranks have True, False" in text


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_keeps_all_but_residuals(pools, tmp_path, world_size):
    pools(2).run(save, folder=str(tmp_path))
    for error, _, is_owed, step in pools(world_size).run(load, folder=str(tmp_path)):
        assert (error, is_owed, step) == (None, False, 4)


def attach_without_host_memory(me):
    """A DDP whose group takes no host memory: of NCCL alone, as frameworks make it on GPUs."""
    frameworks.takes_host_memory = lambda group: False
    try:
        model = me.wrap(make_net(0))
        state = frameworks.attach_to(model, "acp(rank=1)", {"verbose": False})
        own = dist.new_group(backend="gloo")
        chosen = frameworks.attach_to(me.wrap(make_net(0)), "none", {"verbose": False, "process_group": own})
    finally:
        frameworks.takes_host_memory = importlib.import_module("cortado.group").takes_host_memory
    train(me, model, 3)
    return state._group._group is not model.process_group, chosen._group._group is own


def test_beside_nccl_alone_it_makes_a_group_of_gloo(pools):
    assert pools(2).run(attach_without_host_memory) == [(True, True)] * 2


def test_a_single_process_has_nothing_to_exchange(capsys):
    assert frameworks.attach_to(make_net(0), "acp(rank=1)", {}) is None
    assert capsys.readouterr().err == "cortado: a single process trains, so there is nothing to exchange\n"
    assert frameworks.attach_to(make_net(0), "acp(rank=1)", {"verbose": False}) is None
    assert capsys.readouterr().err == ""


def attach_what_is_no_ddp(me):
    return error_of(frameworks.attach_to, make_net(0), "acp(rank=1)", {})


def test_several_processes_without_ddp_are_refused(pools):
    for _, text in pools(2).run(attach_what_is_no_ddp):
        assert "cortado.attach needs a torch.nn.parallel.DistributedDataParallel" in text


def scale_of(me):
    """Of the framework's scaler, or of the caller's, who knows better."""

    class Scaler:
        def __init__(self, scale):
            self.get_scale = lambda: scale

    options = {"verbose": False}
    of_framework = frameworks.attach_to(me.wrap(make_net(0)), "acp(rank=1)", options, Scaler(8.0))
    of_caller = frameworks.attach_to(
        me.wrap(make_net(0)), "acp(rank=1)", {**options, "grad_scaler": Scaler(2.0)}, Scaler(8.0)
    )
    return of_framework._grad_scaler.get_scale(), of_caller._grad_scaler.get_scale()


def test_the_scaler_is_that_of_the_framework_unless_one_is_given(pools):
    assert pools(2).run(scale_of) == [(8.0, 2.0)] * 2


# ---- each of them, by its example ------------------------------------------------------------------------------------


def run(example, *arguments, launch=("-m", "torch.distributed.run", "--nproc-per-node", "2")):
    """What it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    command = [sys.executable, *launch, EXAMPLES / f"train_{example}.py", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def digest(*files):
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def tensors_of(checkpoint):
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)
    momenta = [entry["momentum_buffer"] for entry in saved["optimizer_states"][0]["state"].values()]
    residuals = [entry["residual"] for state in saved["cortado"] for entry in state["tensors"].values()]
    return [*saved["state_dict"].values(), *momenta], residuals, saved


def forget(of_lightning):
    saved = torch.load(of_lightning, map_location="cpu", weights_only=False)
    del saved["cortado"]
    torch.save(saved, of_lightning)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lightning_resumes_bit_by_bit(tmp_path):
    pytest.importorskip("lightning")
    fit = partial(run, "lightning", launch=())
    printed = fit("--epochs", 1, "--folder", tmp_path / "half")
    assert "cortado: acp(rank=4) over callback(gloo), world size 2, 45 steps" in printed
    half = tmp_path / "half" / "last.ckpt"
    fit("--epochs", 2, "--folder", tmp_path / "whole")
    fit("--epochs", 2, "--folder", tmp_path / "resumed", "--resume", half)
    forget(half)
    printed = fit("--epochs", 2, "--folder", tmp_path / "forgetful", "--resume", half)
    assert "the checkpoint holds no state of cortado" in printed
    whole, resumed, forgetful = (
        tensors_of(tmp_path / name / "last.ckpt") for name in ("whole", "resumed", "forgetful")
    )
    assert len(whole[2]["cortado"]) == 2 and any(residual.any() for residual in whole[1])
    for part in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(whole[part], resumed[part], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(whole[part], forgetful[part], strict=True))
    alone = fit("--devices", 1, "--epochs", 1, "--folder", tmp_path / "alone")
    assert "cortado: acp(rank=4)" in alone and "accuracy" in alone


@pytest.mark.slow
def test_lightning_takes_states_for_training_only():
    lightning = pytest.importorskip("cortado.lightning", exc_type=ImportError)
    for fn, saved in (("fit", ["a state"]), ("test", None), ("validate", None)):
        callback = lightning.GradientCompression("acp(rank=1)")
        trainer = SimpleNamespace(state=SimpleNamespace(fn=fn))
        callback.on_load_checkpoint(trainer, None, {"cortado": ["a state"]})
        assert callback._saved == saved


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_accelerate_resumes_bit_by_bit(tmp_path):
    pytest.importorskip("accelerate")
    printed = run("accelerate", "--epochs", 1, "--folder", tmp_path / "half")
    assert "cortado: acp(rank=4) over callback(gloo), world size 2, 23 steps" in printed
    assert_resumes(
        tmp_path,
        whole=lambda folder: run("accelerate", "--epochs", 2, "--folder", folder),
        resumed=lambda half, folder: run("accelerate", "--epochs", 2, "--folder", folder, "--resume", half),
        files=("model.safetensors", "optimizer.bin", "cortado_0.pt", "cortado_1.pt"),
    )
    alone = run("accelerate", "--epochs", 1, "--folder", tmp_path / "alone", launch=())
    assert "cortado: a single process trains" in alone and not list((tmp_path / "alone").glob("cortado_*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_resumes_bit_by_bit(tmp_path):
    pytest.importorskip("transformers")
    printed = run("transformers", "--steps", 50, "--folder", tmp_path / "half")
    assert "cortado: acp(rank=4) over callback(gloo), world size 2, 50 steps" in printed

    def resume(half, folder):
        shutil.copytree(half, folder)
        return run("transformers", "--steps", 60, "--folder", folder, "--resume")

    assert_resumes(
        tmp_path,
        whole=lambda folder: run("transformers", "--steps", 60, "--folder", folder),
        resumed=resume,
        files=[
            f"checkpoint-60/{name}" for name in ("model.safetensors", "optimizer.pt", "cortado_0.pt", "cortado_1.pt")
        ],
    )


def assert_resumes(tmp_path, *, whole, resumed, files):
    """From tmp_path / "half" on to the same bits as without a break; to others where cortado's state is missing."""
    whole(tmp_path / "whole")
    resumed(tmp_path / "half", tmp_path / "resumed")
    states = list((tmp_path / "half").rglob("cortado_*.pt"))
    assert len(states) == 2
    for state in states:
        state.unlink()
    assert "holds no state of cortado" in resumed(tmp_path / "half", tmp_path / "forgetful")
    ends = {name: digest(*(tmp_path / name / file for file in files)) for name in ("whole", "resumed", "forgetful")}
    assert ends["whole"] == ends["resumed"]
    assert all(a != b for a, b in zip(ends["whole"], ends["forgetful"], strict=True))
