# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""KFAC on several ranks: strategies, compression, with and without DDP, saving, and ranks that fail."""

import contextlib
import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace

import cortado
import pytest
import torch
import torch.distributed as dist
from cases import repeated
from nets import loss_of, make_batch, make_net
from ranks import fingerprint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import prune

STRATEGIES = [
    {"strategy": "comm-opt"},
    {"grad_worker_fraction": 0.5},
    {"strategy": "mem-opt"},
    {"strategy": "dp-kfac"},
]
LOSSY = {"compression": "compso(bound=0.02)", "error_feedback": True, "factor_compression": "quant(bits=8)"}


def longest_wait(pools, scenario, **options):
    """Seconds that the scenario, which ends in an error, says of the slower one of two ranks. Their pool ends too."""
    try:
        return max(pools(2).run(scenario, timeout_s=60, **options))
    finally:
        pools(2).close()


def make_model(me, uses_ddp, seed=0):
    net = make_net(seed)
    if uses_ddp:
        return me.wrap(net)
    me._models.append(net)  # compared when the scenario ends
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    return net


def make_run(me, options, uses_ddp=True, seed=0):
    model = make_model(me, uses_ddp, seed)
    options = {"inv_update_steps": 2, "lr": 0.05, "timeout_s": 20, **options}
    kfac = cortado.KFAC(model, verbose=False, **options)
    return model, kfac, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(me, run, steps):
    model, kfac, optimizer = run
    for step in steps if not isinstance(steps, int) else range(steps):
        optimizer.zero_grad()
        loss_of(model, make_batch(me.rank, step)).backward()
        kfac.step()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def weights_after(me, options, uses_ddp=True, steps=4):
    return train(me, make_run(me, options, uses_ddp), steps).numpy()


def bits_after(me, options, uses_ddp=True, steps=4):
    run = make_run(me, options, uses_ddp)
    train(me, run, steps)
    return fingerprint(run[0])


def test_strategies_that_average_factors_agree(pools):
    weights = [
        torch.from_numpy(pools(4).run(weights_after, options=options, uses_ddp=uses_ddp)[0])
        for options in STRATEGIES[:3]
        for uses_ddp in (True, False)
    ]
    start = torch.cat([p.detach().flatten() for p in make_net().parameters()])
    for other in weights[1:]:
        assert (other - weights[0]).norm() < 1e-4 * (weights[0] - start).norm()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("uses_ddp", [True, False])
def test_replicas_stay_equal_whatever_is_lost(pools, world_size, uses_ddp):
    for options in STRATEGIES:
        if options.get("grad_worker_fraction") and world_size % 2:  # 4 ranks: two rows, two columns
            continue
        pools(world_size).run(bits_after, options={**options, **LOSSY}, uses_ddp=uses_ddp, steps=3)


@pytest.mark.parametrize("options", STRATEGIES[1:])
def test_at_bound_0_no_bit_changes(pools, options):
    plain = pools(4).run(bits_after, options=options)
    lossless = {**options, "compression": "compso(bound=0)", "error_feedback": True}
    assert pools(4).run(bits_after, options=lossless) == plain


def owes(me, error_feedback):
    run = make_run(me, {**LOSSY, "error_feedback": error_feedback, "strategy": "mem-opt"})
    train(me, run, 1)
    return any(bool(layer["residual"].any()) for layer in run[1].state_dict()["layers"].values() if "residual" in layer)


def test_only_with_error_feedback_something_is_owed(pools):
    assert any(pools(2).run(owes, error_feedback=True))
    assert not any(pools(2).run(owes, error_feedback=False))


def report_after(me, options, uses_ddp, steps=5):
    run = make_run(me, options, uses_ddp)
    train(me, run, steps)
    return run[1].report().to_dict()["traffic"]


def test_what_travels(pools):
    sizes = {"0": (25, 40), "2": (41, 32), "4": (33, 8)}
    gradient = sum(4 * a * g for a, g in sizes.values())
    triangles = sum(2 * (a * (a + 1) + g * (g + 1)) + 8 for a, g in sizes.values())  # and two counts a layer
    plain = pools(4).run(report_after, options={"strategy": "mem-opt"}, uses_ddp=False)
    for traffic in plain:
        assert traffic["factors"]["payload_bytes"] == triangles
        assert traffic["reduced_gradients"]["payload_bytes"] == gradient
        assert traffic["gradients"]["collectives"] == traffic["factors"]["collectives"] == 1
        assert traffic["gradients"]["messages"] == 5 and traffic["factors"]["messages"] == 5
    assert sum(traffic["gradients"]["dense_bytes"] for traffic in plain) == gradient
    for traffic in pools(4).run(report_after, options={"strategy": "comm-opt"}, uses_ddp=True):
        assert traffic["reduced_gradients"]["messages"] == 0
        assert traffic["inverses"]["messages"] == 3
        assert traffic["gradients"]["payload_bytes"] == 0
    packed = pools(4).run(report_after, options={"compression": "quant(bits=4)"}, uses_ddp=True)
    for traffic in packed:
        if traffic["gradients"]["dense_bytes"]:
            assert 6 < traffic["gradients"]["dense_bytes"] / traffic["gradients"]["payload_bytes"] < 8
            assert 0.05 < traffic["gradients"]["relative_error"] < 0.25


