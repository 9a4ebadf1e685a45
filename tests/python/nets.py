# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Small models and training loops that the tests of the DDP adapter share."""

import torch
import torch.distributed as dist
from ranks import fingerprint

FEATURES, CLASSES = 24, 8
PUBLISHED = "acp(rank=4, phase=global, min_compression_rate=0, start_step=0, wire=fp32)"
# Ordinary codecs, gathered: payloads of one size, positions with values, momentum correction, a vote, one
# behind the other, sizes that vary from step to step. EXACT loses nothing on that way.
SIGN = "sign(scale=mean_abs, min_elems=0)"
TOPK = "topk(density=0.1, min_elems=0)"
DGC = "topk(density=0.1, min_elems=0, feedback=dgc)"
VOTE = "sign(scale=mean_abs, vote=majority, min_elems=0)"
COMPOSED = "topk(density=0.2, min_elems=0) | sign(scale=mean_abs)"
EXACT = "topk(density=1, min_compression_rate=0, min_elems=0, start_step=0, bucket_cap_mib=0)"
VARYING = "topk(density=0.2, min_elems=0) | float_rans"
RANDK = "randk(density=0.2, min_elems=0)"  # values at places that ranks share: summed
QUANT = "quant(bits=4, round=stochastic, min_elems=0)"
FP8 = "fp8(e4m3, min_elems=0)"
COMPSO = "compso(bound=4e-3, min_elems=0)"
FLOAT_RANS = "float_rans(min_elems=0)"
ORDINARY = [
    *(SIGN, TOPK, DGC, VOTE, COMPOSED, VARYING, RANDK, QUANT, FP8, COMPSO, FLOAT_RANS),
    "topk(density=0.2, min_elems=0) | quant(bits=4) | rans",
]
CODECS = [
    *ORDINARY,
    EXACT,
    "none",
    "cast(bf16)",
    "cast(fp16)",
    "acp",
    "acp(rank=2, sides=alternate)",
    "acp(rank=2, wire=bf16, start_step=1)",
    "power",
    PUBLISHED,
]


def make_net(seed=0):
    """Matrices of three shapes, biases and a norm; at rank 4 the last matrix is too small to compress."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, CLASSES),
    )


class OddLayouts(torch.nn.Module):
    """Transposed, sliced and channels-last parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(4, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = torch.nn.Parameter(torch.randn(40, 24).mul(0.1).t())  # 24 x 40, columns contiguous
        self.sliced = torch.nn.Parameter(torch.randn(16, 40)[:, ::2].mul(0.1))  # made dense by mul
        self.holes = torch.nn.Parameter((torch.randn(16, 40) * 0.1)[:, ::2])  # 16 x 20 with stride 2
        self.permuted = torch.nn.Parameter(torch.randn(3, 40, 16).mul(0.1).permute(2, 0, 1))  # 16 x 3 x 40
        self.head = torch.nn.Linear(40 + 20 + 40, 8)

    def forward(self, x):
        pixels = self.conv(x[:, :4, None, None] * x[:, None, 4:20].view(-1, 1, 4, 4)).mean((2, 3))
        mixed = pixels @ (self.sliced + self.holes)
        permuted = torch.einsum("bi,ijk->bk", pixels, self.permuted)
        return self.head(torch.cat([x @ self.transposed, mixed, permuted], 1))


def make_batch(rank, step, rows=4):
    """What this rank trains on in this step; nearly the same problem on each, so that training gets somewhere."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(1)


def loss_of(model, batch):
    inputs, labels = batch
    dtype = next(model.parameters()).dtype
    return torch.nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# After which auto has decided: 3, 8 and 4 dense steps, 8 rounds of trials of at most 6 settings for 2 and 8 steps each,
# of dense for 4 and 8.
AUTO_STEPS = 541


def train(me, model, steps, optimizer=None):
    """Trains on the steps given (an int or a range); returns the loss of each."""
    optimizer = optimizer or make_optimizer(model)
    losses = []
    for step in steps if not isinstance(steps, int) else range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(me.rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_until_decided(me, model, state=None, train_with=train):
    """Until auto has decided, and ten steps more; returns the loss of each."""
    state = state or model.cortado
    optimizer, losses = make_optimizer(model), []
    while len(losses) < AUTO_STEPS and not state.decision()["decided"]:
        losses += train_with(me, model, range(len(losses), len(losses) + 10), optimizer)
    return losses + train_with(me, model, range(len(losses), len(losses) + 10), optimizer)


def train_anew(me, plan, steps=5, **options):
    """Trains a new model; returns the bits it ends with."""
    model = me.attach(make_net(), plan, **options)
    train(me, model, steps)
    return fingerprint(model.module)


def gradients_of(model):
    """Copies of the gradients by name."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in unwrapped(model).named_parameters()}


def local_gradients(model, batch):
    """This rank's own gradients by name, without DDP."""
    net = unwrapped(model)
    names, parameters = zip(*net.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_of(net, batch), parameters), strict=True))


def unwrapped(model):
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def mean_residuals(me, model):
    """What all ranks together still owe, by name, in the shape of the parameters."""
    parameters = dict(unwrapped(model).named_parameters())
    owed = {}
    for name, entry in model.cortado.state_dict()["tensors"].items():
        parameter = parameters[name]
        memory = entry["residual"].clone()
        dist.all_reduce(memory)
        dense = (
            torch.empty_strided(parameter.shape, parameter.stride()).untyped_storage().nbytes() == 4 * memory.numel()
        )
        shaped = memory.as_strided(parameter.shape, parameter.stride()) if dense else memory.view(parameter.shape)
        owed[name] = shaped / me.world_size
    return owed


def distance(got, expected):
    """Relative L2 distance of two dicts of tensors."""
    names = [name for name in expected if expected[name] is not None]
    lost = sum((got[n].double() - expected[n].double()).square().sum() for n in names)
    return (lost / sum(expected[n].double().square().sum() for n in names).clamp_min(1e-300)).sqrt().item()
