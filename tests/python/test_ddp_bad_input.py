# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: one clear error each, on every rank, that says what and what was expected."""

import json
import os
import pickle
import time

import cortado
import pytest
import torch
import torch.distributed as dist
from cortado import attachment
from nets import loss_of, make_batch, make_net, train
from ranks import Pool, fingerprint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision


def error_of(function, *args, **kwargs):
    """(type, text) of what it raises; None if nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def attach_each(me, plans, dtype=torch.float32):
    """Attaches with a plan for each rank; afterwards the model must train as if nobody had tried."""
    model = me.wrap(make_net().to(dtype))
    error = error_of(cortado.attach, model, plans[me.rank], verbose=False)
    if error is not None:
        train(me, model, 2)
        if len({str(plan) for plan in plans}) == 1 and dtype is torch.float32:
            assert error_of(cortado.attach, me.wrap(make_net()), "acp", verbose=False) is None
    return error


WRONG_PLANS = [
    ("gzip(level=3)", ['unknown codec "gzip"', "known are none, cast"]),
    ("acp(rnk=4)", ['no parameter "rnk"', "rank"]),
    ("none(rank=4)", ['no parameter "rank"', "timeout_s"]),
    ("acp(rank=0)", ["rank", "0", "1"]),
    ("acp(rank=four)", ["rank", "four"]),
    ("acp(rank=4", ["acp(rank=4"]),
    ("", ["codec"]),
    ("cast(fp8)", ["fp8", "bf16"]),
    ("acp(wire=int8)", ["wire", "int8", "bf16"]),
    ("acp(start_step=-1)", ["start_step", "-1"]),
    ("acp(dense=[nowhere.weight])", ["nowhere.weight", "0.weight"]),
    ("acp(rank=4) | cast(bf16)", ["acp", "cast", "stand alone"]),
    ("topk | sign(start_step=3)", ["start_step", "sign takes"]),
    ("topk(momentum=0.5)", ["momentum", "feedback=dgc"]),
    ("sign(feedback=dgc)", ["feedback=dgc", "topk"]),
    ("auto(quality=best)", ["quality", "balanced", "best"]),
    ({"rank": 4}, ["codec", "rank"]),
    ({"codec": "acp", "rank": "four"}, ["rank", "four"]),
    (4, ["codec string", "int"]),
    (None, ["codec string", "NoneType"]),
    ("/no/such/plan.json", ["/no/such/plan.json", "No such file"]),
]


@pytest.mark.parametrize("plan, words", WRONG_PLANS, ids=lambda value: None if isinstance(value, list) else str(value))
def test_a_wrong_plan_is_refused_with_what_was_expected(pools, plan, words):
    for kind, text in pools(2).run(attach_each, plans=[plan] * 2):
        assert kind == "SpecError"
        assert all(word in text for word in words), text


def attach_unsupported(me, how):
    if how == "python_reducer":
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            model = torch.nn.parallel.DistributedDataParallel(make_net())
    else:
        options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
        model = torch.nn.parallel.DistributedDataParallel(make_net(), **options)
    return [
        error_of(cortado.attach, model, "acp", verbose=False),
        error_of(cortado.ddp_hook, "acp", model, verbose=False),
    ]


@pytest.mark.parametrize("how", ["python_reducer", "skip_all_reduce_unused_params"])
def test_what_ddp_calls_no_hook_for_is_refused(pools, how):
    try:
        for errors in pools(2).run(attach_unsupported, how=how):
            assert [(kind, how in text) for kind, text in errors] == [("SpecError", True)] * 2
    finally:
        pools(2).close()  # such a DDP changes how others are compiled


def skip_with_hook_of_the_module(me):
    net = torch.nn.ModuleDict({"unused": torch.nn.Linear(24, 24), "used": make_net()})  # DDP's last bucket
    state, hook = cortado.ddp_hook("acp(rank=2)", net, verbose=False)
    net.forward = net["used"].forward
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.001}
    model = torch.nn.parallel.DistributedDataParallel(net, **options)
    model.register_comm_hook(state, hook)
    return error_of(lambda: loss_of(model, make_batch(me.rank, 0)).backward())


def test_a_hook_of_the_module_refuses_it_in_the_first_step(pools):
    try:
        for kind, text in pools(2).run(skip_with_hook_of_the_module, timeout_s=30.0):  # it hung
            assert kind == "SpecError" and "skip_all_reduce_unused_params" in text
    finally:
        pools(2).close()


def hook_of_a_part_of_the_world(me, says_so):
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    own = groups[me.rank // 2]
    net = make_net()
    given = {"process_group": own} if says_so else {}
    state, hook = cortado.ddp_hook("acp(rank=2)", net, verbose=False, **given)
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=own)
    model.register_comm_hook(state, hook)
    return error_of(lambda: train(me, model, 3))


def test_a_hook_over_another_group_than_ddps_is_refused_in_the_first_step(pools):
    assert pools(3).run(hook_of_a_part_of_the_world, says_so=True) == [None] * 3
    try:
        for kind, text in pools(3).run(hook_of_a_part_of_the_world, says_so=False):
            assert kind == "SpecError" and "over the whole world" in text and "process_group must be" in text
    finally:
        pools(3).close()


def wrap_the_hook(me):
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    state, hook = cortado.ddp_hook("acp", model, verbose=False)
    model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook))
    return error_of(lambda: loss_of(model, make_batch(me.rank, 0)).backward())


def test_a_hook_around_this_one_is_refused_with_what_does_the_same(pools):
    try:
        for _, text in pools(2).run(wrap_the_hook):
            assert "fp16_compress_wrapper" in text and "wire=fp16" in text and "Convert" not in text
    finally:
        pools(2).close()


def resume_with_a_pickled_hook(me):
    state, hook = cortado.ddp_hook("acp", make_net(), verbose=False)
    loaded = pickle.loads(pickle.dumps({"state": state, "hook": hook}))
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    model.register_comm_hook(loaded["state"], loaded["hook"])
    return error_of(lambda: loss_of(model, make_batch(me.rank, 0)).backward())


def test_a_pickled_state_says_what_to_save(pools):
    try:
        for _, text in pools(2).run(resume_with_a_pickled_hook):
            assert "state_dict()" in text and "load_state_dict()" in text
    finally:
        pools(2).close()


def test_a_broken_plan_file_is_refused_with_its_path(pools, tmp_path):
    for content, word in (('{"codec": "acp",', "line 1"), ('["acp"]', "object"), ('{"rank": 4}', "codec")):
        path = tmp_path / "plan.json"
        path.write_text(content)
        for kind, text in pools(2).run(attach_each, plans=[str(path)] * 2):
            assert kind == "SpecError" and str(path) in text and word in text, text


def attach_and_name(me, plan):
    model = me.attach(make_net(), plan)
    train(me, model, 3)
    return model.cortado.spec


def test_a_plan_may_be_a_string_a_dict_or_a_file(pools, tmp_path):
    plan = {"codec": "acp", "rank": 2, "wire": "bf16", "dense": ["0.weight", "4.*"], "dense_embeddings": True}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    spec = "acp(rank=2, wire=bf16, dense=[0.weight, 4.*], dense_embeddings=true)"
    for each in (plan, str(path), path, spec):
        assert pools(2).run(attach_and_name, plan=each) == [spec, spec]


def test_options_of_a_dict_join_those_of_the_first_codec(pools):
    for codec in ("topk(density=0.2) | sign(scale=mean_abs)", "topk(density=0.2)|sign(scale=mean_abs)"):
        spec = "topk(density=0.2, min_elems=0, threads=2) | sign(scale=mean_abs)"
        plan = {"codec": codec, "min_elems": 0, "threads": 2}
        assert pools(2).run(attach_and_name, plan=plan) == [spec, spec]


@pytest.mark.parametrize("world_size", [2, 3])
def test_different_settings_are_named_on_every_rank(pools, world_size):
    plans = ["acp(rank=2)"] * (world_size - 1) + ["acp(rank=4, wire=bf16)"]
    for kind, text in pools(world_size).run(attach_each, plans=plans):
        assert kind == "MismatchError"
        assert f'rank 0 has "acp(rank=2)", rank {world_size - 1} has "acp(rank=4, wire=bf16)"' in text


def test_an_error_on_one_rank_is_raised_on_all_and_names_it(pools):
    values = pools(3).run(attach_each, plans=["acp", "acp(rank=0)", "acp"])
    assert [kind for kind, _ in values] == ["MismatchError", "SpecError", "MismatchError"]
    for _, text in (values[0], values[2]):
        assert "rank 1 could not attach" in text and "rank" in text and "0" in text


def test_an_error_that_names_a_path_that_is_no_text_is_raised_on_all(pools):
    path = os.fsdecode(b"caf\xe9.json")  # as the command line of a program gives it
    first, own = pools(2).run(attach_each, plans=["acp", path])
    assert own[0] == "SpecError" and path in own[1]
    assert first[0] == "MismatchError" and "rank 1 could not attach: can't read the plan \"caf\\udce9.json" in first[1]


def attach_different_models(me):
    """DDP itself would refuse these, so they are attached without."""
    net = make_net() if me.rank == 0 else torch.nn.Sequential(*make_net(), torch.nn.Linear(8, 8))
    return error_of(cortado.ddp_hook, "acp", net, verbose=False)


def test_different_models_are_named_on_every_rank(pools):
    for kind, text in pools(2).run(attach_different_models):
        assert kind == "MismatchError" and "different models: rank 0 has 8 tensors, rank 1 has 10" in text


def test_float64_is_refused_by_parameter(pools):
    for kind, text in pools(2).run(attach_each, plans=["acp"] * 2, dtype=torch.float64):
        assert kind == "SpecError"
        assert '"0.weight"' in text and "float64" in text and "bfloat16" in text


def attach_late(me, when):
    model = me.attach(make_net(), "acp" if when == "again" else None)
    if when == "after no_sync":
        with model.no_sync():
            loss_of(model, make_batch(me.rank, 0)).backward()
    elif when != "again":
        train(me, model, 1)
    if "zero_grad" in when:
        model.zero_grad()
    error = error_of(cortado.attach, model, "power", verbose=False)
    train(me, model, 2)
    return error


@pytest.mark.parametrize(
    "when, words",
    [
        ("again", ["attached already", "acp(rank=4)"]),
        ("after backward", ["before the first backward"]),
        ("after backward and zero_grad", ["before the first backward"]),
        ("after no_sync", ["before the first backward"]),
    ],
)
def test_attaching_twice_or_late_is_refused(pools, when, words):
    for kind, text in pools(2).run(attach_late, when=when):
        assert kind == "CortadoError"
        assert all(word in text for word in words), text


def attach_late_on_one_rank(me):
    model = me.wrap(make_net())
    with model.no_sync():
        if me.rank == 1:
            loss_of(model, make_batch(me.rank, 0)).backward()
    start = time.monotonic()
    error = error_of(cortado.attach, model, "acp", verbose=False)
    return *error, time.monotonic() - start


def test_a_refusal_on_one_rank_is_told_to_the_others_at_once(pools):
    for rank, (kind, text, seconds) in enumerate(pools(3).run(attach_late_on_one_rank)):
        assert "before the first backward" in text
        assert kind == ("CortadoError" if rank == 1 else "MismatchError")
        assert rank == 1 or "rank 1" in text
        assert seconds < 30  # not the 60 s of a rank that never answers


def attach_beside_another_hook(me):
    model = me.wrap(make_net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    error = error_of(cortado.attach, model, "acp", verbose=False)
    train(me, model, 2)
    return error


def test_another_hook_is_not_replaced(pools):
    for kind, text in pools(2).run(attach_beside_another_hook):
        assert kind == "CortadoError" and "another communication hook" in text


def attach_mixed(me):
    model = me.wrap(make_net())
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # DDP takes it on a GPU only
    return error_of(cortado.attach, model, "acp", verbose=False)


def test_ddps_own_mixed_precision_is_named(pools):
    for kind, text in pools(2).run(attach_mixed):
        assert kind == "SpecError" and "mixed_precision" in text and "autocast" in text


def attach_over_other_groups(me):
    part = dist.new_group([0, 1])
    everybody = dist.new_group([0, 1, 2])
    errors = [
        error_of(cortado.attach, me.wrap(make_net()), "acp", process_group=group, verbose=False)
        for group in (part, "gloo")
    ]
    expected = me.attach(make_net(), "acp(rank=2)")
    train(me, expected, 4)
    model = me.wrap(make_net())
    state = cortado.attach(model, "acp(rank=2)", process_group=everybody, verbose=False)
    train(me, model, 4)
    over = state._group._group is everybody
    return errors, over, fingerprint(model) == fingerprint(expected)


def test_the_exchange_may_run_over_another_group_of_the_same_ranks(pools):
    for errors, over, same in pools(3).run(attach_over_other_groups):
        for kind, text in errors:
            assert kind == "SpecError" and "ranks of DDP's own, [0, 1, 2]" in text
        assert "'gloo'" in errors[1][1]
        assert over and same


@pytest.mark.parametrize(
    "error, code",
    [
        (cortado.CortadoError, "failed precondition"),
        (cortado.SpecError, "invalid argument"),
        (cortado.MismatchError, "mismatch"),
        (cortado.PeerError, "peer failed"),
    ],
)
def test_errors_say_what_kind_they_are(error, code):
    assert error("what happened").code == code
    assert error("what happened", "corrupt data").code == "corrupt data"


def hook_of_another_model(me, names_missing):
    net = make_net()
    model = me.wrap(net)
    named = torch.nn.Sequential(*net[: names_missing - 1]) if names_missing else make_net()
    state, hook = cortado.ddp_hook("acp(rank=2)", named, verbose=False)
    model.register_comm_hook(state, hook)
    return error_of(loss_of(model, make_batch(me.rank, 0)).backward)


@pytest.mark.parametrize("names_missing", [0, 2])
def test_a_parameter_without_a_name_is_refused_in_the_first_step(pools, names_missing):
    from ranks import Pool

    pool = Pool(2)  # of its own: the step is broken off
    try:
        for kind, text in pool.run(hook_of_another_model, names_missing=names_missing):
            assert kind == "MismatchError" and "no named parameter" in text, text
    finally:
        pool.close()


def convert_after_the_hook_was_made(me):
    net = make_net()
    state, hook = cortado.ddp_hook("acp(rank=2)", net, verbose=False)
    model = torch.nn.parallel.DistributedDataParallel(net.bfloat16())
    model.register_comm_hook(state, hook)
    return error_of(lambda: model(torch.ones(4, 24, dtype=torch.bfloat16)).sum().backward())


def test_a_model_converted_after_its_hook_was_made_is_refused(pools):
    for kind, text in pools(2).run(convert_after_the_hook_was_made):
        assert kind == "MismatchError"
        assert "elements of torch.bfloat16" in text and "of torch.float32" in text


def swap_arguments(me):
    return error_of(cortado.ddp_hook, make_net(), "acp(rank=2)", verbose=False)


def test_swapped_arguments_of_ddp_hook_are_named(pools):
    for kind, text in pools(2).run(swap_arguments):
        assert kind == "SpecError" and "got str; the arguments are swapped" in text


def attach_with_function_for_scaler(me):
    scaler = torch.amp.GradScaler("cpu")
    return error_of(cortado.attach, me.wrap(make_net()), "acp", grad_scaler=scaler.get_scale, verbose=False)


def test_a_scaler_is_checked_when_a_model_is_attached(pools):
    for kind, text in pools(2).run(attach_with_function_for_scaler):
        assert kind == "SpecError" and "has get_scale()" in text


def test_a_file_of_another_kind_is_named(pools, tmp_path):
    job, other = tmp_path / "job.json", tmp_path / "plan.txt"
    job.write_text('{"format": "cortado.job/1"}')
    other.write_text("{}")
    for path, said in ((job, "is no plan but a cortado.job/1"), (other, "ends in .json")):
        for kind, text in pools(2).run(attach_each, plans=[str(path)] * 2):
            assert kind == "SpecError" and said in text


def report_of(me):
    attached = me.attach(make_net(), "acp(rank=2)")
    return [error_of(cortado.report, what) for what in (None, (1, 2), attached.module)]


def test_report_says_what_it_takes(pools):
    for nothing, pair, module in pools(1).run(report_of):
        assert nothing == ("SpecError", "report needs an attached model, a state or a Reducer, got NoneType")
        assert pair[0] == "SpecError" and module[0] == "CortadoError"


def attach_sparse(me):
    model = me.wrap(torch.nn.Sequential(torch.nn.Embedding(7, 5, sparse=True), torch.nn.Linear(5, 3)))
    return error_of(cortado.attach, model, "acp", verbose=False)


def test_sparse_gradients_are_refused(pools):
    for kind, text in pools(2).run(attach_sparse):
        assert kind == "SpecError" and '"0.weight" is sparse' in text


def never_attached_on_rank_0(me):
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    attachment.SETUP_TIMEOUT_S = 1.0
    start = time.monotonic()
    if me.rank == 0:
        time.sleep(3)
        return None
    error = error_of(cortado.attach, model, "gzip", verbose=False)
    return *error, time.monotonic() - start


def test_where_others_never_attach_the_error_of_this_rank_is_not_lost():
    pool = Pool(2)
    try:
        _, (kind, text, seconds) = pool.run(never_attached_on_rank_0)
    finally:
        pool.close()
    assert kind == "SpecError" and "gzip" in text
    assert seconds < 20


def hook_by_hand(me, from_ddp):
    net = make_net()
    model = me.wrap(net)
    state, hook = cortado.ddp_hook("acp(rank=2)", model if from_ddp else net, verbose=False)
    model.register_comm_hook(state, hook)
    train(me, model, 4)
    return state.report().to_dict()["steps"], state.state_dict()["phase_step"]


@pytest.mark.parametrize("from_ddp", [True, False])
def test_ddp_hook_gives_a_pair_for_register_comm_hook(pools, from_ddp):
    assert pools(2).run(hook_by_hand, from_ddp=from_ddp) == [(4, 2), (4, 2)]


def attach_to_others(me):
    mesh = init_device_mesh("cpu", (me.world_size,))
    sharded = fully_shard(make_net(), mesh=mesh)
    inside = torch.nn.Sequential(torch.nn.Linear(24, 24), fully_shard(make_net(), mesh=mesh))
    wrapped = FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    return {
        "net": error_of(cortado.attach, make_net(), "acp"),
        "fully_shard": error_of(cortado.attach, sharded, "acp"),
        "fsdp": error_of(cortado.attach, wrapped, "acp"),
        "hook of fully_shard": error_of(cortado.ddp_hook, "acp", sharded),
        "hook of fsdp": error_of(cortado.ddp_hook, "acp", wrapped),
        "hook of a part": error_of(cortado.ddp_hook, "acp", inside),
    }


def test_only_ddp_can_be_attached_and_fsdp_is_named(pools):
    for errors in pools(2).run(attach_to_others):
        for what, (kind, text) in errors.items():
            assert kind == "SpecError", what
            assert "DistributedDataParallel" in text, what
            assert ("FSDP is not supported here" in text) == (what != "net"), (what, text)
            assert ("or fully_shard within each replica and cortado.Reducer" in text) == (what != "net"), (what, text)


class Ignoring(torch.nn.Module):
    """With a parameter that DDP is told to leave alone."""

    _ddp_params_and_buffers_to_ignore = ["own.weight"]

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.own = torch.nn.Linear(24, 24, bias=False)
        self.frozen = torch.nn.Parameter(torch.ones(24), requires_grad=False)

    def forward(self, x):
        return self.net(self.own(x) * self.frozen)


def names_exchanged(me, net, by_hook):
    """Of the parameters, in three steps."""
    model = torch.nn.parallel.DistributedDataParallel(net)
    if by_hook:
        state, hook = cortado.ddp_hook("acp(rank=2)", net, verbose=False)
        model.register_comm_hook(state, hook)
    else:
        state = cortado.attach(model, "acp(rank=2)", verbose=False)
    train(me, model, 3)
    return [t["name"] for t in state.report().to_dict()["tensors"]]


def ignore(me, by_hook):
    net = Ignoring()
    return names_exchanged(me, net, by_hook), fingerprint(net.net)


@pytest.mark.parametrize("by_hook", [True, False])
def test_parameters_that_ddp_ignores_or_that_are_frozen_are_left_alone(pools, by_hook):
    expected = ["net." + name for name, _ in make_net().named_parameters()]
    (names, first), (names_of_second, second) = pools(2).run(ignore, by_hook=by_hook)
    assert names == names_of_second == expected and first == second


class IgnoringByName(torch.nn.Module):
    """DDP compares ".of_root", so it exchanges what is ignored without the dot; and what has another name, too."""

    _ddp_params_and_buffers_to_ignore = [".dotted", "plain", "net.0.weight", "own.weight"]

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.again = self.net[0]
        self.own = torch.nn.Linear(24, 24, bias=False)
        self.tied = torch.nn.Linear(24, 24, bias=False)
        self.tied.weight = self.own.weight
        self.dotted, self.plain = torch.nn.Parameter(torch.ones(24)), torch.nn.Parameter(torch.ones(24))

    def forward(self, x):
        return self.net(self.tied(self.own(x * self.plain)) * self.dotted)


def ignore_by_name(me, by_hook):
    return set(names_exchanged(me, IgnoringByName(), by_hook))


@pytest.mark.parametrize("by_hook", [True, False])
def test_what_ddp_ignores_is_told_as_ddp_does(pools, by_hook):
    all_of_them = {name for name, _ in IgnoringByName().named_parameters()}
    assert pools(2).run(ignore_by_name, by_hook=by_hook) == [all_of_them - {"dotted", "net.0.weight"}] * 2


def attach_with_optimizer_in_backward(me, front_end):
    net = make_net()
    if me.rank == 1:
        _apply_optimizer_in_backward(torch.optim.SGD, [net[2].weight], {"lr": 0.1})
    if front_end == "Reducer":
        return error_of(cortado.Reducer, net, "acp", verbose=False)
    model = torch.nn.parallel.DistributedDataParallel(net)
    if front_end == "attach":
        return error_of(cortado.attach, model, "acp", verbose=False)
    return error_of(cortado.ddp_hook, "acp", net, verbose=False)


@pytest.mark.parametrize("front_end", ["attach", "ddp_hook", "Reducer"])
def test_optimizers_in_the_backward_pass_are_refused_on_all_ranks(pools, front_end):
    for _, text in pools(2).run(attach_with_optimizer_in_backward, front_end=front_end):
        assert '"2.weight" has an optimizer that steps in the backward pass' in text


def attach_delayed(me, names):
    net = make_net()
    net[4].bias.requires_grad_(False)  # DDP takes its device from what is left
    delayed = [(name, p) for name, p in net.named_parameters() if name in names or (not names and p.requires_grad)]
    model = torch.nn.parallel.DistributedDataParallel(
        net, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=net[0].weight
    )
    return [
        error_of(cortado.attach, model, "acp", verbose=False),
        error_of(cortado.ddp_hook, "acp", model, verbose=False),
    ]


@pytest.mark.parametrize("names", [[], ["4.weight"]])  # all of them, and one
def test_gradients_that_ddp_averages_past_the_hook_are_refused(pools, names):
    for errors in pools(2).run(attach_delayed, names=names):
        for kind, text in errors:
            assert kind == "SpecError" and "delay_all_reduce_named_params" in text


class Scaler:
    def get_scale(self):
        return 1024.0


def attach_with_scaler_on_rank_0(me):
    return error_of(
        cortado.attach, me.wrap(make_net()), "acp", grad_scaler=Scaler() if me.rank == 0 else None, verbose=False
    )


def test_a_scaler_on_some_ranks_only_is_refused_on_all(pools):
    for kind, text in pools(3).run(attach_with_scaler_on_rank_0):
        assert kind == "MismatchError" and "rank 1, 2 without" in text


def freeze_behind_ddp(me):
    net = make_net()
    model = me.wrap(net, find_unused_parameters=True)
    net[0].weight.requires_grad_(False)
    cortado.attach(model, "acp", verbose=False)
    return error_of(loss_of(model, make_batch(me.rank, 0)).backward)


def test_what_is_frozen_behind_ddp_is_named(pools):
    from ranks import Pool

    pool = Pool(2)  # of its own: the step is broken off
    try:
        for kind, text in pool.run(freeze_behind_ddp):
            assert kind == "MismatchError" and 'the gradient of "0.weight", which was frozen after DDP' in text, text
    finally:
        pool.close()