def schedule(me):
    run = make_run(me, {"compression": lambda step: "compso(bound=0.1)" if step < 2 else "compso(bound=0)"})
    errors = []
    for step in range(4):
        train(me, run, [step])
        errors.append(run[1].report().to_dict()["traffic"]["gradients"]["relative_error"])
    return errors


def test_schedules_of_the_bound(pools):
    for errors in pools(2).run(schedule):
        assert errors[0] > 0 and errors[1] > 0 and errors[2:] == [0, 0]


def factor_schedule(me):
    run = make_run(me, {"factor_compression": lambda step: "quant(bits=8)" if step < 2 else "none", "threads": 2})
    errors = []
    for step in range(4):
        train(me, run, [step])
        errors.append(run[1].report().to_dict()["traffic"]["factors"]["relative_error"])
    assert run[1].report().to_dict()["factor_compression"] == "none"
    return errors


def test_schedules_of_the_codec_of_factors(pools):
    for errors in pools(2).run(factor_schedule):
        assert errors[0] > 0 and errors[1] > 0 and errors[2:] == [0, 0]


def factor_schedules_differ(me):
    other = "none" if me.rank == 1 else "quant(bits=8)"
    run = make_run(me, {"factor_compression": lambda step: "none" if step < 2 else other}, uses_ddp=False)
    train(me, run, 2)
    me._models.clear()
    begin = time.monotonic()
    with pytest.raises(cortado.CortadoError, match="factors none") as raised:
        train(me, run, [2])
    assert "factors quant" in str(raised.value)
    return time.monotonic() - begin


def test_schedules_of_the_codec_of_factors_that_differ_are_an_error_everywhere(pools):
    assert longest_wait(pools, factor_schedules_differ) < 10  # timeout_s is 20


def link(ns_per_byte):
    """A cluster of two ranks."""
    curve = {"bytes": [1000, 10**6], "time_ns": [1000 * ns_per_byte, 10**6 * ns_per_byte]}
    kinds = ("all_gather", "all_to_all", "reduce_scatter")
    times = {"codec": "compso(bound=4e-3)", "device": "cpu", "elems": [1000, 10**6], "time_ns": [5000, 5 * 10**6]}
    return {
        "format": "cortado.cluster/1",
        "name": "two",
        "levels": [{"name": "all", "ranks": 2, "collectives": {kind: curve for kind in kinds}}],
        "codecs": [{**times, "direction": direction} for direction in ("encode", "decode")],
    }


def choose(me, cluster, folder, steps):
    if cluster is not None and me.rank == 1:  # as a file, here
        (path := Path(folder) / "cluster.json").write_text(json.dumps(cluster))
        cluster = path
    options = {"compression": "auto", "factor_compression": "auto", "cluster": cluster}
    run = make_run(me, {"candidates": ["compso(bound=4e-3)"], **options}, uses_ddp=False)
    train(me, run, steps)
    return run[1].report().to_dict()["auto"], str(run[1].report())


def test_auto_tries_compression_where_a_slow_link_is_predicted_to_gain(pools, tmp_path):
    for ns_per_byte, codec in ((100, "compso(bound=4e-3)"), (1, "none")):
        values = pools(2).run(choose, cluster=link(ns_per_byte), folder=str(tmp_path), steps=3)
        for choices, text in values:
            assert set(choices) == {"factors", "gradients"}  # MEM-OPT
            for kind, choice in choices.items():
                assert choice["codec"] == codec, choice
                assert (choice["predicted_ns"] < choice["predicted_uncompressed_ns"]) == (codec != "none")
                assert choice["reason"] == values[0][0][kind]["reason"] and choice["reason"] in text


def test_auto_measures_links_and_codecs_itself(pools, tmp_path):
    for choices, text in pools(2).run(choose, cluster=None, folder=str(tmp_path), steps=1):
        for choice in choices.values():
            assert choice["predicted_uncompressed_ns"] > 0 and choice["reason"]
        assert "auto, gradients" in text and " predicted" in text


def test_auto_lets_the_clock_decide(pools, tmp_path):
    for choices, text in pools(2).run(choose, cluster=link(100), folder=str(tmp_path), steps=25):
        for choice in choices.values():
            gains = choice["measured_ns"] <= 0.8 * choice["measured_uncompressed_ns"]
            assert choice["measured_ns"] > 0
            assert choice["codec"] == ("compso(bound=4e-3)" if gains else "none")
            assert choice["reason"].startswith("uncompressed, as it gains too little: ") != gains
        assert ", measured " in text


def choose_with_a_schedule(me):
    options = {"compression": "auto", "cluster": link(100), "strategy": "mem-opt"}
    options["candidates"] = lambda step: "compso(bound=4e-3)" if step < 2 else "compso(bound=2e-2)"
    run = make_run(me, options, uses_ddp=False)
    codecs = []
    for step in range(3):  # of the first round on trial, those that are compressed
        train(me, run, [step])
        codecs.append(run[1].report().to_dict()["auto"]["gradients"]["codec"])
    return codecs


def a_candidate_differs_later(me):
    options = {"compression": "auto", "cluster": link(100), "strategy": "mem-opt"}
    options["candidates"] = lambda step: f"compso(bound={2e-2 if step * me.rank else 4e-3})"
    run = make_run(me, options, uses_ddp=False)
    train(me, run, 1)
    begin = time.monotonic()
    with pytest.raises(
        cortado.MismatchError, match=r'rank 1 has "gradients auto, factors none, candidate compso\(bound=0.02\)"'
    ):
        train(me, run, [1])
    me._models.clear()
    return time.monotonic() - begin


