# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The engine on a device, reached from Python: which engine is chosen and why, and trainings without a GPU, on the
emulated device of libcortado_emulated.so (built with the C++ tests; CORTADO_EMULATED_LIBRARY says where)."""

import contextlib
import io
import os
from pathlib import Path
from types import SimpleNamespace

import cortado
import cortado.attachment
import pytest
import torch
from cortado import _core, device_engine
from cortado.device_engine import Place, place_of_engine
from cortado.side_stream import ComputeStream, is_capturing
from cortado.spec import text_for_engine
from cortado.transfers import DeviceEngineTransfers
from nets import loss_of, make_batch, make_net, train, train_until_decided
from test_ddp_algorithm import skip_under_scaler
from test_ddp_bad_input import error_of
from test_ddp_overflow import LAST_READY, compare_with_skipping, distance, train_through
from test_plan import DENSE, MIXED
from test_reducer import reduced, train_reduced

BUILD = Path(__file__).resolve().parents[2] / "build" / "release"
EMULATED = os.environ.get("CORTADO_EMULATED_LIBRARY", str(BUILD / "libcortado_emulated.so"))
VARIABLE = device_engine.VARIABLE
CUDA = os.environ.get(VARIABLE, str(BUILD / "libcortado_cuda.so"))
ON_A_GPU, IN_MEMORY = torch.device("cuda", 0), torch.device("cpu")
STEPS = 6
LOW_RANK = ["acp(rank=2)", "acp(rank=2, sides=alternate, start_step=2)", "power(rank=2)"]
SMALL_BUCKETS = {"bucket_cap_mb": 0.002}

needs_emulated = pytest.mark.skipif(not os.path.exists(EMULATED), reason=f"{EMULATED} is not built")
needs_cuda = pytest.mark.skipif(not os.path.exists(CUDA), reason=f"{CUDA} is not built")


class EmulatedStream:
    """As ComputeStream, of a device on which all has been computed when it is asked for."""

    def __init__(self, _device):
        pass

    def begin_step(self):
        return 0

    def follow(self):
        pass

    def join(self):
        pass

    def future(self):
        return torch.futures.Future()


@contextlib.contextmanager
def emulated_device(place=None):
    """Every attachment made in here has its engine on the emulated device, or at ``place``."""
    module = cortado.attachment
    before = module.place_of_engine, module.compute_stream_of
    module.place_of_engine, module.compute_stream_of = lambda *_: place or Place(EMULATED), EmulatedStream
    try:
        yield
    finally:
        module.place_of_engine, module.compute_stream_of = before


# ---- the choice


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A file, and as many devices as count() of it says."""
    path = tmp_path / "library.so"
    path.touch()
    monkeypatch.setenv(VARIABLE, str(path))
    found = SimpleNamespace(path=path, count=lambda: 1)
    core = SimpleNamespace(device_count=lambda _: found.count(), __file__=_core.__file__)
    monkeypatch.setattr(device_engine, "_core", core)
    return found


def test_what_has_variants_is_compressed_on_the_device(library):
    matrices = ("acp", "acp(rank=4)", "power(rank=2, wire=fp16)")
    payloads = (
        "sign(rollback=exact)",
        "quant(bits=4)",
        "fp8(e4m3)",
        "topk(density=0.1)",
        "randk",
        "compso",
        "float_rans",
    )
    for what in (*matrices, *payloads, "auto", "auto(quality=safe)"):
        assert place_of_engine(ON_A_GPU, what) == Place(library=str(library.path))
        assert place_of_engine(IN_MEMORY, what) == Place()


@pytest.mark.parametrize(
    "what, reason",
    [
        ("rans", "rans is not"),
        ("sign | rans", "sign | rans is not"),
        ("none", "none is not"),
        ("acp(rank=2, rollback=exact)", "rollback=exact of acp"),
    ],
)
def test_all_else_is_copied(library, what, reason):
    place = place_of_engine(ON_A_GPU, what)
    assert place.library is None and reason in place.reason


