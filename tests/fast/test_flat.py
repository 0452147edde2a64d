"""One vector of parameters: torch's Adam and clipping on it, and torch's own state kept."""

import copy
import io

import numpy as np
import pytest
import torch as th
from torch import nn

from grpo_rl.fast.flat import FlatParameters

GRADIENTS = [[[[0.3, -0.2], [0.1, 0.4]], [0.5, -1.0]], [[[3.0, 0.0], [-4.0, 0.0]], [0.0, 12.0]]]
"""Of a layer 2 → 2, twice: norms 1.245… and 13 (3² + 4² + 12² = 13²)."""


class Policy(nn.Module):
    def __init__(self, optimizer=th.optim.Adam, **settings):
        super().__init__()
        th.manual_seed(1)
        self.net = nn.Linear(2, 2)
        self.optimizer = optimizer(self.parameters(), lr=0.1, **settings)


def torch_step(policy, gradients, max_norm):
    for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
        parameter.grad = th.tensor(gradient)
    norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    policy.optimizer.step()
    return norm


def flat_step(flat, gradients, max_norm):
    norm = flat.clip([np.array(gradient, np.float32) for gradient in gradients], max_norm)
    flat.step()
    return norm


def same(ours, torchs):
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        th.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        mine, its = ours.optimizer.state[a], torchs.optimizer.state[b]
        assert mine.keys() == its.keys()
        for name in its:
            th.testing.assert_close(mine[name], its[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("settings", [{}, {"fused": True, "eps": 1e-5}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.01}])
def test_steps_are_torchs(settings):
    ours, torchs = Policy(**settings), Policy(**settings)
    flat = FlatParameters(ours)
    flat.begin()
    for gradients in GRADIENTS * 3:
        norm = flat_step(flat, gradients, 2.0)
        th.testing.assert_close(norm, torch_step(torchs, gradients, 2.0))
        same(ours, torchs)
    assert norm.item() == pytest.approx(13)


def test_steps_of_torch_and_ours_may_alternate_and_the_rate_may_change():
    ours, torchs = Policy(), Policy()
    flat = FlatParameters(ours)
    flat.begin()
    for number, gradients in enumerate(GRADIENTS * 3):
        for policy in (ours, torchs):
            policy.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        if number % 2:
            flat_step(flat, gradients, 0.5)
        else:
            torch_step(ours, gradients, 0.5)
        torch_step(torchs, gradients, 0.5)
    same(ours, torchs)


def test_a_checkpoint_may_be_loaded_in_between_and_the_state_forgotten():
    ours, torchs = Policy(), Policy()
    flat = FlatParameters(ours)
    flat.begin()
    flat_step(flat, GRADIENTS[0], 1.0)
    torch_step(torchs, GRADIENTS[0], 1.0)
    file = io.BytesIO()
    th.save([ours.state_dict(), ours.optimizer.state_dict()], file)
    file.seek(0)
    flat_step(flat, GRADIENTS[1], 1.0)
    parameters, state = th.load(file, weights_only=True)
    ours.load_state_dict(parameters)
    ours.optimizer.load_state_dict(state)
    assert flat.holds(ours)
    flat.begin()
    for policy_step in (lambda: flat_step(flat, GRADIENTS[1], 1.0), lambda: torch_step(torchs, GRADIENTS[1], 1.0)):
        policy_step()
    same(ours, torchs)
    for policy in (ours, torchs):
        policy.optimizer.state.clear()
    flat.begin()
    flat_step(flat, GRADIENTS[0], 1.0)
    torch_step(torchs, GRADIENTS[0], 1.0)
    same(ours, torchs)


def test_a_gradient_that_is_no_number_spoils_every_parameter_as_torchs_does():
    ours = Policy()
    flat = FlatParameters(ours)
    flat.begin()
    assert flat_step(flat, [[[np.nan, 0], [0, 0]], [0, 0]], 1.0).isnan()
    assert all(parameter.isnan().all() for parameter in ours.parameters())


def test_it_notices_another_memory():
    policy = Policy()
    flat = FlatParameters(policy)
    assert flat.holds(policy)
    assert not flat.holds(copy.deepcopy(policy))
    policy.net.weight.data = policy.net.weight.data.clone()
    assert not flat.holds(policy)


class Frozen(Policy):
    def __init__(self):
        super().__init__()
        self.net.bias.requires_grad_(False)


IMPOSSIBLE = {
    "another optimizer": lambda: Policy(th.optim.SGD),
    "AdamW": lambda: Policy(th.optim.AdamW),
    "amsgrad": lambda: Policy(amsgrad=True),
    "a frozen layer": Frozen,
    "doubles": lambda: Policy().double(),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_it_is_not_for(name):
    assert not FlatParameters.possible(IMPOSSIBLE[name]())
    assert FlatParameters.possible(Policy())
