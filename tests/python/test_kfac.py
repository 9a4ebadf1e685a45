# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""KFAC on one rank: the numbers, which layers, options, saving, and what is refused."""

import copy
import enum
import gc
import logging
import warnings
import weakref

import cortado
import numpy as np
import pytest
import torch
from cortado.kfac_layers import MOST_FACTOR_ROWS, find_layers
from kfac_reference import Reference, gradients_of
from late_device import on_device
from torch import nn
from torch.utils.checkpoint import checkpoint

QUIET = {"verbose": False}


class Net(nn.Module):
    """Convolutions of all kinds, linear layers, and parameters that K-FAC leaves alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.conv1d = nn.Conv1d(6, 8, 3, stride=2, padding=2, dilation=2)
        self.grouped = nn.Conv2d(2, 6, (3, 2), padding=(1, 0), groups=2)
        self.same = nn.Conv2d(6, 4, (2, 3), padding="same", bias=False)
        self.circular = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 2 * 5, 12), nn.Tanh(), nn.Linear(12, 3, bias=False))

    def forward(self, indices):
        x = self.conv1d(self.embed(indices).transpose(1, 2))  # 8 channels, 8 places
        x = x.reshape(len(x), 2, 4, 8)
        x = torch.tanh(self.same(self.grouped(x)))
        return self.head(self.norm(self.depthwise(self.circular(x))))


NAMES = ["conv1d", "grouped", "same", "circular", "depthwise", "head.1", "head.3"]


def batch(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (rows, 16), generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def backward(model, step, scale=1.0, rows=7):
    model.zero_grad()
    inputs, labels = batch(step, rows)
    (nn.functional.cross_entropy(model(inputs), labels) * scale).backward()


def distance(got, expected):
    lost = sum(((got[n] - expected[n]) ** 2).sum() for n in expected)
    return np.sqrt(lost / sum((expected[n] ** 2).sum() for n in expected))


@pytest.mark.parametrize(
    "options, reference",
    [
        ({}, {}),
        ({"damping": 0.03, "factor_decay": 0.5, "kl_clip": None}, {"damping": 0.03, "factor_decay": 0.5, "kl_clip": 0}),
        ({"lr": 1e-6}, {"lr": 1e-6}),
        ({"compute_method": "inverse", "damping": 0.1}, {"eigen": False, "damping": 0.1}),
        ({"pi_correction": True, "damping": 0.1}, {"pi": True, "damping": 0.1}),
        ({"compute_method": "inverse", "pi_correction": True, "damping": 0.1}, {"pi": True, "damping": 0.1}),
    ],
)
def test_gradients_are_those_of_the_reference(options, reference):
    model = Net()
    expected = Reference(model, NAMES, **reference)
    kfac = cortado.KFAC(model, **options, **QUIET)
    for step in range(3):
        backward(model, step)
        gradients = gradients_of(model, NAMES)
        others = {n: p.grad.clone() for n, p in model.named_parameters() if "embed" in n or "norm" in n}
        assert kfac.step()
        expected.update(expected.means())
        assert distance(gradients_of(model, NAMES), expected.precondition(gradients)) < 2e-4
        for name, gradient in others.items():
            assert torch.equal(model.get_parameter(name).grad, gradient)


def test_update_steps_and_schedules_are_functions_of_the_step():
    model = Net()
    seen = []
    kfac = cortado.KFAC(
        model,
        factor_update_steps=2,
        inv_update_steps=lambda step: 4 if step < 4 else 1,
        damping=lambda step: seen.append(step) or 0.1 / (step + 1),
        **QUIET,
    )
    expected = Reference(model, NAMES)
    for step in range(6):
        backward(model, step)
        gradients = gradients_of(model, NAMES)
        kfac.step()
        means = expected.means()
        if step % 2 == 0:
            expected.update(means)
        if step in (0, 4, 5):
            used = dict(expected.factors)
        expected.damping = 0.1 / (step + 1)
        newest, expected.factors = expected.factors, used
        assert distance(gradients_of(model, NAMES), expected.precondition(gradients)) < 2e-4
        expected.factors = newest
    assert seen == list(range(6))
    assert kfac.steps == 6


def test_the_learning_rate_of_an_optimizer_and_inputs_by_name():
    ends = []
    for by_name in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.7)
        kfac = cortado.KFAC(model, lr=optimizer if by_name else 0.7, **QUIET)
        inputs = torch.randn(6, 4)
        (model(input=inputs) if by_name else model(inputs)).square().mean().backward()
        kfac.step()
        ends.append(model.weight.grad.clone())
    assert torch.equal(*ends)


def test_micro_batches_are_averaged():
    model = Net()
    expected = Reference(model, NAMES)
    kfac = cortado.KFAC(model, **QUIET)
    model.zero_grad()
    for micro in range(3):
        inputs, labels = batch(micro)
        nn.functional.cross_entropy(model(inputs), labels).backward()
    gradients = gradients_of(model, NAMES)
    kfac.step()
    expected.update(expected.means())
    assert distance(gradients_of(model, NAMES), expected.precondition(gradients)) < 2e-4
    assert kfac.report().to_dict()["fallbacks"] == []  # one after the other is no layer called twice


def test_a_scaled_loss_changes_nothing():
    class Scaler:
        def get_scale(self):
            return 1024.0

    ends = []
    for scaler in (None, Scaler(), Scaler().get_scale):
        model = Net()
        kfac = cortado.KFAC(model, grad_scaler=scaler, **QUIET)
        for step in range(2):
            backward(model, step, scale=1024.0 if scaler else 1.0)
            if scaler:
                for parameter in model.parameters():
                    parameter.grad /= 1024.0  # GradScaler.unscale_
            kfac.step()
        ends.append(gradients_of(model, NAMES))
    assert distance(ends[0], ends[1]) < 1e-6
    assert distance(ends[1], ends[2]) == 0


def test_gradients_that_carry_the_scale_still_are_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scaler_of in (lambda scaler: scaler, lambda scaler: scaler.get_scale):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        kfac = cortado.KFAC(model, grad_scaler=scaler_of(scaler), **QUIET)
        scaler.scale(torch.ones(()))  # its scale exists from the first call on
        backward(model, 0, scale=1024.0)
        with pytest.raises(cortado.SpecError, match="unscale_"):
            kfac.step()
        scaler.unscale_(optimizer)
        assert kfac.step()
        kfac.detach()
    for scale, enabled in ((1.0, True), (1024.0, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
        kfac = cortado.KFAC(model, grad_scaler=scaler, **QUIET)
        backward(model, 0)
        assert kfac.step()
        kfac.detach()


def test_a_second_kfac_of_a_model_is_refused_until_the_first_is_detached():
    model = Net()
    first = cortado.KFAC(model, **QUIET)
    with pytest.raises(cortado.SpecError, match=r"detach\(\)"):
        cortado.KFAC(model, **QUIET)
    first.detach()
    second = cortado.KFAC(model, **QUIET)
    first.detach()
    with pytest.raises(cortado.SpecError, match=r"detach\(\)"):
        cortado.KFAC(model, **QUIET)
    del first, second


def test_a_model_does_not_keep_its_kfac():
    model = Net()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    for _ in range(2):
        kfac = cortado.KFAC(model, **QUIET)
        backward(model, 0)
        assert kfac.step()
        del kfac
    kfac = cortado.KFAC(model, **QUIET)
    kfac.detach()
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("how", ["dropped", "reset_batch", "detach", "step"])
def test_a_model_whose_gradients_were_averaged_does_not_keep_its_kfac(how):
    model = Net()
    kfac = cortado.KFAC(model, **QUIET)
    backward(model, 0)
    kfac._watch_gradients(model.parameters())  # as synchronize() does on several ranks
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    if how != "dropped":
        getattr(kfac, how)()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    del kfac
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert cortado.KFAC(model, **QUIET)


def test_skip_layers_is_one_pattern_or_several():
    assert cortado.KFAC(Net(), skip_layers="^same$", **QUIET).skipped["same"] == "skip_layers"
    with pytest.raises(cortado.SpecError, match="no regular expression"):
        cortado.KFAC(Net(), skip_layers=["*.head"], **QUIET)
    with pytest.raises(cortado.SpecError, match="torch.nn.Module, got int"):
        cortado.KFAC(3)


def test_an_overflow_leaves_no_trace():
    ends = []
    for has_bad_step in (False, True):
        model = Net()
        kfac = cortado.KFAC(model, **QUIET)
        backward(model, 0)
        assert kfac.step()
        if has_bad_step:
            kfac.reset_batch()
            backward(model, 1)
            kfac.reset_batch()  # only gradients are bad here
            model.head[1].weight.grad[0, 0] = float("inf")
            before = [p.grad.clone() for p in model.parameters()]
            assert not kfac.step()
            assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
            assert kfac.report().to_dict()["non_finite_steps"] == 1
            model.norm.reset_running_stats()
        backward(model, 2)
        kfac.step()
        ends.append(gradients_of(model, NAMES))
    assert distance(ends[0], ends[1]) < 1e-6


def test_a_step_that_is_not_finite_is_none():
    model = Net()
    kfac = cortado.KFAC(model, **QUIET)
    backward(model, 0)
    assert kfac.step()
    before = kfac.state_dict()
    backward(model, 1)
    model.head[1].weight.grad[0, 0] = float("nan")
    assert not kfac.step()
    after = kfac.state_dict()
    assert after["step"] == kfac.steps == 1
    for name, layer in before["layers"].items():
        assert all(torch.equal(values, after["layers"][name][key]) for key, values in layer.items()), name
    model.head[1].weight.grad[0, 0] = 0.0
    assert kfac.step()
    fallbacks = {f["reason"] for f in kfac.report().to_dict()["fallbacks"]}
    assert fallbacks == {"no rank had a batch for a factor: the average stays"}  # that batch is forgotten


def test_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
        expected = Reference(model, ["0", "2"])
        kfac = cortado.KFAC(model, **QUIET)
        model(torch.randn(20, 8).to(dtype)).float().square().mean().backward()
        gradients = gradients_of(model, ["0", "2"])
        kfac.step()
        expected.update(expected.means())
        assert distance(gradients_of(model, ["0", "2"]), expected.precondition(gradients)) < 2e-2


def test_gradients_in_another_memory_order():
    ends = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 4 * 4, 2)).to(memory_format=order)
        kfac = cortado.KFAC(model, **QUIET)
        inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=order)
        model(inputs).square().mean().backward()
        kfac.step()
        ends.append(gradients_of(model, ["0", "2"]))
    assert distance(ends[0], ends[1]) < 1e-5


# ---- which layers ----------------------------------------------------------------------------------------------------


def test_the_start_says_what_is_preconditioned_and_what_not_and_why(capsys):
    model = Net()
    kfac = cortado.KFAC(model, skip_layers=["^same$"], compression="compso(bound=4e-3)")
    text = capsys.readouterr().err
    assert "MEM-OPT (the default with compression) on 1 rank," in text
    assert "preconditions 6 layers" in text and "conv1d (18 + bias -> 8)" in text
    assert "grouped (6 + bias -> 3 in 2 groups)" in text
    assert "embed: its inputs are indices" in text and "norm: BatchNorm2d is no linear layer" in text
    assert kfac.skipped["same"] == "skip_layers"


def test_comm_opt_with_compression_warns():
    with pytest.warns(UserWarning, match="COMM-OPT sends no preconditioned gradients, so compression=quant"):
        cortado.KFAC(Net(), strategy="comm-opt", compression="quant(bits=8)", **QUIET)


def test_comm_opt_says_what_travels():
    assert "inverses; factors and inverses as none" in cortado.KFAC(Net(), compute_method="inverse").describe()


def test_error_feedback_without_compression_warns():
    with pytest.warns(UserWarning, match="error_feedback has no effect without compression="):
        cortado.KFAC(Net(), error_feedback=True, strategy="mem-opt")


def test_a_step_without_a_forward_pass_warns_once():
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    kfac = cortado.KFAC(model, **QUIET)
    with pytest.warns(UserWarning, match="step 0 updates the factors, but this rank had no forward pass in training"):
        kfac.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac.step()  # was told


def test_steps_with_a_forward_pass_do_not_warn():
    model = nn.Linear(3, 2)
    kfac = cortado.KFAC(model, factor_update_steps=2, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            if step % 2 == 0:
                model(torch.ones(4, 3)).sum().backward()
            kfac.step()
    model(torch.ones(4, 3)).sum().backward()
    kfac.reset_batch()
    with pytest.warns(UserWarning, match="step 4 updates the factors"):
        kfac.step()


def test_dp_kfac_says_what_travels():
    text = cortado.KFAC(Net(), strategy="dp-kfac", **QUIET).describe()
    assert "gradients as none\n" in text and "factors as" not in text


def test_hyperparameters_can_be_assigned():
    kfac = cortado.KFAC(nn.Linear(3, 2))
    kfac.damping, kfac.inv_update_steps = 0.25, lambda step: 3 + step
    assert (kfac.damping, kfac.inv_update_steps) == (0.25, 3)
    with pytest.raises(cortado.SpecError, match="factor_update_steps must be a whole number of at least 1, got 0"):
        kfac.factor_update_steps = 0
    assert kfac.factor_update_steps == 1
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.25)
    kfac.lr = optimizer
    optimizer.param_groups[0]["lr"] = 0.5
    assert kfac.lr == 0.5


def test_dp_kfac_with_factor_compression_warns():
    with pytest.warns(UserWarning, match="DP-KFAC sends no factors and no inverses, so factor_compression=quant"):
        cortado.KFAC(Net(), strategy="dp-kfac", factor_compression="quant(bits=8)", **QUIET)


def test_comm_opt_warns_when_a_schedule_comes_to_a_codec():
    model = Net()
    later = {"compression": lambda step: "none" if step == 0 else "quant(bits=8)"}
    assert "MEM-OPT" in cortado.KFAC(Net(), **later, **QUIET).describe()  # the default knows that a codec may come
    kfac = cortado.KFAC(model, strategy="comm-opt", **later, **QUIET)
    backward(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac.step()
    backward(model, 1)
    with pytest.warns(UserWarning, match="compression=quant.bits=8. has no effect"):
        kfac.step()


# ---- options of kfac-pytorch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option, reason",
    [
        ({"accumulation_steps": 4}, "every micro-batch since the last"),
        ({"allreduce_bucket_cap_mb": 25.0}, "the factors of all layers are one message"),
        ({"compute_eigenvalue_outer_product": True}, "damping takes effect at once"),
        ({"symmetry_aware": False}, "always travel as triangles"),
        ({"update_factors_in_hook": True}, "sums what hooks have added up"),
        ({"factor_dtype": torch.bfloat16}, "kept in float32"),
        ({"inv_dtype": torch.float16}, "kept in float32"),
    ],
)
def test_options_without_effect_are_taken_with_a_warning(option, reason):
    ends = []
    for options in ({}, option):
        model = Net()
        if options:
            with pytest.warns(UserWarning, match="has no effect because .*" + reason) as caught:
                kfac = cortado.KFAC(model, **options, **QUIET)
            assert len([w for w in caught if "cortado" in str(w.message)]) == 1
        else:
            kfac = cortado.KFAC(model, **QUIET)
        backward(model, 0)
        kfac.step()
        ends.append(gradients_of(model, NAMES))
    assert distance(*ends) == 0


def test_options_that_say_what_happens_anyway_are_silent():
    same = {"accumulation_steps": 1, "symmetry_aware": True, "update_factors_in_hook": False, "skip_layers": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cortado.KFAC(Net(), factor_dtype=torch.float32, inv_dtype=torch.float32, **same, **QUIET)


def test_names_and_members_of_enumerations():
    spellings = enum.Enum("Spellings", ["COMM_OPT", "MEM_OPT", "HYBRID_OPT", "INVERSE", "MEMORY"])
    for options, text in (
        ({"compute_method": "EIGEN"}, "eigenvectors"),
        ({"compute_method": spellings.INVERSE, "assignment_strategy": spellings.MEMORY}, "inverses"),
        ({"strategy": "MEM_OPT"}, "MEM-OPT (asked for)"),
        ({"grad_worker_fraction": spellings.COMM_OPT}, "COMM-OPT (asked for)"),
        ({"grad_worker_fraction": spellings.MEM_OPT}, "MEM-OPT (asked for)"),
        ({"grad_worker_fraction": spellings.HYBRID_OPT}, "COMM-OPT (grad_worker_fraction=0.5)"),  # of one rank
        ({"grad_worker_fraction": 0}, "(grad_worker_fraction=0)"),
    ):
        assert text in cortado.KFAC(Net(), **options, **QUIET).describe()


def test_the_start_as_a_record_of_a_logger(caplog, capsys):
    with caplog.at_level(logging.DEBUG):
        cortado.KFAC(Net(), loglevel=logging.DEBUG)
    assert "preconditions 7 layers" in caplog.text
    assert capsys.readouterr().err == ""


def test_reasons_to_skip():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict(
        {
            "good": nn.Linear(3, 2),
            "attention": nn.MultiheadAttention(4, 2),
            "frozen": nn.Linear(3, 2).requires_grad_(False),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
            "transposed": nn.ConvTranspose2d(2, 2, 2),
            "conv3d": nn.Conv3d(1, 1, 2),
            "wide": nn.Linear(3, 2).double(),
            "huge": nn.Linear(1, 40000),
            "first": shared,
            "second": nn.Linear(4, 4),
        }
    )
    model["second"].weight = shared.weight
    model["frozen_bias"] = nn.Linear(3, 2)
    model["frozen_bias"].bias.requires_grad_(False)
    kfac = cortado.KFAC(model, **QUIET)
    reasons = kfac.skipped
    assert "not layers that are called" in reasons["attention"]
    assert "without calling it" in reasons["attention.out_proj"]
    assert reasons["frozen"] == "its weight takes no gradient"
    assert "computed from other parameters" in reasons["parametrized"]
    assert "transposed" in reasons["transposed"] and "three dimensions" in reasons["conv3d"]
    assert "torch.float64" in reasons["wide"]
    assert "40000 rows" in reasons["huge"]
    assert reasons["first"] == "its parameters are shared with second"
    assert reasons["second"] == "its parameters are shared with first"
    assert "preconditions 2 layers" in kfac.describe()
    assert "frozen_bias (3 -> 2)" in kfac.describe()


def test_biases_unlike_their_weights_are_reasons_to_skip():
    model = nn.ModuleDict({name: nn.Linear(3, 2).bfloat16() for name in ("good", "other", "short", "frozen")})
    for name in ("other", "frozen"):
        model[name].bias = nn.Parameter(torch.zeros(2), requires_grad=name == "other")
    model["short"].bias = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    kfac = cortado.KFAC(model, **QUIET)
    assert kfac.skipped == {
        "other": "its bias is torch.float32, its weight torch.bfloat16",
        "short": "its bias has the shape (1,), expected (2,)",
    }
    assert "preconditions 2 layers" in kfac.describe()


def test_rows_of_a_factor_count_the_bias_where_there_is_one():
    sizes = {"bias": MOST_FACTOR_ROWS, "no_bias": MOST_FACTOR_ROWS, "larger": MOST_FACTOR_ROWS + 1}
    layers, skipped = find_layers(
        nn.ModuleDict({name: nn.Linear(size, 1, bias=name == "bias", device="meta") for name, size in sizes.items()}),
        (),
    )
    assert [layer.name for layer in layers] == ["no_bias"]
    assert set(skipped) == {"bias", "larger"}


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_a_layer_that_is_called_twice_counts_its_calls_as_batches():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    model = Twice()
    expected = Reference(model, ["layer"])
    kfac = cortado.KFAC(model, **QUIET)
    model(torch.randn(9, 5)).square().mean().backward()
    gradients = gradients_of(model, ["layer"])
    kfac.step()
    expected.update(expected.means())
    assert distance(gradients_of(model, ["layer"]), expected.precondition(gradients)) < 1e-4
    reason = "called again before its backward pass: each call counts as a batch"
    assert kfac.report().to_dict()["fallbacks"] == [{"layer": "layer", "reason": reason, "count": 1}]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_called_twice", [False, True])
def test_checkpointed_activations_count_once(use_reentrant, is_called_twice):
    after, fallbacks = [], []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        square = nn.Linear(8, 8)
        inside = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), square, nn.Tanh(), *[square] * is_called_twice)
        model = nn.Sequential(nn.Linear(6, 5), inside, nn.Linear(8, 3))
        kfac = cortado.KFAC(model, **QUIET)
        for _ in range(2):
            model.zero_grad()
            x = model[0](torch.randn(9, 6))
            x = checkpoint(inside, x, use_reentrant=use_reentrant) if is_checkpointed else inside(x)
            model[2](x).square().mean().backward()
            assert kfac.step()
        fallbacks.append(kfac.report().to_dict()["fallbacks"])
        after.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*after)
    assert fallbacks[0] == fallbacks[1] and len(fallbacks[0]) == is_called_twice


class Sum(nn.Module):
    """y += x"""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, y):
        x = torch.full_like(y, 0.1)
        return y.add_(x) if self.in_place else y + x


def after_in_place(in_place, operation, shape, checkpointing):
    """The factors and gradients of two linear layers with an operation between that may be in place."""
    torch.manual_seed(0)
    between = Sum(in_place) if operation is Sum else operation(inplace=in_place)
    model = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 3))
    kfac = cortado.KFAC(model, **QUIET)
    for _ in range(2):
        model.zero_grad()
        x = torch.randn(*shape, 6, requires_grad=True)
        y = model(x) if checkpointing is None else checkpoint(model, x, use_reentrant=checkpointing)
        y.square().mean().backward()
        assert kfac.step()
    layers = kfac.state_dict()["layers"]
    held = [values for layer in layers.values() for name, values in layer.items() if name.endswith("factor")]
    assert not torch.equal(layers["0"]["g_factor"], torch.eye(8)[torch.tril_indices(8, 8).unbind()])
    return torch.cat([values.flatten() for values in (*held, *(p.grad for p in model.parameters()))])


@pytest.mark.parametrize("checkpointing", [None, False, True])  # use_reentrant
@pytest.mark.parametrize("operation", [nn.ReLU, nn.Dropout, Sum])
@pytest.mark.parametrize("shape", [(9,), (4, 5), (2, 3, 5)])
def test_what_follows_may_work_in_place(shape, operation, checkpointing):
    plain, in_place = (after_in_place(how, operation, shape, checkpointing) for how in (False, True))
    assert torch.equal(plain, in_place)


def test_a_layer_that_is_not_called():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "idle": nn.Linear(4, 3)})
    kfac = cortado.KFAC(model, **QUIET)
    model["used"](torch.randn(5, 4)).square().mean().backward()
    assert kfac.step()
    assert model["idle"].weight.grad is None
    fallbacks = {(f["layer"], f["reason"]) for f in kfac.report().to_dict()["fallbacks"]}
    assert fallbacks == {("idle", "no rank had a batch for a factor: the average stays")}


def test_layers_whose_inputs_change_their_size():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    expected = Reference(model, ["0", "3"])
    kfac = cortado.KFAC(model, **QUIET)
    for step, size in enumerate((4, 9, 6)):
        model.zero_grad()
        model(torch.randn(2 + step, 1, size, size)).square().mean().backward()
        gradients = gradients_of(model, ["0", "3"])
        kfac.step()
        expected.update(expected.means())
        assert distance(gradients_of(model, ["0", "3"]), expected.precondition(gradients)) < 2e-4


def test_a_layer_whose_weight_changes_its_shape_is_refused():
    model = nn.Sequential(nn.Linear(4, 3))
    kfac = cortado.KFAC(model, **QUIET)
    model[0].weight = nn.Parameter(torch.zeros(5, 4))
    model[0].weight.grad = torch.zeros(5, 4)
    with pytest.raises(cortado.MismatchError, match=r"layer 0 had a weight of shape \(3, 4\), now \(5, 4\)"):
        kfac.step()


@pytest.mark.parametrize(
    "is_convolution, side, text",
    [
        (True, 1, r"layer 0 had inputs of 8 channels, now of shape \(2, 4, 6, 6\): make a new KFAC"),
        (True, 0, r"layer 0 had outputs of 12 channels, now of shape \(2, 6, 4, 4\)"),
        (False, 1, r"layer 0 had 8 inputs, now a tensor of shape \(2, 4\)"),  # as many values as in one row before
        (False, 0, r"layer 0 had 12 outputs, now a tensor of shape \(2, 6\)"),
    ],
)
def test_layers_with_fewer_inputs_or_outputs_than_before_are_refused(is_convolution, side, text):
    model = nn.Sequential(nn.Conv2d(8, 12, 3) if is_convolution else nn.Linear(8, 12))
    kfac = cortado.KFAC(model, **QUIET)
    weight = model[0].weight
    half = [slice(None), slice(None)]
    half[side] = slice(weight.shape[side] // 2)
    model[0].weight = nn.Parameter(weight.detach()[tuple(half)].clone())
    model[0].bias = nn.Parameter(torch.zeros(len(model[0].weight)))
    inputs = torch.randn(2, model[0].weight.shape[1], *((6, 6) if is_convolution else ()))
    with pytest.raises(cortado.MismatchError, match=text):
        model(inputs).square().mean().backward()
    kfac.detach()


@pytest.mark.parametrize(
    "bias, error, text",
    [
        (torch.zeros(3, dtype=torch.float64), cortado.SpecError, "layer 0: .*got torch.float32 and torch.float64"),
        (torch.zeros(3).bfloat16(), cortado.SpecError, "layer 0: .*got torch.float32 and torch.bfloat16"),
        (torch.zeros(1), cortado.MismatchError, r"layer 0 had a bias of shape \(3,\), now \(1,\)"),
        (None, cortado.MismatchError, r"layer 0 had a bias of shape \(3,\), now None"),
    ],
)
def test_biases_that_are_no_longer_like_their_weight_are_refused(bias, error, text):
    model = nn.Sequential(nn.Linear(4, 3))
    kfac = cortado.KFAC(model, **QUIET)
    model[0].bias = None if bias is None else nn.Parameter(bias)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(error, match=text):
        kfac.step()


def test_parameters_that_are_frozen_later_stay():
    for name in ("weight", "bias"):
        model = nn.Sequential(nn.Linear(4, 3))
        kfac = cortado.KFAC(model, **QUIET)
        getattr(model[0], name).requires_grad_(False)
        model(torch.randn(5, 4)).square().mean().backward()
        gradient = model[0].bias.grad if name == "weight" else None
        assert kfac.step()
        assert getattr(model[0], name).grad is None
        assert gradient is None or torch.equal(model[0].bias.grad, gradient)


def test_layers_that_have_moved_are_refused():
    model = nn.Sequential(nn.Linear(4, 3))
    kfac = cortado.KFAC(model, **QUIET)
    with pytest.raises(cortado.SpecError, match="the activations of 0 are on meta"):
        model.to("meta")(torch.zeros(5, 4, device="meta"))
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(cortado.SpecError, match="gradients of 0 are on meta"):
        kfac.step()


def test_no_batch_and_empty_batches():
    model = nn.Sequential(nn.Linear(4, 3))
    kfac = cortado.KFAC(model, **QUIET)
    model(torch.zeros(0, 4)).sum().backward()
    assert kfac.step()
    with torch.no_grad():
        model(torch.randn(2, 4))
    model.eval()
    model(torch.randn(2, 4)).sum().backward()
    assert kfac.step()
    assert {f["count"] for f in kfac.report().to_dict()["fallbacks"]} == {4}  # A and G, twice


@pytest.mark.parametrize(
    "options, text",
    [
        ({"strategy": "best"}, "strategy must be one of comm-opt"),
        ({"strategy": "hybrid-opt"}, "needs grad_worker_fraction"),
        ({"strategy": "mem-opt", "grad_worker_fraction": 1}, "give one of them"),
        ({"grad_worker_fraction": 2}, "from 0 .one rank. to 1"),
        ({"grad_scaler": 3}, "get_scale.. or be a function"),
        ({"pi_correction": 1}, "pi_correction must be True or False, got 1"),
        ({"error_feedback": "yes"}, "error_feedback must be True or False, got 'yes'"),
        ({"aggregate": 2.0}, "aggregate must be a whole number of at least 0, got 2.0"),
        ({"random_seed": -1}, "random_seed must be a whole number of at least 0, got -1"),
        ({"threads": "2"}, "threads must be a whole number of at least 0, got '2'"),
        ({"timeout_s": 0}, "timeout_s must be a number above 0, got 0"),
        ({"accumulation_steps": 0}, "accumulation_steps must be at least 1, got 0"),
        ({"allreduce_bucket_cap_mb": -1}, "allreduce_bucket_cap_mb must be at least 0"),
        ({"factor_dtype": torch.float64}, "factor_dtype can't be torch.float64"),
        ({"inv_dtype": torch.int8}, "inv_dtype can't be torch.int8"),
        ({"compute_method": "qr"}, "compute_method must be one of eigen, inverse"),
        ({"assignment_strategy": "luck"}, "assignment_strategy must be one of"),
        ({"compression": "compsoo"}, 'unknown codec "compsoo"'),
        ({"compression": "acp(rank=2)"}, "cannot send what one rank has computed"),
        ({"factor_compression": "power"}, "cannot send what one rank has computed"),
        ({"compression": "compso(bound=2)"}, "bound must be"),
        ({"compression": lambda step: "auto"}, 'say compression="auto"'),
        ({"inv_update_steps": 0}, "inv_update_steps must be a whole number of at least 1, got 0"),
        ({"factor_update_steps": 2.5}, "factor_update_steps must be a whole number of at least 1, got 2.5"),
        ({"damping": "x"}, "damping must be a number, or a function of the step that gives one, got 'x'"),
        ({"factor_decay": None}, "factor_decay must be a number, or .*, got None"),
        ({"lr": None}, "lr must be a number, or .*, got None"),
        ({"grad_worker_fraction": "half"}, "grad_worker_fraction must be from 0 .*, got 'half'"),
        ({"skip_layers": 5}, "skip_layers must be regular expressions of names, got 5"),
        ({"accumulation_steps": "x"}, "accumulation_steps must be at least 1, got 'x'"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(cortado.CortadoError, match=text):
        cortado.KFAC(Net(), **options, **QUIET)


def test_wrong_values_are_refused_when_they_come():
    model = nn.Sequential(nn.Linear(4, 3))
    for options, text in (
        ({"damping": lambda step: 0}, "damping must be above 0, got 0"),
        ({"factor_decay": 2}, "factor_decay must be from 0 to 1, got 2"),
        ({"inv_update_steps": lambda step: 0}, "inv_update_steps must be a whole number of at least 1, got 0"),
        ({"damping": lambda step: "x"}, "damping must be a number, or a function of the step that gives one, got 'x'"),
    ):
        kfac = cortado.KFAC(model, **options, **QUIET)
        model(torch.randn(5, 4)).square().mean().backward()
        with pytest.raises(cortado.SpecError, match=text):
            kfac.step()
        kfac.detach()


def test_hyperparameters_can_be_read():
    kfac = cortado.KFAC(
        nn.Linear(2, 2), damping=0.5, kl_clip=None, lr=lambda step: 0.1 / (step + 1), inv_update_steps=10, **QUIET
    )
    assert (kfac.damping, kfac.factor_decay, kfac.kl_clip, kfac.lr) == (0.5, 0.95, 0, 0.1)
    assert (kfac.factor_update_steps, kfac.inv_update_steps) == (1, 10)


def test_copies_of_a_model_are_not_preconditioned(tmp_path):
    """As of an average of the weights, or a teacher."""
    model, kfac, optimizer = make_run()
    twin, expected, _ = make_run()
    torch.save(model, tmp_path / "model.pt")
    copies = [
        copy.deepcopy(model),
        torch.load(tmp_path / "model.pt", weights_only=False),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    for one in copies:
        backward(one, 7)
    backward(model, 0)
    backward(twin, 0)
    kfac.step()
    expected.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert kfac.report().to_dict()["fallbacks"] == expected.report().to_dict()["fallbacks"]
    cortado.KFAC(copies[0], **QUIET)  # it may have one of its own


def test_nobody_keeps_a_kfac_or_its_model():
    """They have much memory, so that it is free before the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        run = make_run()
        train(*run, range(2))
        kept = [weakref.ref(one) for one in run[:2]]
        del run
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_models_without_such_layers_are_refused():
    with pytest.raises(cortado.SpecError, match="no layer of the model can be preconditioned: .*LayerNorm"):
        cortado.KFAC(nn.LayerNorm(4), **QUIET)


