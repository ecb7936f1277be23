"""Optimizers are tried on a small matrix and its halves at fit start, so that a loss does not find what cannot be moved."""

import pytest
import torch
from torch import nn

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.checks import check_optimizers
from lightning_ntp.strategy.elementwise import why_not_elementwise

GOOD = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, for-loop": lambda p: torch.optim.AdamW(p, foreach=False, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "a warm-up from 0": lambda p: torch.optim.AdamW(p, lr=0.0),
}


class OneByOne(torch.optim.Optimizer):
    """Moves each parameter by `change`."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.change(p)


class Lamb2(OneByOne):
    """A trust ratio under a name that nobody knows."""

    def change(self, p):
        return p.grad * p.norm() / p.grad.norm()


class Factored(OneByOne):
    """A second moment per row."""

    def change(self, p):
        rows = self.state[p].setdefault("rows", torch.zeros(p.shape[0], dtype=p.dtype))
        rows += p.grad.square().mean(1)
        return p.grad / rows.sqrt().unsqueeze(1)


class Unknown(torch.optim.Optimizer):
    """Its constructor wants what we do not have."""

    def __init__(self, params, model):
        super().__init__(params, {"lr": model})

    def step(self, closure=None):
        raise NotImplementedError


def parameters():
    return [nn.Parameter(torch.ones(3, 2))]


@pytest.mark.parametrize("name", GOOD)
def test_elementwise_optimizers_pass_and_stay_untouched(name):
    optimizer = GOOD[name](parameters())
    before = repr(optimizer.state_dict())
    check_optimizers([optimizer], nn.Linear(1, 1))
    assert repr(optimizer.state_dict()) == before


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (Lamb2(parameters()), "Lamb2: what it makes of an element depends on the rest of its parameter"),
        (Factored(parameters()), r"Factored: it keeps rows of shape \(4,\) for a parameter of shape \(4, 6\)"),
        (torch.optim.Adafactor(parameters()), "Adafactor looks at whole tensors"),
    ],
)
def test_others_are_refused_with_what_was_seen(optimizer, why):
    with pytest.raises(ConfigError, match=why):
        check_optimizers([optimizer], nn.Linear(1, 1))
    optimizer.ntp_elementwise = True
    check_optimizers([optimizer], nn.Linear(1, 1))


def test_what_cannot_be_tried_is_believed_and_said(caplog):
    assert why_not_elementwise(Unknown(parameters(), "model")) is None
    assert "Unknown could not be tried on a small matrix (TypeError: " in caplog.text
