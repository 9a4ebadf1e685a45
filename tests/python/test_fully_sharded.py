# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""A Reducer between the replicas of a model that fully_shard (FSDP2) shards: two replicas of two shards each."""

import contextlib
import hashlib
import io

import cortado
import pytest
import torch
import torch.distributed as dist
from cases import repeated
from nets import COMPOSED, COMPSO, QUANT, RANDK, SIGN, TOPK, loss_of, make_batch, make_net, make_optimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

CODECS = ["none", "cast(bf16)", "acp(rank=2)", "power(rank=2)", SIGN, TOPK, QUANT, COMPSO, RANDK, COMPOSED]


def make_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def shard(net, mesh, **options):
    for part in net:
        if list(part.parameters()):
            fully_shard(part, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def make_model(plan, net=None, mesh=None, **options):
    """The model, its Reducer between replicas, and their group."""
    mesh = mesh or make_mesh()
    model = shard(net or make_net(), mesh["shard"], **options)
    replicas = mesh["replicate"].get_group()
    return model, cortado.Reducer(model, plan, process_group=replicas, verbose=False), replicas


def step_once(me, model, reducer, step, optimizer, clip=None):
    optimizer.zero_grad()
    loss = loss_of(model, make_batch(me.rank, step))
    loss.backward()
    reducer.wait()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def shards_of(model):
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def digest(tensors):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def assert_replicas_are_identical(model, replicas):
    own, all_of_them = digest(shards_of(model)), [None, None]
    dist.all_gather_object(all_of_them, own, group=replicas)
    assert len(set(all_of_them)) == 1, all_of_them


# ---- what is averaged ------------------------------------------------------------------------------------------------


def beside_native(me):
    """Codec none beside what fully_shard does on a mesh of two dimensions: the largest difference of a parameter."""
    model, reducer, replicas = make_model("none")
    native = shard(make_net(), make_mesh())
    ours, theirs = make_optimizer(model), make_optimizer(native)
    for step in range(4):
        step_once(me, model, reducer, step, ours)
        theirs.zero_grad()
        loss_of(native, make_batch(me.rank, step)).backward()
        theirs.step()
    assert_replicas_are_identical(model, replicas)
    starts = shards_of(shard(make_net(), make_mesh()["shard"]))
    pairs = zip(shards_of(model), shards_of(native), starts, strict=True)
    return max(((a - b).abs().max() / (b - start).abs().max()).item() for a, b, start in pairs)


def test_none_is_what_a_mesh_of_two_dimensions_does(pools):
    assert max(pools(4).run(beside_native)) < 1e-5


# The others' payloads travel as those of one of these do.
FEW_CODECS = [c if c in ("none", "acp(rank=2)", "power(rank=2)", QUANT, COMPSO, RANDK) else repeated(c) for c in CODECS]


def learn(me, plan):
    model, reducer, replicas = make_model(plan)
    optimizer = make_optimizer(model)
    losses = [step_once(me, model, reducer, step, optimizer, clip=5.0) for step in range(30)]
    assert_replicas_are_identical(model, replicas)
    report = reducer.report().to_dict()
    return sum(losses[:5]) / 5, sum(losses[-5:]) / 5, report["ratio"] > 1, report["steps"]


@pytest.mark.parametrize("plan", FEW_CODECS)
def test_every_codec_trains_and_replicas_stay_identical(pools, plan):
    for first, last, is_smaller, steps in pools(4).run(learn, plan=plan):
        assert last < first and is_smaller == (plan != "none") and steps == 30


def travels_meanwhile(me):
    """Whether the exchange of a message was started before the backward pass had ended."""
    model, reducer, _ = make_model("quant(bits=4, min_elems=0, bucket_cap_mib=0, start_step=0)")
    begun = []
    start = reducer._group.start
    reducer._group.start = lambda *arguments: (begun.append(1), start(*arguments))
    loss_of(model, make_batch(me.rank, 0)).backward()
    before_wait = len(begun)
    reducer.wait()
    return before_wait


def test_shards_travel_during_the_backward_pass(pools):
    assert min(pools(4).run(travels_meanwhile)) > 0


def say_what_is_compressed(me, by_name):
    """Behind a forward pass, which leaves some parameters whole; and of a state of another number of replicas."""
    mesh = make_mesh()
    model = fully_shard(make_net(), mesh=mesh["shard"])
    with torch.no_grad():
        model(make_batch(0, 0)[0])
    if by_name:
        model.reshard()
    named = list(model.named_parameters()) if by_name else model
    with contextlib.redirect_stderr(io.StringIO()) as said:
        reducer = cortado.Reducer(named, "acp(rank=2)", process_group=mesh["replicate"].get_group())
        reducer.load_state_dict(reducer.state_dict() | {"world_size": 5})
    return said.getvalue()


@pytest.mark.parametrize("by_name", [False, True])
def test_one_rank_speaks_for_all(pools, by_name):
    first, *others = pools(4).run(say_what_is_compressed, by_name=by_name)
    assert "tensors compressed" in first and "saved by 5 ranks" in first and others == [""] * 3


# ---- shards of all shapes --------------------------------------------------------------------------------------------


class Odd(torch.nn.Sequential):
    """Rows that two ranks can't share evenly, and a single one, of which one rank has nothing; a parameter that is not
    used; the last layer frozen."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(torch.nn.Linear(24, 7), torch.nn.Linear(7, 1), torch.nn.Linear(1, 8), torch.nn.Linear(8, 8))
        self[3].requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(5, 3))


def train_odd(me, plan):
    model, reducer, replicas = make_model(plan, Odd())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(5):
        step_once(me, model, reducer, step, optimizer)
    assert_replicas_are_identical(model, replicas)
    reducer.check_replicas()
    rows = [parameter.to_local().shape[0] for parameter in model.parameters()]
    return rows, model.unused.grad is None, all(shard.isfinite().all() for shard in shards_of(model))


@pytest.mark.parametrize("plan", ["none", "acp(rank=1, min_compression_rate=0)", "topk(density=0.5, min_elems=0)"])
def test_uneven_and_empty_shards(pools, plan):
    ends = pools(4).run(train_odd, plan=plan)
    assert [rows[0] for rows, _, _ in ends] == [3, 2, 3, 2]  # of the 5 rows of `unused`
    assert [0 in rows for rows, _, _ in ends] == [False, True, False, True]
    assert all(is_none and is_finite for _, is_none, is_finite in ends)


def train_mixed(me):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reducer, replicas = make_model("acp(rank=2)", mp_policy=policy)
    optimizer = make_optimizer(model)
    losses = [step_once(me, model, reducer, step, optimizer) for step in range(30)]
    assert_replicas_are_identical(model, replicas)
    return sum(losses[-5:]) < sum(losses[:5])


def test_mixed_precision(pools):
    assert all(pools(4).run(train_mixed))


def make_after_a_forward_pass(me):
    """The root's parameters are still whole then: fully_shard leaves them so for the backward pass."""
    mesh = make_mesh()
    model = fully_shard(make_net(), mesh=mesh["shard"])
    with torch.no_grad():
        model(make_batch(me.rank, 0)[0])
    was_whole = not hasattr(next(model.parameters()), "placements")
    reducer = cortado.Reducer(model, "acp(rank=2)", process_group=mesh["replicate"].get_group(), verbose=False)
    optimizer = make_optimizer(model)
    for step in range(3):
        step_once(me, model, reducer, step, optimizer)
    assert_replicas_are_identical(model, mesh["replicate"].get_group())
    return was_whole


def test_behind_a_forward_pass_it_finds_the_shards(pools):
    assert all(pools(4).run(make_after_a_forward_pass))


# ---- micro-batches, some ranks without a backward pass, checkpoints --------------------------------------------------


def accumulate(me, how):
    """The shards after two steps of three micro-batches each, and of one with their sum."""
    ends = []
    for split in (True, False):
        model, reducer, replicas = make_model("none")
        optimizer = make_optimizer(model)
        for step in range(2):
            optimizer.zero_grad()
            batches = [make_batch(me.rank, 3 * step + part) for part in range(3)]
            if not split:
                sum(loss_of(model, batch) for batch in batches).backward()
            elif how == "fully_shard":
                for number, batch in enumerate(batches):
                    model.set_requires_gradient_sync(number == 2)
                    loss_of(model, batch).backward()
            else:
                with reducer.no_sync():
                    for batch in batches[:2]:
                        loss_of(model, batch).backward()
                loss_of(model, batches[2]).backward()
            reducer.wait()
            optimizer.step()
        assert_replicas_are_identical(model, replicas)
        assert reducer.report().to_dict()["steps"] == 2
        ends.append(shards_of(model))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("how", ["fully_shard", "no_sync"])
def test_micro_batches_are_exchanged_once(pools, how):
    assert all(pools(4).run(accumulate, how=how))


def rest_of_a_replica(me):
    """The second replica has no data in step 1: its mean is half of the first one's gradient."""
    model, reducer, replicas = make_model("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_once(me, model, reducer, 0, optimizer)
    optimizer.zero_grad()
    if me.rank < 2:
        loss_of(model, make_batch(me.rank, 1)).backward()
    reducer.wait()
    kinds = {type(parameter.grad).__name__ for parameter in model.parameters()}
    placed = all(p.grad.placements == p.placements and p.grad.shape == p.shape for p in model.parameters())
    optimizer.step()
    assert_replicas_are_identical(model, replicas)
    return kinds, placed


def test_a_replica_without_data_takes_part_with_zeros(pools):
    assert pools(4).run(rest_of_a_replica) == [({"DTensor"}, True)] * 4


def resume(me):
    mesh = make_mesh()
    model, reducer, replicas = make_model("acp(rank=2)", mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        step_once(me, model, reducer, step, optimizer)
    saved = io.BytesIO()
    torch.save(reducer.state_dict(), saved)
    kept = shards_of(model)
    for step in range(4, 8):
        step_once(me, model, reducer, step, optimizer)
    ends = [shards_of(model)]
    for resumes in (True, False):
        again, reducer, _ = make_model("acp(rank=2)", mesh=mesh)
        with torch.no_grad():
            for parameter, local in zip(again.parameters(), kept, strict=True):
                parameter.to_local().copy_(local)
        if resumes:
            saved.seek(0)
            reducer.load_state_dict(torch.load(saved, weights_only=True))
        optimizer = torch.optim.SGD(again.parameters(), lr=0.05)
        for step in range(4, 8):
            step_once(me, again, reducer, step, optimizer)
        ends.append(shards_of(again))
    return [digest(end) for end in ends]


def test_training_resumes_bit_by_bit(pools):
    for whole, resumed, forgetful in pools(4).run(resume):
        assert whole == resumed != forgetful


def overflow(me):
    """An Inf in one replica's shard: both have it, and what is owed stays as it was."""
    model, reducer, replicas = make_model("acp(rank=2, start_step=0, rollback=exact)")
    optimizer = make_optimizer(model)
    for step in range(3):
        step_once(me, model, reducer, step, optimizer)
    before = reducer.state_dict()["tensors"]["0.weight"]["residual"].clone()
    optimizer.zero_grad()
    images, labels = make_batch(me.rank, 3)
    images = images * (float("inf") if me.rank == 3 else 1)
    loss_of(model, (images, labels)).backward()
    reducer.wait()
    is_finite = all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())
    return is_finite, torch.equal(before, reducer.state_dict()["tensors"]["0.weight"]["residual"])


def test_a_step_with_inf_is_undone(pools):
    assert pools(4).run(overflow) == [(False, True)] * 4


# ---- what is refused -------------------------------------------------------------------------------------------------


def error_of(make, *arguments, **options):
    try:
        make(*arguments, verbose=False, **options)
    except cortado.CortadoError as error:
        return str(error)
    return None


def refusals(me):
    mesh = make_mesh()
    replicas = mesh["replicate"].get_group()
    model, native = shard(make_net(), mesh["shard"]), shard(make_net(), mesh)
    part = torch.nn.Sequential(torch.nn.Linear(24, 24), fully_shard(make_net(), mesh=mesh["shard"]))
    errors = {
        "world": error_of(cortado.Reducer, model, "acp"),
        "native": error_of(cortado.Reducer, native, "acp", process_group=replicas),
        "part": error_of(cortado.Reducer, part, "acp", process_group=replicas),
        "auto": error_of(cortado.Reducer, model, process_group=replicas),
        "kfac": error_of(cortado.KFAC, model),
    }
    crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][me.rank in (1, 2)]
    replicated = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh["replicate"], [Replicate()]))
    errors["replicate"] = error_of(cortado.Reducer, [("weight", replicated)], "acp", process_group=replicas)
    errors["crossed"] = error_of(cortado.Reducer, model, "acp", process_group=crossed)
    reducer = cortado.Reducer(model, "acp", process_group=replicas, verbose=False)
    errors["again"] = error_of(cortado.Reducer, model, "acp", process_group=replicas)
    reducer.close()
    return errors