# ---- state, report ---------------------------------------------------------------------------------------------------


def train(model, kfac, optimizer, steps):
    for step in steps:
        backward(model, step)
        kfac.step()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make_run(**options):
    model = Net()
    kfac = cortado.KFAC(model, inv_update_steps=4, **options, **QUIET)
    return model, kfac, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def test_training_resumes_bit_for_bit(tmp_path):
    model, kfac, optimizer = make_run()
    whole = train(model, kfac, optimizer, range(6))

    model, kfac, optimizer = make_run()
    train(model, kfac, optimizer, range(3))
    parts = {"model": model, "kfac": kfac, "optimizer": optimizer}
    torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "state.pt")

    model, kfac, optimizer = make_run()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    kfac.load_state_dict(saved["kfac"])
    optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(train(model, kfac, optimizer, range(3, 6)), whole)


def test_a_state_that_was_loaded_to_a_device():
    model, kfac, optimizer = make_run()
    train(model, kfac, optimizer, range(3))
    state = kfac.state_dict()
    _, other, _ = make_run()
    other.load_state_dict(on_device(state))
    for name, layer in other.state_dict()["layers"].items():
        assert layer and all(torch.equal(values, state["layers"][name][key]) for key, values in layer.items())


def test_states_without_inverses_are_smaller_and_load():
    model, kfac, optimizer = make_run()
    train(model, kfac, optimizer, range(3))
    small, large = kfac.state_dict(include_inverses=False), kfac.state_dict()
    size = {
        k: sum(v.numel() for layer in s["layers"].values() for v in layer.values())
        for k, s in enumerate((small, large))
    }
    assert size[0] < 0.4 * size[1]
    _, other, _ = make_run()
    other.load_state_dict(small)
    assert other.steps == 3