def test_a_candidate_that_differs_on_one_rank_ends_all(pools):
    assert max(pools(2).run(a_candidate_differs_later)) < 10  # timeout_s is 20


def test_candidates_of_auto_may_follow_a_schedule(pools):
    for codecs in pools(2).run(choose_with_a_schedule):
        assert codecs == ["compso(bound=4e-3)", "compso(bound=4e-3)", "compso(bound=2e-2)"]


# ---- loss scaling ----------------------------------------------------------------------------------------------------


def train_scaled(me, uses_ddp, overflow_rank, in_one_layer):
    """The scaler's decisions of four steps, the second of which overflows on one rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    model = make_model(me, uses_ddp)
    kfac = cortado.KFAC(model, strategy="mem-opt", grad_scaler=scaler, verbose=False, timeout_s=20, **LOSSY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales = []
    if in_one_layer:  # one that is preconditioned, whose gradients are no part of the message in which ranks agree
        first = next(model.parameters())
        first.register_hook(lambda gradient: gradient / 0 if step == 1 and me.rank == overflow_rank else None)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(me.rank, step))
        overflows = step == 1 and me.rank == overflow_rank and not in_one_layer
        scaler.scale(loss * (1e38 if overflows else 1)).backward()
        kfac.synchronize()
        scaler.unscale_(optimizer)
        kfac.step()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return scales


@pytest.mark.parametrize("uses_ddp, in_one_layer", [(True, False), (False, False), (False, True)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pools, uses_ddp, in_one_layer):
    for scales in pools(3).run(train_scaled, uses_ddp=uses_ddp, overflow_rank=1, in_one_layer=in_one_layer):
        assert scales == [256.0, 128.0, 128.0, 128.0]


def poison(me, overflow_rank, is_preconditioned):
    """Without a GradScaler; the gradients after a step with an Inf, on one rank in one parameter."""
    options = {"strategy": "mem-opt", "skip_layers": () if is_preconditioned else ("^0$",)}
    model, kfac, optimizer = run = make_run(me, options, uses_ddp=False)
    train(me, run, 1)  # there is momentum now
    optimizer.zero_grad()
    loss_of(model, make_batch(me.rank, 1)).backward()
    assert ("0" in kfac.skipped) != is_preconditioned
    if me.rank == overflow_rank:
        next(model.parameters()).grad.view(-1)[0] = float("inf")
    assert not kfac.step()
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.step()  # by a user who did not look
    me.assert_replicas_are_identical()
    train(me, run, [2])
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("is_preconditioned", [True, False])
def test_gradients_are_zero_after_a_step_that_was_not_finite(pools, is_preconditioned):
    pools(3).run(poison, overflow_rank=1, is_preconditioned=is_preconditioned)


def forget_to_synchronize(me, gives_function):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = make_model(me, uses_ddp=False)
    given = scaler.get_scale if gives_function else scaler
    kfac = cortado.KFAC(model, grad_scaler=given, verbose=False, timeout_s=20)
    scaler.scale(loss_of(model, make_batch(me.rank, 0))).backward()
    with pytest.raises(cortado.SpecError, match="call kfac.synchronize.. after the backward pass"):
        kfac.step()
    is_off = torch.amp.GradScaler("cpu", enabled=False)
    other = make_model(me, uses_ddp=False)
    kfac = cortado.KFAC(other, grad_scaler=is_off, verbose=False, timeout_s=20, process_group=dist.new_group())
    loss_of(other, make_batch(me.rank, 0)).backward()
    assert kfac.step()
    kfac.detach()
    static = SimpleNamespace(get_scale=lambda: 8.0)  # leaves out no step
    kfac = cortado.KFAC(other, grad_scaler=static, verbose=False, timeout_s=20, process_group=dist.new_group())
    loss_of(other, make_batch(me.rank, 0)).backward()
    assert kfac.step()


@pytest.mark.parametrize("gives_function", [False, True])
def test_a_scaler_without_synchronize_is_refused(pools, gives_function):
    try:
        pools(2).run(forget_to_synchronize, gives_function=gives_function)
    finally:
        pools(2).close()


def reduce_a_part(me):
    model = make_model(me, uses_ddp=False)
    reducer = cortado.Reducer(list(model[0].named_parameters()), "none", verbose=False)
    kfac = cortado.KFAC(model, verbose=False, timeout_s=20)
    loss_of(model, make_batch(me.rank, 0)).backward()
    reducer.wait()
    with pytest.raises(cortado.SpecError, match="averages the gradients of 2 of the 8 parameters"):
        kfac.step()
    me._models.clear()


def test_a_reducer_of_a_part_of_the_model_is_refused(pools):
    try:
        pools(2).run(reduce_a_part)
    finally:
        pools(2).close()


def step_before_wait(me, syncs):
    model = make_model(me, uses_ddp=False)
    reducer = cortado.Reducer(model, "none", verbose=False)
    kfac = cortado.KFAC(model, verbose=False, timeout_s=20)
    for step in range(2):
        model.zero_grad()
        with contextlib.nullcontext() if syncs or step == 0 else reducer.no_sync():
            loss_of(model, make_batch(me.rank, step)).backward()
        if step == 0:
            reducer.wait()
            assert kfac.step()
    with pytest.raises(cortado.CortadoError, match=r"kfac.step\(\) comes after reducer.wait\(\)"):
        kfac.step()
    me._models.clear()


@pytest.mark.parametrize("syncs", [True, False])
def test_a_step_before_the_wait_of_a_reducer_is_refused(pools, syncs):
    try:
        pools(2).run(step_before_wait, syncs=syncs)
    finally:
        pools(2).close()


def two_reducers(model):
    """Between them they have all parameters."""
    return [cortado.Reducer(list(part.named_parameters()), "none", verbose=False) for part in (model[:3], model[3:])]


def close_one_of_two(me, which):
    model = make_model(me, uses_ddp=False)
    reducers = two_reducers(model)
    kfac = cortado.KFAC(model, verbose=False, timeout_s=20)
    for step in range(2):
        model.zero_grad()
        loss_of(model, make_batch(me.rank, step)).backward()
        for reducer in reducers:
            reducer.wait()
        if step == 0:
            assert kfac.step()
            reducers.pop(which).close()
    with pytest.raises(cortado.SpecError, match=r"averages the gradients of \d of the 8 parameters"):
        kfac.step()
    me._models.clear()


@pytest.mark.parametrize("which", [0, 1])
def test_the_closing_of_one_of_two_reducers_is_noticed(pools, which):
    try:
        pools(2).run(close_one_of_two, which=which)
    finally:
        pools(2).close()


def stop_averaging(me, how):
    """What has averaged the gradients goes, while KFAC stays."""
    model = make_model(me, uses_ddp=False)
    if how == "close":
        holder = cortado.Reducer(model, "none", verbose=False)
    else:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        holder = cortado.attach(ddp, "none", verbose=False)
        del ddp
        gc.collect()
    kfac = cortado.KFAC(model, lr=0.05, timeout_s=20, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if how == "close":
        loss_of(model, make_batch(me.rank, 0)).backward()
        holder.wait()
        kfac.step()
        holder.close()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, make_batch(me.rank, step)).backward()
        kfac.step()
        optimizer.step()
    return fingerprint(model)


@pytest.mark.parametrize("how", ["close", "drop the DDP"])
def test_step_averages_once_nobody_else_does(pools, how):
    first, second = pools(2).run(stop_averaging, how=how)
    assert first == second


def wide_head(me):
    """What is left alone may be float64, and larger than float32 can be."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1).double())
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    kfac = cortado.KFAC(net, lr=0.05, timeout_s=20, verbose=False)
    hidden = net[0](torch.ones(2, 4))
    (hidden.sum() + net[1](hidden.detach().double()).sum() * 1e50 * (1 + me.rank)).backward()
    own = net[1].bias.grad.clone()
    kfac.step()
    return torch.equal(net[1].bias.grad, sum(me.gather(own)) / me.world_size)