def test_what_does_not_fit_is_refused_on_all_ranks(pools):
    for rank, said in enumerate(pools(4).run(refusals)):
        beside = rank + 1 if rank % 2 == 0 else rank - 1
        assert f"(this one and rank {beside}), whose gradients fully_shard averages" in said["world"]
        assert f"(this one and rank {(rank + 2) % 4}), whose gradients fully_shard averages" in said["native"]
        assert 'mesh["replicate"].get_group(), and mesh=mesh["shard"] for fully_shard' in said["native"]
        assert '"0.weight" is not sharded, and others are' in said["part"]
        assert '"auto" with sharded parameters' in said["auto"]
        assert "FSDP is not supported here" in said["kfac"]
        assert "PyTorch averages its gradients itself" in said["replicate"]
        assert "shards held differ: rank 0 has (" in said["crossed"]
        assert "is attached already" in said["again"]


def change_between(me):
    model, reducer, _ = make_model("none")
    loss_of(model, make_batch(me.rank, 0)).backward()
    next(model.parameters()).grad.mul_(0.5)
    try:
        reducer.wait()
    except cortado.CortadoError as error:
        return str(error)
    return None


def test_a_shard_that_changes_before_wait_is_told(pools):
    pool = pools(4)
    try:
        for text in pool.run(change_between):
            assert "was changed between backward() and wait()" in text
    finally:
        pool.close()