def test_a_plan_encodes_on_the_device_what_it_gives_to_the_gpu(library):
    plan = text_for_engine(MIXED)
    reason = "a plan's sums are made on the host"
    assert place_of_engine(ON_A_GPU, plan) == Place(reason=reason, schemes=str(library.path))
    library.count = lambda: 0
    place = place_of_engine(ON_A_GPU, plan)
    assert place.reason == reason and place.schemes is None and "finds no device" in place.why_no_schemes
    assert place_of_engine(IN_MEMORY, plan) == Place()


def report_without_schemes(me, plan):
    place = Place(reason="sums on the host", why_no_schemes="there is no library")
    with emulated_device(place):
        model = me.attach(make_net(), plan, **SMALL_BUCKETS)
    return model.cortado.report().to_dict()["runs_on"]["reason"]


def test_the_report_says_why_a_plan_has_no_device(pools):
    for reason in pools(4).run(report_without_schemes, plan=MIXED):
        assert reason.startswith("sums on the host; of 2 of 5 buckets the CPU does what")
        assert reason.endswith("this engine has no device (there is no library)")
    for reason in pools(2).run(report_without_schemes, plan=DENSE):
        assert reason == "sums on the host"


def attach_aloud(me, place):
    printed = io.StringIO()
    with emulated_device(place), contextlib.redirect_stderr(printed):
        cortado.attach(me.wrap(make_net()), "acp(rank=2)")
    return printed.getvalue()


def test_rank_0_says_at_the_start_that_gradients_are_copied(pools):
    first, other = pools(2).run(attach_aloud, place=Place(reason="there is no library"))
    assert first.endswith("cortado: gradients on cpu are copied to the CPU: there is no library\n") and other == ""


def test_says_why_there_is_no_engine_on_the_device(library, monkeypatch):
    library.count = lambda: 0
    assert "finds no device" in place_of_engine(ON_A_GPU, "acp").reason

    def refuse():
        raise cortado.MismatchError("of another build", "mismatch")

    library.count = refuse
    assert "of another build" in place_of_engine(ON_A_GPU, "acp").reason
    library.path.unlink()
    assert "CORTADO_BUILD_CUDA" in place_of_engine(ON_A_GPU, "acp").reason
    monkeypatch.delenv(VARIABLE)
    assert device_engine.LIBRARY in place_of_engine(ON_A_GPU, "acp").reason


# ---- the libraries


def test_a_file_that_is_no_library_is_an_error(tmp_path):
    with pytest.raises(cortado.CortadoError, match="can't load"):
        _core.device_count(str(tmp_path / "missing.so"))
    with pytest.raises(cortado.MismatchError, match="no library of devices"):
        _core.device_count(_core.__file__)


@needs_cuda
def test_the_cuda_library_loads_with_and_without_a_device():
    assert _core.device_count(CUDA) == torch.cuda.device_count()


@needs_emulated
def test_the_emulated_library_loads():
    assert _core.device_count(EMULATED) == 1


# ---- trainings: replicas are compared to the bit by Rank, and with the engine on the CPU here


def parameters_of(net):
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def train_both(me, plan, front_end):
    ends = []
    for device in (contextlib.nullcontext, emulated_device):
        with device():
            net = make_net()
            if front_end == "ddp":
                model = me.attach(net, plan, **SMALL_BUCKETS)
                train(me, model, STEPS)
                report = model.cortado.report()
            else:
                train_reduced(me, reduced(me, net, plan), STEPS)
                report = net.cortado.report()
            ends.append(parameters_of(net))
    assert report.to_dict()["runs_on"] == {"gradients": "cpu", "engine": "device"}
    assert not any("not on the device" in fallback["reason"] for fallback in report.to_dict()["fallbacks"])
    assert "compressed on" in str(report)
    return distance(*ends)