def test_what_is_left_alone_may_be_float64(pools):
    assert all(pools(2).run(wide_head))


def sparse_gradients(me):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 5, sparse=True), torch.nn.Linear(5, 3))
    kfac = cortado.KFAC(model, verbose=False, timeout_s=20)
    begin = time.monotonic()
    if me.rank == 1:  # rank 0 has no gradient of the embedding
        model(torch.tensor([1, 2])).square().mean().backward()
    else:
        model[1](torch.randn(2, 5)).square().mean().backward()
    with pytest.raises(cortado.CortadoError, match=r'that of "0.weight" is torch.sparse_coo'):
        kfac.step()
    return time.monotonic() - begin


def test_sparse_gradients_are_refused_on_all_ranks(pools):
    assert longest_wait(pools, sparse_gradients) < 10  # timeout_s is 20


def complex_parameter(me, is_frozen):
    """That of a Fourier layer, say."""
    model = make_model(me, uses_ddp=False)
    model[1].register_parameter("phases", torch.nn.Parameter(torch.ones(3, dtype=torch.complex64), not is_frozen))
    kfac = cortado.KFAC(model, verbose=False, timeout_s=20)
    begin = time.monotonic()
    loss_of(model, make_batch(me.rank, 0)).backward()
    if is_frozen:
        assert kfac.step()
    else:
        with pytest.raises(cortado.SpecError, match='step.. averages real gradients, "1.phases" is torch.complex64'):
            kfac.step()
    me._models.clear()
    return time.monotonic() - begin


def test_complex_gradients_are_refused(pools):
    assert longest_wait(pools, complex_parameter, is_frozen=False) < 10  # timeout_s is 20


def test_a_complex_parameter_that_is_frozen_is_none_of_the_gradients(pools):
    pools(2).run(complex_parameter, is_frozen=True)


def scale_goes_wrong(me, scale):
    model = make_model(me, uses_ddp=False)
    kfac = cortado.KFAC(model, grad_scaler=lambda: scale if me.rank == 1 else 8.0, verbose=False, timeout_s=20)
    begin = time.monotonic()
    with pytest.raises(cortado.CortadoError, match="grad_scaler must give a scale above 0 and below Inf"):
        (8 * loss_of(model, make_batch(me.rank, 0))).backward()
        kfac.step()
    me._models.clear()
    return time.monotonic() - begin


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_a_scale_that_goes_wrong_on_one_rank_ends_all(pools, scale):
    assert longest_wait(pools, scale_goes_wrong, scale=scale) < 10  # timeout_s is 20