def test_states_without_factors_hold_the_step(capsys):
    model, kfac, optimizer = make_run()
    train(model, kfac, optimizer, range(3))
    state = kfac.state_dict(include_factors=False)
    assert not any(state["layers"].values())
    assert set(kfac.state_dict(False, include_inverses=True)["layers"]["same"]) == {
        *("a_inverse", "g_inverse", "a_eigenvalues", "g_eigenvalues")
    }
    _, other, _ = make_run()
    with pytest.warns(UserWarning, match="compute_inverses=False has no effect because the next step"):
        other.load_state_dict(state, compute_inverses=False)
    assert other.steps == 3
    assert "they begin anew" in capsys.readouterr().err


def test_states_that_do_not_fit_are_refused():
    _, kfac, _ = make_run()
    with pytest.raises(cortado.MismatchError, match='format "cortado.kfac/1"'):
        kfac.load_state_dict({"format": "cortado.state/1"})
    state = kfac.state_dict()
    del state["step"]
    with pytest.raises(cortado.MismatchError, match="the state lacks step"):
        kfac.load_state_dict(state)
    other = cortado.KFAC(nn.Sequential(nn.Linear(2, 2)), **QUIET)
    with pytest.raises(cortado.MismatchError, match="layers that are not preconditioned here"):
        other.load_state_dict(kfac.state_dict())


