# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""K-FAC on a device, reached from Python: where it computes and why, what is held for it, and trainings without a GPU,
on the emulated device of libcortado_emulated.so (built with the C++ tests; CORTADO_EMULATED_LIBRARY says where)."""

import contextlib
import copy
import csv
import ctypes
import os
import subprocess
import sys

import cortado
import cortado.kfac
import pytest
import torch
from cortado import _core, kfac_device
from cortado.device_engine import Place
from cortado.kfac_device import VARIABLE, place_of_kfac
from ranks import fingerprint
from test_device_engine import BUILD, EMULATED, IN_MEMORY, ON_A_GPU, needs_emulated
from test_kfac import NAMES, QUIET, Net, backward
from test_kfac_ranks import LOSSY, STRATEGIES, make_run, train
from torch import nn

CUDA = os.environ.get(VARIABLE, str(BUILD / "libcortado_cuda_kfac.so"))
needs_cuda = pytest.mark.skipif(not os.path.exists(CUDA), reason=f"{CUDA} is not built")


@contextlib.contextmanager
def emulated_kfac():
    """Every KFAC made in here computes on the emulated device."""
    before = cortado.kfac.place_of_kfac
    cortado.kfac.place_of_kfac = lambda _: Place(library=EMULATED)
    try:
        yield
    finally:
        cortado.kfac.place_of_kfac = before


def here(on_device):
    return emulated_kfac() if on_device else contextlib.nullcontext()


# ---- the choice


def test_layers_in_memory_need_no_library():
    assert place_of_kfac(IN_MEMORY) == Place()


def test_layers_on_a_device_need_one(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.so"))
    monkeypatch.setattr(cortado.kfac, "device_of_layers", lambda _: ON_A_GPU)
    with pytest.raises(cortado.SpecError, match=r"can't work on cuda:0: there is no .*none.so.*CORTADO_BUILD_CUDA"):
        cortado.KFAC(Net(), **QUIET)
    monkeypatch.delenv(VARIABLE)
    assert kfac_device.LIBRARY in place_of_kfac(ON_A_GPU).reason


def test_a_library_without_kfac_is_an_error(tmp_path, monkeypatch):
    engine_only = os.environ.get("CORTADO_CUDA_LIBRARY", str(BUILD / "libcortado_cuda.so"))
    if not os.path.exists(engine_only):
        pytest.skip(f"{engine_only} is not built")
    monkeypatch.setattr(cortado.kfac, "place_of_kfac", lambda _: Place(library=engine_only))
    with pytest.raises(ValueError, match="no K-FAC"):
        cortado.KFAC(Net(), **QUIET)


def test_layers_on_two_devices_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, device="meta"))
    with pytest.raises(cortado.SpecError, match="one device a process"):
        cortado.KFAC(model, **QUIET)


@needs_cuda
def test_the_cuda_library_loads_with_and_without_a_device():
    assert _core.device_count(CUDA) == torch.cuda.device_count()


# ---- one rank


def run_of(on_device, options=None, steps=4, scale=1.0, during=None):
    """Gradients of the last step, the parameters behind it, and the KFAC."""
    with here(on_device):
        model = Net()
        kfac = cortado.KFAC(model, **(options or {}), **QUIET)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            backward(model, step, scale)
            for parameter in model.parameters():
                parameter.grad /= scale
            if during is not None:
                during(model, kfac, step)
            kfac.step()
            gradients = torch.cat([p.grad.flatten() for name, p in model.named_parameters() if name[:-7] in NAMES])
            optimizer.step()
    return gradients, torch.cat([p.detach().flatten() for p in model.parameters()]), kfac


def expect_near(found, expected, bound=1e-4):
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert (one - other).norm() < bound * other.norm()


@needs_emulated
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute_method": "inverse", "damping": 0.1},
        {"pi_correction": True, "damping": 0.1, "kl_clip": None},
        {"factor_update_steps": 2, "inv_update_steps": 3, "compression": "compso(bound=4e-3)"},
    ],
)
def test_computes_what_the_cpu_does(options):
    found, expected = run_of(True, options), run_of(False, options)
    expect_near(found, expected)
    assert found[2].report().to_dict()["runs_on"] == "device"
    assert expected[2].report().to_dict()["runs_on"] == "cpu"
    assert "computed on cpu" in found[2].describe() and "computed on" not in expected[2].describe()


@needs_emulated
def test_micro_batches_and_batches_that_are_forgotten():
    def twice(model, kfac, step):
        gradients = [p.grad.clone() for p in model.parameters()]
        if step % 2:
            kfac.reset_batch()
        backward(model, step + 20)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad.copy_(gradient)

    expect_near(run_of(True, during=twice), run_of(False, during=twice))


@needs_emulated
def test_the_scale_of_the_loss_is_read_once_a_step():
    """And before there is a backward pass to wait for."""
    reads = []

    def scale():
        reads.append(torch.is_grad_enabled())
        return 512.0

    options = {"grad_scaler": scale}
    found = run_of(True, options, scale=512.0)
    assert reads == [True] * 4
    expect_near(found, run_of(False, options, scale=512.0))


@needs_emulated
def test_the_current_device_stays_that_of_the_caller():
    library = ctypes.CDLL(EMULATED)
    library.cortado_set_emulated_device(3)
    with emulated_kfac():
        model = Net()
        kfac = cortado.KFAC(model, **QUIET)
        assert library.cortado_emulated_device() == 3
        backward(model, 0)
        kfac.step()
        assert library.cortado_emulated_device() == 3
        kfac.detach()
        kfac._core = kfac._batches._core = None  # the last references
        assert library.cortado_emulated_device() == 3
        with pytest.raises(cortado.SpecError, match="threads"):
            cortado.KFAC(model, threads=0, **QUIET)
    assert library.cortado_emulated_device() == 3
    library.cortado_set_emulated_device(0)


@needs_emulated
def test_the_scale_of_the_loss_is_that_of_the_pass():
    """Though no step() came after the one before, as where the gradients were not worth it."""

    def gradients(on_device):
        with here(on_device):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
            read = 0

            def scale():
                nonlocal read
                read += 1
                return current

            kfac = cortado.KFAC(model, grad_scaler=scale, kl_clip=None, **QUIET)
            for current in (2.0, 64.0):
                model.zero_grad()
                (model(torch.ones(6, 4)).square().sum() * current).backward()
            for parameter in model.parameters():
                parameter.grad /= current
            kfac.step()
            assert read == (2 if on_device else 4)
            return torch.cat([p.grad.flatten() for p in model.parameters()])

    found, expected = gradients(True), gradients(False)
    assert (found - expected).norm() < 1e-4 * expected.norm()


@needs_emulated
def test_a_step_that_is_not_finite_leaves_gradients_alone():
    with emulated_kfac():
        model = Net()
        kfac = cortado.KFAC(model, **QUIET)
        backward(model, 0)
        model.head[1].weight.grad[0, 0] = float("inf")
        before = [p.grad.clone() for p in model.parameters()]
        assert not kfac.step()
        assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
        backward(model, 1)
        assert kfac.step()


@needs_emulated
@pytest.mark.parametrize("saved_there", [True, False])
def test_states_go_from_one_to_the_other(saved_there):
    ends = []
    for goes_on_there in (True, False):
        with here(saved_there):
            model = Net()
            kfac = cortado.KFAC(model, **QUIET)
            for step in range(2):
                backward(model, step)
                kfac.step()
        with here(goes_on_there):
            kfac.detach()
            other = cortado.KFAC(model, inv_update_steps=4, **QUIET)
            other.load_state_dict(kfac.state_dict())
            for step in range(2, 4):
                backward(model, step)
                other.step()
        ends.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (ends[0] - ends[1]).norm() < 1e-4 * ends[1].norm()


# ---- what is held until the device has read it


class Recorded:
    """A _core.Kfac, and which of its calls were made."""

    def __init__(self, core, calls):
        self._core, self._calls = core, calls

    def __getattr__(self, name):
        def call(*arguments):
            self._calls.append((name, arguments))
            return getattr(self._core, name)(*arguments)

        return call if callable(getattr(self._core, name)) else getattr(self._core, name)


@needs_emulated
def test_batches_are_held_until_the_step_has_ended(monkeypatch):
    calls = []
    monkeypatch.setattr(kfac_device, "address_of_current_stream", lambda _: 48)
    with emulated_kfac():
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        kfac = cortado.KFAC(model, **QUIET)
        kfac._batches._core = Recorded(kfac._core, calls)
        model(torch.ones(5, 4)).sum().backward()
        held = [each.values for each in kfac._batches._held]
        assert [len(values) for values in held] == [5] * 4
        given = [(arguments[2], arguments[-1]) for name, arguments in calls if name == "add_batch"]
        assert given == [(values.data_ptr(), 48) for values in held]
        kfac.step()
        assert kfac._batches._held == [] and kfac._batches.held_bytes == 0
        assert all(name != "release_batches" for name, _ in calls)


@needs_emulated
def test_the_computing_stream_waits_where_too_much_is_held(monkeypatch):
    calls = []
    monkeypatch.setattr(kfac_device, "MOST_HELD_BYTES", 5 * 4 * 4)
    monkeypatch.setattr(kfac_device, "address_of_current_stream", lambda _: 48)
    with emulated_kfac():
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        kfac = cortado.KFAC(model, **QUIET)
        kfac._batches._core = Recorded(kfac._core, calls)
        model(torch.ones(5, 4))
        assert [name for name, _ in calls] == ["add_batch", "add_batch", "release_batches"]
        assert calls[-1] == ("release_batches", (48,)) and kfac._batches._held == []
        model(torch.ones(1, 4))
        kfac.reset_batch()
        assert calls[-1] == ("release_batches", (48,)) and kfac._batches._held == []


@needs_emulated
def test_streams_that_have_computed_what_was_held_wait_too(monkeypatch):
    """Their memory is given to what they are given next, whoever is current when it is let go."""
    calls, current = [], 8
    monkeypatch.setattr(kfac_device, "address_of_current_stream", lambda _: current)
    with emulated_kfac():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        kfac = cortado.KFAC(model, **QUIET)
        kfac._batches._core = Recorded(kfac._core, calls)
        hidden = model[0](torch.ones(5, 4))
        current = 16
        model[1](hidden)
        current = 24
        kfac.reset_batch()
        assert [arguments for name, arguments in calls if name == "release_batches"] == [(8,), (16,), (24,)]


@needs_emulated
def test_memory_that_is_held_is_counted_once_and_whole():
    with emulated_kfac():
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 2)])
        kfac = cortado.KFAC(model, **QUIET)
        before = kfac.memory_usage()
        assert before["held"] == 0
        whole = torch.ones(10, 4, requires_grad=True) * 1
        for layer in model:
            layer(whole[:5])
        after = kfac.memory_usage()
        assert after["held"] == 10 * 4 * 4 and after["total"] == before["total"] + after["held"]
        kfac.reset_batch()


def static_net(dtype=None):
    """One whose hidden layer gets what autograd keeps, or with autocast a copy of it."""

    class Static(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, inputs):
            hidden = self.first(inputs).float()
            result = self.last(hidden)
            if dtype is not None:
                hidden.mul_(-3.0)  # autograd has a copy, and does not mind
            return result.float()

    return Static()


def gradients_of_static_input(on_device, dtype):
    """Two micro-batches in one buffer, which is overwritten when all that autograd needs of it was used."""
    with here(on_device):
        model = static_net(dtype)
        kfac = cortado.KFAC(model, kl_clip=None, **QUIET)
        buffer = torch.empty(6, 4)
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            buffer.copy_(torch.randn(6, 4, generator=generator))
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                model(buffer).square().mean().backward()
        buffer.fill_(float("nan"))
        kfac.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()])


@needs_emulated
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_inputs_may_be_overwritten_before_the_device_has_read_them(dtype):
    found, expected = (gradients_of_static_input(on_device, dtype) for on_device in (True, False))
    assert (found - expected).norm() < 1e-4 * expected.norm()


@needs_emulated
@pytest.mark.parametrize("most_held", [1 << 30, 1])
def test_other_changes_in_place_are_errors(monkeypatch, most_held):
    monkeypatch.setattr(kfac_device, "MOST_HELD_BYTES", most_held)
    with emulated_kfac():
        model = static_net()
        kfac = cortado.KFAC(model, **QUIET)
        kept = []
        model.last.register_forward_hook(lambda _module, inputs, _output: kept.append(inputs[0].detach()))
        model(torch.ones(6, 4)).sum().backward()
        with torch.no_grad():
            kept[0].zero_()
        if most_held == 1:  # it was read
            assert kfac.step()
            return
        with pytest.raises(cortado.SpecError, match="the activations of layer last were changed in place before"):
            kfac.step()


def test_nothing_is_held_on_the_cpu():
    model = nn.Sequential(nn.Linear(4, 3))
    kfac = cortado.KFAC(model, **QUIET)
    model(torch.ones(5, 4)).sum().backward()
    assert kfac._batches._held == []


# ---- the benchmark that tools/gpu_check runs


@needs_emulated
def test_the_benchmark_compares_before_it_measures():
    program = BUILD.parents[1] / "benchmarks" / "training" / "kfac_cuda.py"
    command = [sys.executable, str(program), EMULATED, "--emulated"]
    rows = list(csv.DictReader(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()))
    assert [(row["what"], row["who"]) for row in rows] == [
        (what, who) for what in ("factors", "inverses", "precondition") for who in ("cortado", "torch")
    ]
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert 0 < float(rows[0]["difference"]) < 1e-5 and 0 < float(rows[4]["difference"]) < 1e-3


# ---- several ranks: replicas are compared to the bit when a scenario ends


def train_there(me, options, uses_ddp, on_device, steps=4):
    with here(on_device is True or on_device == "odd" and me.rank % 2 == 1):
        run = make_run(me, options, uses_ddp)
        return train(me, run, steps).numpy()


@needs_emulated
@pytest.mark.parametrize("uses_ddp", [True, False])
@pytest.mark.parametrize("options", STRATEGIES)
def test_ranks_train_as_on_the_cpu(pools, options, uses_ddp):
    found = pools(4).run(train_there, options=options, uses_ddp=uses_ddp, on_device=True)
    expected = pools(4).run(train_there, options=options, uses_ddp=uses_ddp, on_device=False)
    for one, other in zip(found, expected, strict=True):
        assert ((one - other) ** 2).sum() < 1e-6 * (other**2).sum()


@needs_emulated
def test_replicas_stay_equal_whatever_is_lost(pools):
    for options in STRATEGIES:
        pools(2).run(train_there, options={**options, **LOSSY}, uses_ddp=False, on_device=True)


@needs_emulated
def test_ranks_may_differ_with_mem_opt(pools):
    found = pools(2).run(train_there, options={"strategy": "mem-opt"}, uses_ddp=True, on_device="odd")
    expected = pools(2).run(train_there, options={"strategy": "mem-opt"}, uses_ddp=True, on_device=False)
    assert ((found[0] - expected[0]) ** 2).sum() < 1e-6 * (expected[0] ** 2).sum()


def differ(me):
    with here(me.rank == 1), pytest.raises(cortado.CortadoError, match="on a device"):
        make_run(me, {"strategy": "comm-opt"})
    me._models.clear()


@needs_emulated
def test_ranks_must_not_differ_with_comm_opt(pools):
    pools(2).run(differ)


def resume(me, options):
    with emulated_kfac():
        first = make_run(me, options, uses_ddp=False)
        train(me, first, 2)
        second = make_run(me, options, uses_ddp=False)
        for one, other in zip(first, second, strict=True):
            other.load_state_dict(copy.deepcopy(one.state_dict()))
        for run in (first, second):
            train(me, run, range(2, 5))
        assert fingerprint(first[0]) == fingerprint(second[0])


@needs_emulated
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_training_goes_on_to_the_bit_from_a_state(pools, strategy):
    options = {"strategy": strategy, "compression": "quant(bits=8)", "error_feedback": True}
    pools(2).run(resume, options=options)