def within_a_subgroup(me):
    """Ranks 0 and 2 of three; what a world of two gets."""
    group = dist.new_group([0, 2]) if me.world_size == 3 else None
    if me.world_size == 3 and me.rank == 1:
        return None
    rank = me.rank // 2 if me.world_size == 3 else me.rank
    model = make_net(0)
    kfac = cortado.KFAC(model, strategy="mem-opt", process_group=group, verbose=False, timeout_s=20, **LOSSY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, step)).backward()
        kfac.step()
        optimizer.step()
    return fingerprint(model)


def test_a_subgroup(pools):
    whole = pools(2).run(within_a_subgroup)
    part = pools(3).run(within_a_subgroup)
    assert part == [whole[0], None, whole[0]] and whole[0] == whole[1]


def ranks_disagree_on_auto(me, what):
    model = make_net(0)
    begin = time.monotonic()
    options = {"compression": "auto", "candidates": ["compso(bound=4e-3)"]}
    if what in ("candidates", "misspelt"):
        other = "compso(bound=2e-2)" if what == "candidates" else "compsso"
        options["candidates"] = [lambda step: other if me.rank == 1 else "compso(bound=4e-3)"]
        text = f'candidates of "auto" differ: rank 0 has .*, rank 1 has .*{other}'.replace("(", "\\(").replace(
            ")", "\\)"
        )
        error = cortado.MismatchError if me.rank == 0 or what == "candidates" else cortado.SpecError
        with pytest.raises(error, match=text if what == "candidates" else "compsso"):
            cortado.KFAC(model, verbose=False, timeout_s=20, **options)
        return time.monotonic() - begin
    if what == "auto":
        options = options if me.rank == 1 else {}
        text = 'whether "auto" chooses a codec differs: ranks have False, True'
    else:
        options["cluster"] = link(1) if me.rank == 0 else None
        text = "whether a cluster is given differs: ranks have True, False"
    with pytest.raises(cortado.MismatchError, match=text):
        cortado.KFAC(model, verbose=False, timeout_s=20, **options)
    return time.monotonic() - begin


@pytest.mark.parametrize("what", ["auto", "cluster", "candidates", "misspelt"])
def test_ranks_must_agree_on_auto(pools, what):
    assert max(pools(2).run(ranks_disagree_on_auto, what=what)) < 10


def leave_out_the_step(me, overflows, resets):
    """Behind synchronize(), as a loop does that asks a scaler or looks at the norm; the next step averages anew."""
    model, kfac, optimizer = run = make_run(me, {"strategy": "mem-opt"}, uses_ddp=False)
    train(me, run, 1)
    optimizer.zero_grad()
    loss_of(model, make_batch(me.rank, 1)).backward()
    if overflows and me.rank == 1:
        next(model.parameters()).grad.view(-1)[0] = float("inf")
    later = loss_of(model, make_batch(me.rank, 2))
    kfac.synchronize()
    optimizer.zero_grad()
    if resets:  # so that nothing depends on a backward pass
        kfac.reset_batch()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * me.rank)
    else:
        later.backward()
    assert kfac.step()
    optimizer.step()
    assert kfac.report().to_dict()["traffic"]["reduced_gradients"]["messages"] == (2 if overflows else 3)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_a_step_that_is_left_out_behind_synchronize(pools, overflows, resets):
    pools(2).run(leave_out_the_step, overflows=overflows, resets=resets)


def drop_behind_synchronize(me):
    model, kfac, _ = make_run(me, {}, uses_ddp=False)
    loss_of(model, make_batch(me.rank, 0)).backward()
    kfac.synchronize()
    kfac.reset_batch()
    del kfac
    cortado.KFAC(model, verbose=False)


def test_a_kfac_that_is_dropped_behind_synchronize_is_gone(pools):
    pools(2).run(drop_behind_synchronize)


def look_at_the_loss(me, is_behind):
    """Two micro-batches a step, and forward passes without a backward pass behind synchronize(), or before it."""
    model, kfac, optimizer = make_run(me, {"strategy": "mem-opt"}, uses_ddp=False)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            loss_of(model, make_batch(me.rank, 2 * step + micro)).backward()
        if is_behind:
            kfac.synchronize()
        loss = loss_of(model, make_batch(me.rank, 100))
        if me.rank == 0:  # touches no .grad
            torch.autograd.grad(loss, next(model.parameters()))
        loss_of(model.eval(), make_batch(me.rank, 100))
        model.train()
        kfac.synchronize()
        kfac.step()
        optimizer.step()
    assert kfac.report().to_dict()["traffic"]["reduced_gradients"]["messages"] == 3
    return fingerprint(model)


def test_forward_passes_behind_synchronize_average_nothing_again(pools):
    assert pools(2).run(look_at_the_loss, is_behind=True) == pools(2).run(look_at_the_loss, is_behind=False)