def fall_back(me, plan):
    with emulated_device():
        model = me.attach(make_net(), plan, **SMALL_BUCKETS)
        train(me, model, STEPS)
        return model.cortado.report().to_dict()["runs_on"]


ENCODES_PLANS = Place(reason="sums on the host", schemes=EMULATED)


def train_plan_both(me, plan):
    ends = []
    for device in (contextlib.nullcontext(), emulated_device(ENCODES_PLANS)):
        with device:
            net = make_net()
            model = me.attach(net, plan, **SMALL_BUCKETS)
            train(me, model, STEPS)
            ends.append(parameters_of(net))
    assert distance(*ends) == 0
    return model.cortado.report().to_dict()["runs_on"]


@needs_emulated
def test_plans_encode_on_the_device_to_the_bit(pools):
    for runs_on in pools(4).run(train_plan_both, plan=MIXED):
        # Nothing else: an engine without a device would say so, and of a codec without a variant, too.
        assert runs_on == {"gradients": "cpu", "engine": "cpu", "reason": "sums on the host"}


@needs_emulated
def test_the_report_says_when_the_engine_encodes_on_the_cpu_all_the_same(pools):
    for runs_on in pools(2).run(fall_back, plan="quant(error=0.1, min_elems=0)"):
        assert runs_on["engine"] == "cpu"
        assert "error" in runs_on["reason"]


@needs_emulated
@pytest.mark.parametrize("front_end", ["ddp", "reducer"])
@pytest.mark.parametrize(
    "codec",
    [
        "sign(min_elems=0)",
        "quant(bits=4, min_elems=0)",
        "fp8(e4m3, min_elems=0)",
        "topk(density=0.1, min_elems=0)",
        "topk(density=0.05, select=sampled, min_elems=0)",
        "compso(min_elems=0)",
        "float_rans(min_elems=0, min_compression_rate=0)",
        "randk(density=0.2, min_elems=0)",
    ],
)
def test_trains_to_the_bit_as_on_the_cpu(pools, codec, front_end):
    assert pools(2).run(train_both, plan=codec, front_end=front_end) == [0, 0]


@needs_emulated
@pytest.mark.parametrize("front_end", ["ddp", "reducer"])
@pytest.mark.parametrize("codec", LOW_RANK)
def test_trains_as_on_the_cpu(pools, codec, front_end):
    for error in pools(2).run(train_both, plan=codec, front_end=front_end):
        assert error < 1e-3


def mix(me, plan):
    """The engines of odd ranks are on the device."""
    with emulated_device() if me.rank % 2 else contextlib.nullcontext():
        train(me, me.attach(make_net(), plan, **SMALL_BUCKETS), STEPS)


@needs_emulated
def test_ranks_may_differ_in_where_their_engine_is(pools):
    pools(3).run(mix, plan="acp(rank=2)")


def undo(me, plan, view):
    poisoned = {3: (LAST_READY, float("nan")), 5: ("4.weight", float("inf"))}
    expected, _ = train_through(me, plan, False, poisoned, skip=False)
    with emulated_device():
        found, _ = train_through(me, plan, view, poisoned, skip=False)
        error, _ = compare_with_skipping(me, plan, view, poisoned)
    return distance(parameters_of(found.module), parameters_of(expected.module)), error


@needs_emulated
@pytest.mark.parametrize("codec, view", [("acp(rank=2)", True), ("power(rank=2)", False)])
def test_a_step_that_is_not_finite_is_undone(pools, codec, view):
    for difference, error in pools(2).run(undo, plan=codec, view=view):
        assert difference < 1e-3 and error < 1e-5


def run_auto(me, front_end):
    plan = "auto(drift=100)"  # on a busy machine, steps of a millisecond may take twice as long after a decision
    with emulated_device():
        net = make_net()
        if front_end == "ddp":
            model = me.attach(net, plan, **SMALL_BUCKETS)
            losses = train_until_decided(me, model)
        else:
            model = reduced(me, net, plan)
            losses = train_until_decided(me, model, train_with=train_reduced)
        report, decision = model.cortado.report().to_dict(), model.cortado.decision()
    assert decision["decided"], decision["candidates"]
    assert sum(losses[-10:]) < sum(losses[:10])
    assert len([c for c in decision["candidates"] if c["measured_ns"] is not None]) > 4
    return decision, report["runs_on"]


