# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What DDP delivers, against a plain implementation in torch; accumulation, unused parameters, loss scaling."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from cases import repeated
from nets import (
    CLASSES,
    COMPSO,
    EXACT,
    FEATURES,
    FLOAT_RANS,
    FP8,
    PUBLISHED,
    QUANT,
    TOPK,
    distance,
    gradients_of,
    local_gradients,
    loss_of,
    make_batch,
    make_net,
    make_optimizer,
    mean_residuals,
)

TINY_BUCKETS = 0.002  # MiB; every tensor of make_net() then has a bucket of DDP's own


class Reference:
    """Low-rank compression with error feedback as the papers write it; only the first bases are taken from the engine.

    kind: "both" (each step projects on rows and columns), "alternate" (ACP-SGD: they take turns) or "power" (Power-SGD:
    columns first, then the rows that gives). columns: of each basis. No matrix may be square.
    """

    def __init__(self, model, kind, columns, warm_up):
        self.kind, self.warm_up = kind, warm_up
        self.residuals, self.bases = {}, {}  # bases: of the rows and of the columns; None if not for the next step
        parameters = dict(model.module.named_parameters())
        for name, entry in model.cortado.state_dict()["tensors"].items():
            rows, cols = parameters[name].shape
            basis, split = entry["basis"].double(), rows * columns
            of_rows = basis[:split].view(rows, columns) if basis.numel() != cols * columns else None
            of_cols = basis[-cols * columns :].view(columns, cols).t() if basis.numel() != split else None
            self.bases[name] = of_rows, of_cols
            self.residuals[name] = torch.zeros(rows, cols, dtype=torch.float64)

    def step(self, local):
        """The gradients that every rank should get, from this rank's own."""
        self.warm_up -= 1
        delivered = {}
        for name, gradient in local.items():
            a = gradient.double() + self.residuals.get(name, 0)
            if name in self.residuals and self.warm_up < 0:
                self.residuals[name] = self._left_out(name, a)
                a = a - self.residuals[name]
            delivered[name] = mean(a)
        return delivered

    def _left_out(self, name, a):
        of_rows, of_cols = self.bases[name]
        average = mean(a)
        if self.kind == "power":
            of_rows = orthonormal(average @ of_cols)
            self.bases[name] = None, average.t() @ of_rows
            return a - of_rows @ of_rows.t() @ a
        self.bases[name] = (
            None if of_cols is None else orthonormal(average @ of_cols),
            None if of_rows is None else orthonormal(average.t() @ of_rows),
        )
        if of_rows is not None:
            a = a - of_rows @ (of_rows.t() @ a)
        if of_cols is not None:
            a = a - (a @ of_cols) @ of_cols.t()
        return a


def orthonormal(factor):
    return torch.linalg.qr(factor).Q


def mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def compare_with_reference(me, plan, kind, columns, warm_up, view):
    """Largest distance between the gradients of some steps and the reference's; residuals at the end too."""
    model = me.attach(make_net(), plan, bucket_cap_mb=TINY_BUCKETS, gradient_as_bucket_view=view)
    optimizer = make_optimizer(model)
    reference = Reference(model, kind, columns, warm_up)
    errors = []
    for step in range(7):
        batch = make_batch(me.rank, step)
        expected = reference.step(local_gradients(model, batch))
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        errors.append(distance(gradients_of(model), expected))
        optimizer.step()
    buckets = model._get_ddp_logging_data()
    assert buckets["has_rebuilt_buckets"] and "," in buckets["rebuilt_bucket_sizes"], "DDP should rebuild its buckets"
    owed = mean_residuals(me, model)
    assert owed and owed.keys() == reference.bases.keys()
    errors.append(distance(owed, {name: mean(residual) for name, residual in reference.residuals.items()}))
    return errors


@pytest.mark.parametrize(
    "plan, kind, columns, warm_up, view",
    [
        ("acp", "both", 2, 2, True),
        ("acp(rank=3, start_step=0)", "both", 2, 0, False),
        ("acp(rank=2, sides=alternate)", "alternate", 2, 2, True),
        (PUBLISHED, "alternate", 4, 0, True),
        repeated(PUBLISHED, "alternate", 4, 0, False),
        repeated("power(rank=2)", "power", 2, 2, True),
        ("power(rank=2)", "power", 2, 2, False),
    ],
)
def test_delivers_what_the_reference_does_across_the_bucket_rebuild(pools, plan, kind, columns, warm_up, view):
    values = pools(3).run(compare_with_reference, plan=plan, kind=kind, columns=columns, warm_up=warm_up, view=view)
    for errors in values:
        assert max(errors) < 1e-4, errors