def spoil(me, averaging):
    """Inf on one rank in the second step; what the factors, the counters and the verdicts are then."""
    model = make_model(me, averaging.startswith("DistributedDataParallel"))
    if averaging.endswith("by a hook"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    reducers = [cortado.Reducer(model, "none", verbose=False)] if averaging == "cortado.Reducer" else []
    reducers = two_reducers(model) if averaging == "cortado.Reducer, two of them" else reducers
    options = {"reduce_gradients": False} if averaging == "the caller" else {}
    kfac = cortado.KFAC(model, strategy="mem-opt", verbose=False, timeout_s=20, **options)
    assert f"averaged by {averaging.partition(',')[0]}" in kfac.describe().replace("cortado.attach or ", "")
    verdicts, factors = [], []
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model, make_batch(me.rank, step))
        (loss * (float("inf") if step == 1 and me.rank == 1 else 1)).backward()
        for reducer in reducers:
            reducer.wait()
        for parameter in model.parameters() if averaging == "the caller" else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= me.world_size
        verdicts.append(kfac.step())
        layers = kfac.state_dict()["layers"].values()
        factors.append([values for layer in layers for values in layer.values()])
    stayed = all(torch.equal(*pair) for pair in zip(*factors[:2], strict=True))
    return verdicts, kfac.steps, kfac.report().to_dict()["non_finite_steps"], stayed


@pytest.mark.parametrize(
    "averaging",
    [
        "DistributedDataParallel",
        "DistributedDataParallel, by a hook",  # which may not average
        "cortado.Reducer",
        "cortado.Reducer, two of them",
        "step()",
        "the caller",
    ],
)
def test_a_step_that_is_not_finite_leaves_factors_alone(pools, averaging):
    is_known = averaging in ("DistributedDataParallel", "step()") or averaging.startswith("cortado.Reducer")
    for outcome in pools(3).run(spoil, averaging=averaging):
        assert outcome[:3] == ([True, False, True], 2 if is_known else 3, 1)
        assert outcome[3] or not is_known


def freeze(me, how):
    """The weight of a layer, after KFAC was made; its bias goes on learning."""
    model, kfac, _ = run = make_run(me, {"strategy": "mem-opt"}, uses_ddp=False)
    train(me, run, 1)
    if how == "frozen":
        model[2].weight.requires_grad_(False)
    else:
        prune.l1_unstructured(model[2], "weight", amount=0.5)
    before = model[2].bias.detach().clone()
    train(me, run, [1, 2])
    assert not torch.equal(model[2].bias, before)


@pytest.mark.parametrize("how", ["frozen", "pruned"])
def test_the_bias_of_a_weight_that_is_frozen_later_is_averaged(pools, how):
    pools(2).run(freeze, how=how)


def who_averages(me):
    text = cortado.KFAC(make_net(), verbose=False).describe()
    assert "gradients are averaged by step(), or by a cortado.Reducer" in text and "give KFAC the DDP module" in text
    text = cortado.KFAC(make_net(), reduce_gradients=False, verbose=False).describe()
    assert "averaged by the caller, before step() (reduce_gradients=False)" in text
    assert "averaged by step()\n" in cortado.KFAC(make_net(), reduce_gradients=True, verbose=False).describe()


def test_the_start_says_who_averages_gradients(pools):
    pools(2).run(who_averages)


# ---- saving ----------------------------------------------------------------------------------------------------------


def resume(me, options, folder, uses_ddp):
    ends = []
    run = make_run(me, options, uses_ddp)
    train(me, run, 6)
    ends.append(fingerprint(run[0]))
    run = make_run(me, options, uses_ddp)
    train(me, run, 3)
    names = ("model", "kfac", "optimizer")
    torch.save({n: part.state_dict() for n, part in zip(names, run, strict=True)}, f"{folder}/{me.rank}.pt")
    run = make_run(me, options, uses_ddp, seed=5)
    saved = torch.load(f"{folder}/{me.rank}.pt", weights_only=True)
    for name, part in zip(names, run, strict=True):
        part.load_state_dict(saved[name])
    train(me, run, range(3, 6))
    return ends + [fingerprint(run[0])]


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("uses_ddp", [True, False])
def test_training_resumes_bit_for_bit(pools, tmp_path, options, uses_ddp):
    for first, second in pools(2).run(resume, options={**options, **LOSSY}, folder=str(tmp_path), uses_ddp=uses_ddp):
        assert first == second


def save_states(me, folder):
    run = make_run(me, {"strategy": "mem-opt"})
    train(me, run, 3)
    torch.save(run[1].state_dict(), f"{folder}/{me.rank}.pt")


def load_states(me, folder, files):
    states = [torch.load(f"{folder}/{number}.pt", weights_only=True) for number in files]
    _, kfac, _ = run = make_run(me, {"strategy": "comm-opt"})
    kfac.load_state_dict(states)
    train(me, run, [3])
    reasons = {f["reason"] for f in kfac.report().to_dict()["fallbacks"]}
    return kfac.steps, any("in no saved state" in reason for reason in reasons)


def test_states_of_another_world_size_and_strategy(pools, tmp_path):
    pools(3).run(save_states, folder=str(tmp_path))
    assert pools(2).run(load_states, folder=str(tmp_path), files=[0, 1, 2]) == [(4, False)] * 2
    partly = pools(2).run(load_states, folder=str(tmp_path), files=[0])
    assert [steps for steps, _ in partly] == [4, 4] and any(anew for _, anew in partly)


# ---- ranks that differ or fail ---------------------------------------------------------------------------------------


