# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Plans: read and written, executed by DDP, switched between steps, saved; what is wrong is said on every rank."""

import copy
import json

import cortado
import pytest
import torch
from nets import distance, gradients_of, loss_of, make_batch, make_net, make_optimizer, train, unwrapped
from ranks import fingerprint

NAMES = [name for name, _ in make_net().named_parameters()]


def operations(text):
    """ "encode@cpu all_gather@intra..inter" as a plan has it."""
    option = []
    for word in text.split():
        op, place = word.split("@")
        if op in ("encode", "decode"):
            option.append({"op": op, "device": place})
        else:
            option.append({"op": op, "levels": place.split("..")})
    return option


def make_plan(levels, *buckets):
    """buckets: (codec, option) each; tensors are dealt out to them in turn, in backward order."""
    tensors = [[] for _ in buckets]
    for i, name in enumerate(reversed(NAMES)):
        tensors[i % len(buckets)].append(name)
    return {
        "format": "cortado.plan/1",
        "job": "small",
        "cluster": "loopback",
        "levels": [{"name": name, "ranks": ranks} for name, ranks in levels],
        "buckets": [
            {"tensors": names, "codec": codec, "option": operations(option)}
            for names, (codec, option) in zip(tensors, buckets, strict=True)
        ],
        "notes": [],
    }


TWO = [("all", 2)]
TWO_BY_TWO = [("intra", 2), ("inter", 2)]
DENSE = make_plan(TWO, ("none", "all_reduce@all"))
MIXED = make_plan(
    TWO_BY_TWO,
    ("topk(density=0.2)", "encode@cpu all_gather@intra..inter decode@cpu"),
    ("quant(bits=4)", "reduce_scatter@intra encode@cpu all_to_all@inter decode@gpu encode@cpu all_gather@inter "
     "all_gather@intra decode@cpu"),
    ("float_rans", "encode@gpu gather@intra all_gather@inter broadcast@intra decode@gpu"),
    ("cast(bf16)", "encode@cpu all_reduce@intra..inter decode@cpu"),
    ("none", "reduce@intra all_reduce@inter broadcast@intra"),
)  # fmt: skip
OTHER = make_plan(
    TWO_BY_TWO,
    ("sign", "encode@cpu all_to_all@intra all_gather@inter all_gather@intra decode@cpu"),
    (
        "topk(density=0.3) | quant(bits=8)",
        "reduce_scatter@intra encode@cpu all_gather@inter decode@cpu all_gather@intra",
    ),
)
GATHERED = "encode@cpu all_gather@intra..inter decode@cpu"
DENSE_FOUR = make_plan(TWO_BY_TWO, ("none", "all_reduce@intra..inter"))

# ---- files -----------------------------------------------------------------------------------------------------------


def test_load_and_save(tmp_path):
    content = {**copy.deepcopy(MIXED), "planner_ns": 7, "searched": {"options": [1, 2]}}
    plan = cortado.Plan(content)
    plan.save(tmp_path / "plan.json")
    loaded = cortado.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.hash == plan.hash
    assert loaded.to_dict()["searched"] == {"options": [1, 2]}
    assert loaded.to_dict()["buckets"][1]["option"] == content["buckets"][1]["option"]
    assert json.loads((tmp_path / "plan.json").read_text()) == loaded.to_dict() == json.loads(loaded.to_json())
    changed = loaded.to_dict()
    changed["buckets"][0]["codec"] = "sign"
    assert cortado.Plan(changed) != loaded and cortado.Plan(changed).hash != loaded.hash


def test_str_tells_what_travels_how():
    lines = str(cortado.Plan(MIXED)).splitlines()
    assert lines[0].endswith("for 2 intra x 2 inter, 5 buckets")
    assert lines[1] == "  4.bias and 1 more: topk(density=0.2): encode@cpu all_gather@intra..inter decode@cpu"