@needs_emulated
@pytest.mark.parametrize("front_end", ["ddp", "reducer"])
def test_auto_decides_with_gradients_on_the_device(pools, front_end):
    answers = pools(2).run(run_auto, front_end=front_end)
    for decision, runs_on in answers:
        assert decision["reason"] == answers[0][0]["reason"]
        chosen = decision["candidates"][decision["chosen"]]["label"]
        # What is summed as it is, plans, and compositions.
        on_host = chosen.startswith(("dense", "cast", "plan")) or "coder=rans" in chosen
        assert runs_on["engine"] == ("cpu" if on_host else "device")
        assert ("reason" in runs_on) == on_host


class CountedScaler(torch.amp.GradScaler):
    """Counts what would wait for the device: reading the scale for the host."""

    def __init__(self):
        super().__init__("cpu", init_scale=64.0, growth_factor=4.0, growth_interval=2)
        self.reads = 0

    def get_scale(self):
        self.reads += 1
        return super().get_scale()


def train_scaled(me, plan, front_end):
    scaler, net = CountedScaler(), make_net()
    if front_end == "ddp":
        model = me.attach(net, plan, grad_scaler=scaler, **SMALL_BUCKETS)
    else:
        model = reduced(me, net, plan, grad_scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    reads = 0
    for step in range(STEPS):
        loss = scaler.scale(loss_of(model, make_batch(me.rank, step)))
        before = scaler.reads
        loss.backward()
        if front_end == "reducer":
            model.cortado.wait()
        reads += scaler.reads - before
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 64.0 * 4.0 ** (STEPS // 2)
    return parameters_of(net), reads, model.cortado.report().to_dict()["runs_on"]["engine"]


def train_plan_scaled_both(me, plan):
    expected, reads, _ = train_scaled(me, plan, "ddp")
    with emulated_device(ENCODES_PLANS):
        found, reads_with_device, _ = train_scaled(me, plan, "ddp")
    assert reads == reads_with_device == STEPS
    return distance(expected, found)


@needs_emulated
def test_a_plan_takes_the_scale_out_of_what_the_device_encodes(pools):
    assert pools(4).run(train_plan_scaled_both, plan=MIXED) == [0.0] * 4


def train_scaled_both(me, plan, front_end):
    expected, reads, _ = train_scaled(me, plan, front_end)
    assert reads == STEPS
    with emulated_device():
        found, reads, runs_on = train_scaled(me, plan, front_end)
    return distance(found, expected), reads, runs_on


@needs_emulated
@pytest.mark.parametrize("front_end", ["ddp", "reducer"])
@pytest.mark.parametrize(
    "codec", ["sign(min_elems=0)", "topk(density=0.1, min_elems=0)", "cast(bf16)", "acp(rank=2)", "power(rank=2)"]
)
def test_the_scale_of_the_loss_is_read_on_the_device(pools, codec, front_end):
    for error, reads, runs_on in pools(2).run(train_scaled_both, plan=codec, front_end=front_end):
        assert error < 1e-3 if codec in LOW_RANK else error == 0
        assert reads == 0
        assert runs_on == ("cpu" if codec.startswith("cast") else "device")


def skip_on_device(me, plan):
    with emulated_device():
        return skip_under_scaler(me, plan)


@needs_emulated
@pytest.mark.parametrize("codec", ["acp(rank=2)", "topk(density=0.1, min_elems=0)"])
def test_a_step_that_the_scaler_skips_is_skipped_everywhere(pools, codec):
    (error, scales), (_, other_scales) = pools(2).run(skip_on_device, plan=codec)
    assert scales == other_scales and scales[4] < scales[3]
    assert error < 1e-5


def resume(me, plan):
    """Residuals, bases and step of a run go on in another one."""
    with emulated_device():
        first = me.attach(make_net(), plan)
        train(me, first, 3)
        state = first.cortado.state_dict()
        second = me.attach(make_net(), plan)
        second.load_state_dict(first.state_dict())
        second.cortado.load_state_dict(state)
        for model in (first, second):
            train(me, model, range(3, 6), torch.optim.SGD(model.parameters(), lr=0.05))
        return distance(parameters_of(first.module), parameters_of(second.module))


@needs_emulated
@pytest.mark.parametrize("codec", ["acp(rank=2)", "topk(density=0.1, min_elems=0)"])
def test_resumes_from_a_checkpoint(pools, codec):
    assert pools(2).run(resume, plan=codec) == [0, 0]


# ---- what a device can't be asked for


def capture(me, front_end):
    """A step while a graph is being captured, as far as the adapters can tell: rank 1 tries it, and then all train.

    Through DDP, which does not take up a backward pass that was broken off, a bucket's gradients are given by hand.
    """
    net = make_net()
    model = me.attach(net, "acp") if front_end == "ddp" else reduced(me, net, "acp")
    refused = None
    if me.rank == 1:
        before = cortado.attachment.is_capturing
        cortado.attachment.is_capturing = lambda device: device == IN_MEMORY
        if front_end == "ddp":
            refused = error_of(model.cortado.on_bucket, None)
        elif front_end == "reducer":
            refused = error_of(loss_of(model, make_batch(me.rank, 0)).backward)
        else:
            refused = error_of(model.cortado.wait)
        cortado.attachment.is_capturing = before
    twin = make_net()
    if front_end == "ddp":
        train(me, model, STEPS)
        train(me, me.attach(twin, "acp"), STEPS)
    else:
        train_reduced(me, model, STEPS)
        train_reduced(me, reduced(me, twin, "acp"), STEPS)
    return refused, distance(parameters_of(net), parameters_of(twin))


@pytest.mark.parametrize("front_end", ["ddp", "reducer", "wait"])
def test_a_graph_that_is_being_captured_gets_an_error_and_ends_nothing(pools, front_end):
    (_, other), ((kind, text), difference) = pools(2).run(capture, front_end=front_end)
    assert (other, difference) == (0, 0)
    assert kind == "CortadoError" and "make_graphed_callables" in text, text


def test_only_streams_of_a_device_are_asked_whether_they_are_captured(monkeypatch):
    assert not is_capturing(ON_A_GPU)  # no device has been used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing(ON_A_GPU) and not is_capturing(IN_MEMORY)


class NotingStream:
    """Remembers which streams it was made to wait for."""

    def __init__(self, address):
        self.cuda_stream = address
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.mark.parametrize(
    "call, engine_waits",
    [
        (lambda transfers: transfers.when_fetched(lambda: None), True),
        (lambda transfers: transfers.send(torch.ones(2), torch.ones(2)), False),
        (lambda transfers: transfers.join(), False),
        (lambda transfers: transfers.complete(torch.futures.Future(), None), False),
    ],
    ids=["when_fetched", "send", "join", "complete"],
)
def test_a_caller_on_another_stream_and_the_engine_wait_for_each_other(call, engine_waits):
    engines, callers = NotingStream(1), NotingStream(2)
    compute = ComputeStream(ON_A_GPU)
    compute._cuda = SimpleNamespace(current_stream=lambda _: current)
    transfers = DeviceEngineTransfers(compute)
    current = engines
    transfers.begin(lambda: None)
    assert transfers.device_stream == 1
    call(transfers)
    current = callers
    assert not engines.waited_for and not callers.waited_for  # a stream is in order with itself
    call(transfers)
    assert (engines.waited_for, callers.waited_for) == (([callers], []) if engine_waits else ([], [engines]))