def ranks_differ(me):
    odd = me.rank == 1
    with pytest.raises(cortado.MismatchError, match="DP-KFAC"):
        cortado.KFAC(make_net(), strategy="dp-kfac" if odd else "mem-opt", verbose=False)
    with pytest.raises(cortado.SpecError if odd else cortado.MismatchError, match="strategy must be one of"):
        cortado.KFAC(make_net(), strategy="best" if odd else None, verbose=False)
    with pytest.raises(cortado.SpecError if odd else cortado.MismatchError, match="no layer of the model"):
        cortado.KFAC(make_net()[3] if odd else make_net(), verbose=False)


def test_ranks_that_differ_are_refused_everywhere(pools):
    pools(2).run(ranks_differ)


def rows_take_other_codecs(me):
    """HYBRID-OPT on four ranks: gradients travel within [0, 1] and within [2, 3]."""
    bits = 8 if me.rank < 2 else 4
    options = {"grad_worker_fraction": 0.5, "compression": lambda step: "none" if step < 2 else f"quant(bits={bits})"}
    run = make_run(me, options)
    train(me, run, 2)
    me._models.clear()
    with pytest.raises(cortado.MismatchError, match=r"step 2.*rank 2 has .*quant\(bits=4\)"):
        train(me, run, [2])


def test_rows_that_take_other_codecs_are_an_error_everywhere(pools):
    try:
        pools(4).run(rows_take_other_codecs)
    finally:
        pools(4).close()


def leave_out_a_step(me, strategy):
    """Rank 1 does, between updates, when with COMM-OPT nothing else travels."""
    options = {"strategy": strategy, "factor_update_steps": 10, "inv_update_steps": 10, "timeout_s": 5}
    run = make_run(me, options, uses_ddp=False)
    train(me, run, 2)
    me._models.clear()  # what the others end with is not compared
    if me.rank == 1:
        return "left"
    with pytest.raises(cortado.PeerError, match="no result within|did not answer|failed"):
        run[1]._core.step(0.95, 1e-3, 1e-3, 0.05, False, False, [(0, 0, 0)] * 3)
    return "error"


@pytest.mark.parametrize("strategy", ["comm-opt", repeated("mem-opt"), repeated("dp-kfac")])
def test_a_rank_that_leaves_out_a_step_is_an_error_elsewhere(pools, strategy):
    try:
        values = pools(2).run(leave_out_a_step, timeout_s=60, strategy=strategy)
        assert sorted(values) == ["error", "left"]
    finally:
        pools(2).close()


def update_in_another_step(me):
    """Over sockets, collectives that do not fit would end the process."""
    steps = {"factor_update_steps": lambda step: 1 + (me.rank == 1), "inv_update_steps": 10}
    run = make_run(me, {"strategy": "mem-opt", "timeout_s": 20, **steps}, uses_ddp=False)
    me._models.clear()
    with pytest.raises(cortado.CortadoError, match="step 1: ranks differ in factor_decay, .* what they update: rank"):
        train(me, run, 2)


def test_ranks_that_update_in_other_steps_are_an_error_everywhere(pools):
    try:
        pools(2).run(update_in_another_step)
    finally:
        pools(2).close()


def stay_away(me):
    """Rank 1 takes no part in the second step(), which averages gradients first."""
    model = make_model(me, uses_ddp=False)
    kfac = cortado.KFAC(model, strategy="mem-opt", verbose=False)
    for step in range(2):
        loss_of(model, make_batch(me.rank, step)).backward()
        if step == 0:
            kfac.step()
    me._models.clear()
    if me.rank == 1:
        return 0
    kfac._options["timeout_s"] = 3  # not of the step that must succeed
    kfac._group.set_timeout(3)
    begin = time.monotonic()
    for _ in range(2):  # nor is a gradient that was not averaged taken for one afterwards
        with pytest.raises(cortado.PeerError, match="step 1: averaging gradients: .*(rank 1 did not answer|failure)"):
            kfac.step()
    return time.monotonic() - begin


def test_a_rank_that_stays_away_while_gradients_are_averaged_is_an_error_elsewhere(pools):
    try:
        waits = pools(3).run(stay_away, timeout_s=60)
        assert max(waits) < 20  # timeout_s, and some seconds to find out who is missing
    finally:
        pools(3).close()


def change_a_shape(me):
    """Only on rank 1."""
    run = make_run(me, {"strategy": "mem-opt"}, uses_ddp=False)
    train(me, run, 1)
    model, kfac, _ = run
    me._models.clear()
    if me.rank == 1:
        layer = kfac._layers[0].module
        layer.weight = torch.nn.Parameter(torch.zeros(3, 3))
        layer.weight.grad = torch.zeros(3, 3)
    begin = time.monotonic()
    with pytest.raises(cortado.MismatchError if me.rank == 1 else cortado.CortadoError, match="had a weight of shape"):
        kfac._precondition()
    return time.monotonic() - begin


def test_a_weight_that_changes_its_shape_on_one_rank_ends_all(pools):
    assert longest_wait(pools, change_a_shape) < 10  # timeout_s is 20