def accumulate(me, plan, view):
    """Distances, step by step, between accumulating two micro-batches and one backward pass of the summed loss."""
    pair = [me.attach(make_net(), plan, bucket_cap_mb=TINY_BUCKETS, gradient_as_bucket_view=view) for _ in range(2)]
    optimizers = [make_optimizer(model) for model in pair]
    errors = []
    for step in range(6):
        batches = [make_batch(me.rank, 2 * step + micro) for micro in range(2)]
        accumulating, summing = pair
        with accumulating.no_sync():
            loss_of(accumulating, batches[0]).backward()
        loss_of(accumulating, batches[1]).backward()
        sum(loss_of(summing, batch) for batch in batches).backward()
        errors.append(distance(*map(gradients_of, pair)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return errors


@pytest.mark.parametrize(
    "plan, view",
    [
        ("none", True),
        ("cast(fp16)", False),
        ("acp(rank=2)", True),
        ("acp(rank=2)", False),
        ("power(rank=2)", True),
        ("power(rank=2)", False),
        (TOPK, True),
        (TOPK, False),
        (QUANT, True),
        (FP8, False),
        (COMPSO, True),
        (FLOAT_RANS, False),
    ],
)
def test_micro_batches_under_no_sync_count_as_one_step(pools, plan, view):
    for errors in pools(3).run(accumulate, plan=plan, view=view):
        assert max(errors) < (2e-3 if plan == "cast(fp16)" else 1e-4), errors


# ---- unused parameters -----------------------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """A trunk, and branches of which each rank uses those it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(FEATURES, CLASSES)
        self.first = torch.nn.Linear(FEATURES, CLASSES)
        self.second = torch.nn.Linear(FEATURES, CLASSES)
        self.use = ()

    def forward(self, x):
        return self.trunk(x) + sum(getattr(self, name)(x) for name in self.use)


USES = {
    "never": lambda rank, step: ("first",),
    "on one rank": lambda rank, step: ("first", "second") if rank == 1 else ("first",),
    "each rank its own": lambda rank, step: (("first", "second")[(rank + step) % 2],),
    "in some steps": lambda rank, step: ("first", "second") if step < 3 else ("first",),
}
GRAPHS = {
    "found": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static and found": {"static_graph": True, "find_unused_parameters": True},
}


def assert_same_on_all_ranks(me, gradients):
    bits = {n: None if g is None else g.contiguous().view(torch.uint8).numpy().tobytes() for n, g in gradients.items()}
    assert me.gather(bits) == [bits] * me.world_size


def leave_unused(me, plan, use, graph, view):
    """Distances to plain DDP's gradients; None stays None and exact zeros stay zeros."""
    options = {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": view, **GRAPHS[graph]}
    plain, ours = (me.attach(Branches(), codec, **options) for codec in (None, plan))
    errors = []
    for step in range(5):
        for model in (plain, ours):
            model.module.use = USES[use](me.rank, step)
            model.zero_grad()
            loss_of(model, make_batch(me.rank, step)).backward()
        expected, got = gradients_of(plain), gradients_of(ours)
        assert {n: g is None for n, g in got.items()} == {n: g is None for n, g in expected.items()}
        for name, gradient in expected.items():
            if gradient is not None and not gradient.any():
                assert not got[name].any(), name
        assert_same_on_all_ranks(me, got)
        errors.append(distance(got, expected))
    return errors


POWER_EXACT = "power(rank=8, min_compression_rate=0, start_step=1)"  # complete bases: the mean, by the low-rank route


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("exact", [POWER_EXACT, EXACT])
@pytest.mark.parametrize(
    "use, graph",
    [
        ("never", "found"),
        ("never", "static"),
        ("never", "static and found"),
        ("on one rank", "found"),
        ("each rank its own", "found"),
    ],
)
def test_unused_parameters_end_as_under_ddp_and_the_rest_is_averaged(pools, exact, use, graph, view):
    for errors in pools(2).run(leave_unused, plan=exact, use=use, graph=graph, view=view):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("plan", ["none", FLOAT_RANS])
def test_unused_parameters_pass_through_what_loses_nothing(pools, plan):
    for errors in pools(3).run(leave_unused, plan=plan, use="each rank its own", graph="found", view=True):
        assert max(errors) < 1e-6, errors


def leave_unused_under_feedback(me, plan, use, graph, view):
    options = {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": view, **GRAPHS[graph]}
    model = me.attach(Branches(), plan, **options)
    total = {n: torch.zeros_like(p) for n, p in model.module.named_parameters()}
    delivered = {n: torch.zeros_like(p) for n, p in model.module.named_parameters()}
    for step in range(5):
        model.module.use = USES[use](me.rank, step)
        model.zero_grad()
        batch = make_batch(me.rank, step)
        names, parameters = zip(*model.module.named_parameters(), strict=True)
        local = torch.autograd.grad(loss_of(model.module, batch), parameters, allow_unused=True, materialize_grads=True)
        loss_of(model, batch).backward()
        for name, gradient, parameter in zip(names, local, parameters, strict=True):
            total[name] += mean(gradient)
            delivered[name] += 0 if parameter.grad is None else parameter.grad
        assert_same_on_all_ranks(me, gradients_of(model))
    for name, residual in mean_residuals(me, model).items():
        delivered[name] += residual
    assert not delivered["second.weight"].any() if use == "never" else delivered["second.weight"].any()
    return distance(delivered, total)


@pytest.mark.parametrize(
    "use, graph, view",
    [
        ("never", "static", True),
        ("never", "found", False),
        ("each rank its own", "found", True),
        ("each rank its own", "found", False),
        ("in some steps", "found", True),
    ],
)
@pytest.mark.parametrize(
    "plan",
    [
        "acp(rank=2, start_step=1, bucket_cap_mib=0)",
        "topk(density=0.1, min_elems=0, start_step=1, bucket_cap_mib=0)",
        "sign(scale=mean_abs, min_elems=0, start_step=1)",
        QUANT.replace(")", ", start_step=1)"),
        COMPSO.replace(")", ", start_step=1)"),
    ],
)
def test_what_is_held_back_is_owed_with_unused_parameters_too(pools, plan, use, graph, view):
    assert max(pools(3).run(leave_unused_under_feedback, plan=plan, use=use, graph=graph, view=view)) < 1e-5


# ---- loss scaling ----------------------------------------------------------------------------------------------------


class OwnScaler:
    """Anything with get_scale() will do."""

    def __init__(self):
        self.value = 1024.0

    def get_scale(self):
        return self.value


def train_scaled(me, plan, kind, view):
    """Distance of the parameters to a run without scaling."""
    scaler = {"own": OwnScaler, "torch": make_scaler}[kind]()
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": TINY_BUCKETS}
    plain, scaled = me.attach(make_net(), plan, **options), me.attach(make_net(), plan, grad_scaler=scaler, **options)
    optimizers = [make_optimizer(plain), make_optimizer(scaled)]
    scales = []
    for step in range(8):
        batch = make_batch(me.rank, step)
        loss_of(plain, batch).backward()
        optimizers[0].step()
        scales.append(scaler.get_scale())
        if kind == "torch":
            scaler.scale(loss_of(scaled, batch)).backward()
            scaler.step(optimizers[1])
            scaler.update()
        else:
            (loss_of(scaled, batch) * scaler.value).backward()
            for parameter in scaled.parameters():
                parameter.grad /= scaler.value
            optimizers[1].step()
            scaler.value *= (0.125, 16)[step % 2]
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert len(set(scales)) > 2
    return distance(*(dict(model.module.named_parameters()) for model in (scaled, plain)))


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=8.0, growth_interval=2)


@pytest.mark.parametrize("kind, view", [("own", True), ("torch", False)])
@pytest.mark.parametrize("plan", ["acp(rank=2)", "power(rank=2)", "acp(rank=2, wire=bf16)", TOPK])
def test_residuals_follow_a_changing_loss_scale(pools, plan, kind, view):
    assert max(pools(2).run(train_scaled, plan=plan, kind=kind, view=view)) < 1e-5


def skip_under_scaler(me, plan):
    """The scaler must skip the same step on all ranks although one has the Inf; returns a distance and the scales."""
    scaler = make_scaler()
    model, undisturbed = (me.attach(make_net(), plan, grad_scaler=s) for s in (scaler, make_scaler()))
    optimizers = [make_optimizer(model), make_optimizer(undisturbed)]
    other = undisturbed.cortado._grad_scaler
    scales = []
    for step in range(7):
        poisoned = step == 4
        hook = contextlib.nullcontext()
        if poisoned and me.rank == 1:
            hook = poison(model.module[0].weight)
        with hook:
            scaler.scale(loss_of(model, make_batch(me.rank, step))).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        scales.append(scaler.get_scale())
        if not poisoned:
            other.scale(loss_of(undisturbed, make_batch(me.rank, step))).backward()
            other.step(optimizers[1])
            other.update()
            optimizers[1].zero_grad()
    return distance(*(dict(m.module.named_parameters()) for m in (model, undisturbed))), scales


@contextlib.contextmanager
def poison(parameter):
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    yield
    handle.remove()


@pytest.mark.parametrize("plan", ["acp(rank=2)", "power(rank=2)", TOPK])
def test_a_step_that_the_scaler_skips_is_skipped_everywhere(pools, plan):
    values = pools(2).run(skip_under_scaler, plan=plan)
    (error, scales), (_, other_scales) = values
    assert scales == other_scales and scales[4] < scales[3]
    assert error < 1e-5