def test_memory_and_report():
    model, kfac, optimizer = make_run()
    train(model, kfac, optimizer, range(2))
    memory = kfac.memory_usage()
    dims = [(19, 8, 1), (7, 3, 2), (36, 4, 1), (37, 4, 1), (10, 1, 4), (41, 12, 1), (12, 3, 1)]
    assert memory["factors"] == 4 * sum(g * (a * (a + 1) + o * (o + 1)) // 2 for a, o, g in dims)
    assert memory["inverses"] == 4 * sum(g * (a * a + a + o * o + o) for a, o, g in dims)
    assert memory["total"] == sum(memory.values()) - memory["total"]
    text = str(kfac.report())
    assert "K-FAC, COMM-OPT, world size 1, 2 steps" in text and "precondition" in text
    stages = kfac.report().to_dict()["time_by_stage_ns"]
    assert stages["factors"] > 0 and stages["inverses"] > 0 and stages["precondition"] > 0


def test_a_schedule_of_the_bound_follows_the_optimizer():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    before = cortado.step_schedule(0.02, 0.004, lr=optimizer)  # no scheduler yet, so no initial_lr
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    behind = cortado.step_schedule(0.02, 0.004, lr=optimizer, from_step=3)
    seen = []
    for step in range(5):
        seen.append((before(step), behind(step)))
        optimizer.step()
        scheduler.step()
    first, later = "compso(bound=0.02)", "compso(bound=0.004, filter=off)"
    assert seen == [(first, first), (first, first), (later, first), (later, first), (later, later)]
    # One that was made anew with a rate that has fallen already, as after a checkpoint.
    assert cortado.step_schedule(0.02, 0.004, lr=optimizer)(5) == later


def test_schedules_of_the_bound():
    first, later = "compso(bound=0.02)", "compso(bound=0.004, filter=off)"
    step = cortado.step_schedule(0.02, 0.004, lr=lambda s: 0.1 if s < 10 else 0.01)
    assert step(0) == step(9) == first
    assert step(10) == step(99) == later
    warm = cortado.step_schedule(0.02, 0.004, lr=lambda s: 0.02 * min(s, 5), from_step=5)
    assert {warm(s) for s in range(20)} == {"compso(bound=0.02)"}
    rates = [0.1, 0.05, 0.1, 0.1]  # that it rises again does not undo the fall
    again = cortado.step_schedule(0.02, 0.004, lr=rates.__getitem__)
    assert [again(s) for s in (3, 0, 1)] == [later, first, later]
    with pytest.raises(cortado.SpecError, match="a later bound of at most the first, got 0.1 after 0.02"):
        cortado.step_schedule(0.02, 0.1, lr=rates.__getitem__)
    for wrong in (0.1, None):
        with pytest.raises(cortado.SpecError, match="a function of the step or an optimizer as lr"):
            cortado.step_schedule(0.02, 0.004, lr=wrong)
    for wrong in ("compso(filter=off)", "compsso"):  # both are wrong in a later stage, or in all
        with pytest.raises(cortado.SpecError):
            cortado.smooth_schedule(0.08, 0.5, stages=4, total_steps=100, codec=wrong)
    packed = cortado.step_schedule(
        0.02, 0.004, lr=lambda s: 0.1 if s < 10 else 0.01, codec={"codec": "compso", "coder": "none"}
    )
    assert [packed(s) for s in (0, 10)] == [
        "compso(coder=none, bound=0.02)",
        "compso(coder=none, bound=0.004, filter=off)",
    ]
    packed = cortado.smooth_schedule(0.08, 0.5, stages=2, total_steps=100, codec="compso(coder=none)")
    assert [packed(s) for s in (0, 50)] == [
        "compso(coder=none, bound=0.08)",
        "compso(coder=none, bound=0.04, filter=off)",
    ]
    smooth = cortado.smooth_schedule(0.08, 0.5, stages=4, total_steps=100)
    assert [smooth(s) for s in (0, 24, 25, 50, 75, 500)] == [
        *["compso(bound=0.08)"] * 2,
        "compso(bound=0.04)",
        "compso(bound=0.02)",
        *["compso(bound=0.01, filter=off)"] * 2,
    ]
    with pytest.raises(cortado.SpecError, match="factor between 0 and 1"):
        cortado.smooth_schedule(0.1, 2, 4, 100)
    with pytest.raises(cortado.SpecError, match="at most all without a filter, .*unfiltered_stages=9"):
        cortado.smooth_schedule(0.08, 0.5, stages=4, total_steps=100, unfiltered_stages=9)
    with pytest.raises(cortado.SpecError, match="stages must be a whole number of at least 0, got 2.5"):
        cortado.smooth_schedule(0.08, 0.5, stages=2.5, total_steps=100)