def move_elsewhere(me, through):
    """Only on rank 1."""
    model, kfac, _ = run = make_run(me, {"strategy": "mem-opt"}, uses_ddp=False)
    train(me, run, 1)
    me._models.clear()
    inputs, labels = make_batch(me.rank, 1)
    begin = time.monotonic()
    with pytest.raises(cortado.SpecError if me.rank == 1 else cortado.CortadoError, match="are on meta"):
        if me.rank == 1:
            model.to("meta")
            inputs = inputs.to("meta") if through == "activations" else inputs
        if through == "activations":
            loss_of(model, (inputs, labels)).backward()
        kfac.step()
    return time.monotonic() - begin


def misname_a_codec(me, option):
    """Only on rank 1, and in the second step."""
    schedule = {option: lambda step: "nonsense" if me.rank == 1 and step > 0 else "none"}
    run = make_run(me, {"strategy": "mem-opt", **schedule}, uses_ddp=False)
    train(me, run, 1)
    begin = time.monotonic()
    with pytest.raises(cortado.SpecError if me.rank == 1 else cortado.CortadoError, match="nonsense"):
        train(me, run, 1)
    me._models.clear()
    return time.monotonic() - begin


@pytest.mark.parametrize("option", ["compression", "factor_compression"])
def test_a_codec_that_one_rank_misnames_ends_all(pools, option):
    assert longest_wait(pools, misname_a_codec, option=option) < 10  # timeout_s is 20


def intervals_differ(me, option):
    model = make_model(me, uses_ddp=False)
    with pytest.raises(cortado.MismatchError, match="every 3 steps"):
        cortado.KFAC(model, **{option: 2 + me.rank}, verbose=False)
    me._models.clear()


@pytest.mark.parametrize("option", ["factor_update_steps", "inv_update_steps"])
def test_ranks_that_update_in_different_steps_hear_it_at_the_start(pools, option):
    pools(2).run(intervals_differ, option=option)


def on_one_rank_later(me, good, bad):
    return lambda step: good if me.rank == 0 or step == 0 else bad()


WRONG = {"raises": lambda: 1 / 0, "zero": lambda: 0, "text": lambda: "much"}


def schedule_goes_wrong(me, option, how):
    """Only on rank 1, and in the second step."""
    good = {"compression": "none", "candidates": "compso(bound=4e-3)"}.get(option, 1)
    options = {"strategy": "mem-opt", option: on_one_rank_later(me, good, WRONG[how])}
    if option == "candidates":
        options.update(
            compression="auto", cluster=link(1) | {"levels": [link(1)["levels"][0] | {"ranks": me.world_size}]}
        )
    run = make_run(me, options, uses_ddp=False)
    train(me, run, 1)
    begin = time.monotonic()
    own = {"raises": ZeroDivisionError, "zero": cortado.SpecError, "text": ValueError}[how]
    text = {"raises": "division by zero", "zero": "must be", "text": "much"}[how]
    with pytest.raises(own if me.rank == 1 else cortado.CortadoError, match=text):
        train(me, run, 1)
    me._models.clear()
    return time.monotonic() - begin


@pytest.mark.parametrize(
    "option, how",
    [
        ("damping", "raises"),
        ("damping", "zero"),  # the C++ side says so
        ("lr", "text"),
        ("compression", "raises"),
        ("candidates", "raises"),
        ("factor_update_steps", "raises"),  # in the forward pass
        ("inv_update_steps", "zero"),
    ],
)
def test_a_schedule_that_goes_wrong_on_one_rank_ends_all(pools, option, how):
    assert longest_wait(pools, schedule_goes_wrong, option=option, how=how) < 10  # timeout_s is 20


def prune_a_layer(me):
    """Only on rank 1."""
    model, _, _ = run = make_run(me, {"strategy": "mem-opt"}, uses_ddp=False)
    train(me, run, 1)
    me._models.clear()
    inputs, labels = make_batch(me.rank, 1)
    if me.rank == 1:
        model[0].weight = torch.nn.Parameter(model[0].weight.detach()[:, :12].clone())
        inputs = inputs[:, :12]
    begin = time.monotonic()
    own = cortado.MismatchError if me.rank == 1 else cortado.CortadoError
    with pytest.raises(own, match=r"layer 0 had 24 inputs, now a tensor of shape \(4, 12\)"):
        loss_of(model, (inputs, labels)).backward()
        run[1].step()
    return time.monotonic() - begin


def test_a_layer_with_other_inputs_on_one_rank_ends_all(pools):
    assert longest_wait(pools, prune_a_layer) < 10  # timeout_s is 20


@pytest.mark.parametrize("through", ["activations", "gradients"])
def test_a_model_that_moves_on_one_rank_ends_all(pools, through):
    assert longest_wait(pools, move_elsewhere, through=through) < 10  # timeout_s is 20


def uneven_use(me):
    """Only rank 0 uses one of the branches in the second step, and without DDP."""
    torch.manual_seed(0)
    branch = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))  # the norm is not preconditioned
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": branch})
    me._models.append(net)
    kfac = cortado.KFAC(net, strategy="mem-opt", verbose=False, timeout_s=20)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        x = net["a"](torch.randn(5, 4, generator=torch.Generator().manual_seed(step + me.rank)))
        if step != 2 and (me.rank == 0 or step == 0):
            x = net["b"](x)
        x.square().mean().backward()
        kfac.step()
        assert all((part.weight.grad is None) == (step == 2) for part in branch)
        optimizer.step()


def test_a_layer_that_only_some_ranks_use(pools):
    pools(3).run(uneven_use)