def test_what_is_wrong_is_said_with_its_path(tmp_path):
    content = copy.deepcopy(MIXED)
    content["buckets"][2]["option"][1]["levels"] = ["outer"]
    with pytest.raises(
        cortado.SpecError, match=r'\$\.buckets\[2\]\.option\[1\]\.levels\[0\]: expected names of .*, got "outer"'
    ):
        cortado.Plan(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(cortado.SpecError, match=r"plan\.json: \$\.buckets\[2\]"):
        cortado.Plan.load(path)
    with pytest.raises(cortado.SpecError, match="can't read the plan"):
        cortado.Plan.load(tmp_path / "nothing.json")
    with pytest.raises(cortado.SpecError, match="can't write the plan: .*nowhere/plan.json: can't be written"):
        cortado.Plan(MIXED).save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(cortado.SpecError, match="which has a NUL"):
        cortado.Plan(MIXED).save("plan\0.json")
    with pytest.raises(cortado.SpecError, match="cortado.plan/2"):
        cortado.Plan({**MIXED, "format": "cortado.plan/2"})


def test_a_codec_is_no_plan():
    with pytest.raises(cortado.SpecError, match="got a plan"):
        cortado.compress(torch.ones(3), cortado.Plan(DENSE))


# ---- training --------------------------------------------------------------------------------------------------------


def first_gradients(me, plan):
    model = me.attach(make_net(), plan)
    loss_of(model, make_batch(me.rank, 0)).backward()
    return gradients_of(model)


def test_a_dense_plan_gives_the_bits_of_ddp(pools):
    plain, planned = pools(2).run(first_gradients, plan=None), pools(2).run(first_gradients, plan=DENSE)
    for name, gradient in plain[0].items():
        assert torch.equal(planned[0][name], gradient)


@pytest.mark.parametrize("lossless", ["none", "float_rans"])
def test_lossless_plans_give_the_mean(pools, lossless):
    plan = copy.deepcopy(MIXED)
    for bucket in plan["buckets"]:
        bucket["codec"] = lossless
        if lossless != "none" and any(op["op"] == "all_reduce" for op in bucket["option"]):
            bucket["option"] = operations("encode@cpu all_gather@intra..inter decode@cpu")
    expected = pools(4).run(first_gradients, plan=None)[0]
    assert distance(pools(4).run(first_gradients, plan=plan)[0], expected) < 1e-6


def learn(me, plan, after=None):
    model = me.attach(make_net(), plan)
    optimizer = make_optimizer(model)
    losses = train(me, model, [step % 4 for step in range(30)], optimizer)
    if after is not None:
        before = model.cortado.spec
        model.cortado.switch_plan(after)
        assert model.cortado.spec != before
        losses += train(me, model, [step % 4 for step in range(30)], optimizer)
    return losses


def test_training_under_a_mixed_plan_learns_and_goes_on_under_another(pools):
    for losses in pools(4).run(learn, plan=MIXED, after=OTHER):
        assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def reported(me, folder):
    path = f"{folder}/plan.json"
    if me.rank == 0:
        cortado.Plan(MIXED).save(path)
    me.gather(None)
    model = me.attach(make_net(), path)
    train(me, model, 2)
    report = cortado.report(model).to_dict()
    return report["spec"], report["messages_per_step"], report["ratio"], report["relative_error"], str(report)


def test_a_plan_comes_from_a_file_and_is_reported(pools, tmp_path):
    for spec, messages, ratio, error, text in pools(4).run(reported, folder=str(tmp_path)):
        assert spec == f"plan(hash={cortado.Plan(MIXED).hash:016x}, buckets=5)"
        assert messages >= 5 and ratio > 0 and 0 < error < 1 and "4.bias" in text


# ---- residuals -------------------------------------------------------------------------------------------------------


def owed_is_delivered(me, plans):
    """Gradients of all zeros at the end: what the ranks still owed comes, to the rounding of float32."""
    net = make_net()
    model = me.attach(net, plans[0], bucket_cap_mb=0.002)
    delivered, expected = {}, {}
    for step in range(6):
        if step and step % 2 == 0:
            model.cortado.switch_plan(plans[step // 2])
        model.zero_grad()
        local = torch.autograd.grad(loss_of(net, make_batch(me.rank, step)), list(net.parameters()))
        loss_of(model, make_batch(me.rank, step)).backward()
        for name, gradient, own in zip(NAMES, [p.grad for p in net.parameters()], local, strict=True):
            mean = own.clone()
            torch.distributed.all_reduce(mean)
            delivered[name] = delivered.get(name, 0) + gradient
            expected[name] = expected.get(name, 0) + mean / me.world_size
    before = distance(delivered, expected)
    model.cortado.switch_plan(DENSE_FOUR)
    model.zero_grad()
    (loss_of(model, make_batch(me.rank, 0)) * 1e-30).backward()  # not zeros: those would hold the residuals back
    for name, parameter in net.named_parameters():
        delivered[name] = delivered[name] + parameter.grad
    return before, distance(delivered, expected)


def test_nothing_is_lost_from_plan_to_plan(pools):
    mixed = copy.deepcopy(MIXED)
    # A transport that sums bf16 rounds sums, which is nobody's residual (docs/schemes.md); gathered, nothing is lost.
    mixed["buckets"][3]["option"] = make_plan(TWO_BY_TWO, ("cast(bf16)", GATHERED))["buckets"][0]["option"]
    for before, after in pools(4).run(owed_is_delivered, plans=[mixed, OTHER, mixed]):
        assert after < 1e-5 < 0.01 < before


def resume(me, folder):
    """The bits of a run without a break, and of one that a new DDP continued."""
    ends = []
    for is_resumed in (False, True):
        model = me.attach(make_net(), MIXED, bucket_cap_mb=0.002)
        optimizer = make_optimizer(model)
        train(me, model, 3, optimizer)
        if is_resumed:
            parts = {"model": unwrapped(model), "optimizer": optimizer, "cortado": model.cortado}
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/{me.rank}.pt")
            model = me.attach(make_net(7), MIXED, bucket_cap_mb=0.002)
            optimizer = make_optimizer(model)
            saved = torch.load(f"{folder}/{me.rank}.pt", weights_only=True)
            unwrapped(model).load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            model.cortado.load_state_dict(saved["cortado"])
        train(me, model, range(3, 6), optimizer)
        ends.append(fingerprint(unwrapped(model)))
    return ends


def test_saved_states_resume_bit_for_bit(pools, tmp_path):
    for whole, resumed in pools(4).run(resume, folder=str(tmp_path)):
        assert whole == resumed


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def refused(me, plans, switch=False):
    try:
        model = me.attach(make_net(), DENSE if switch else plans[me.rank])
        if switch:
            try:
                model.cortado.switch_plan(plans[me.rank])
            finally:
                train(me, model, 2)  # goes on with the plan it had
    except cortado.CortadoError as error:
        return type(error).__name__, str(error)
    return None


OTHER_CODEC = copy.deepcopy(DENSE)
OTHER_CODEC["buckets"][0]["codec"] = "sign"
MISSING = copy.deepcopy(DENSE)
MISSING["buckets"][0]["tensors"].remove("2.weight")


WITH_SIZES, OTHER_SIZES = copy.deepcopy(DENSE), copy.deepcopy(DENSE)
ELEMS = {name: parameter.numel() for name, parameter in make_net().named_parameters()}
WITH_SIZES["buckets"][0]["elems"] = [ELEMS[name] for name in DENSE["buckets"][0]["tensors"]]
OTHER_SIZES["buckets"][0]["elems"] = [7 for _ in DENSE["buckets"][0]["tensors"]]


@pytest.mark.parametrize(
    ("plans", "kinds", "text"),
    [
        ([WITH_SIZES, DENSE], ["MismatchError", "MismatchError"], "different settings: rank 0 has"),
        ([OTHER_SIZES, OTHER_SIZES], ["MismatchError", "MismatchError"], "has 7 elements in the plan, 8 in the model"),
        ([DENSE, OTHER_CODEC], ["MismatchError", "MismatchError"], "different settings: rank 0 has"),
        ([DENSE, "sign"], ["MismatchError", "MismatchError"], "different settings: rank 0 has"),
        ([MISSING, MISSING], ["MismatchError", "MismatchError"], 'no bucket of it has the tensor "2.weight"'),
        ([DENSE_FOUR, DENSE_FOUR], ["MismatchError", "MismatchError"], "for 4 ranks ($.levels), but 2 take part"),
        ([DENSE, {**DENSE, "levels": 3}], ["MismatchError", "SpecError"], "$.levels: expected a list of levels, got 3"),
    ],
)
def test_every_rank_gets_the_same_error(pools, plans, kinds, text):
    results = pools(2).run(refused, plans=plans)
    assert [kind for kind, _ in results] == kinds
    assert all(text in message for _, message in results), results


@pytest.mark.parametrize(
    ("plans", "kinds", "text"),
    [
        ([DENSE, OTHER_CODEC], ["MismatchError", "MismatchError"], "ranks differ in the plan"),
        ([DENSE, WITH_SIZES], ["MismatchError", "MismatchError"], "ranks differ in the plan"),
        ([MISSING, MISSING], ["MismatchError", "MismatchError"], 'no bucket of it has the tensor "2.weight"'),
        ([DENSE, "sign"], ["MismatchError", "SpecError"], "switch_plan needs a plan"),
    ],
)
def test_a_switch_that_is_refused_changes_nothing(pools, plans, kinds, text):
    results = pools(2).run(refused, plans=plans, switch=True)
    assert [kind for kind, _ in results] == kinds
    assert all(text in message for _, message in results), results
