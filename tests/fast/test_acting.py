"""Acting by numpy: torch's actions with torch's noise, and log-probabilities that the learner finds again."""

import numpy as np
import pytest
import torch as th
from probe_envs import grpo
from stable_baselines3.common.callbacks import CallbackList
from test_update import POLICIES, agent

from grpo_rl import MlpPolicy
from grpo_rl.fast import acting

pytestmark = pytest.mark.filterwarnings("ignore")
ACTING = [name for name in POLICIES if name != "gSDE"]


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(acting, "TRACING_COST", 0)


def ready(model):
    """The model's `Acting`, past the first step of a rollout."""
    its = model._sampler.acting
    its.begin()
    its(model._last_obs)
    return its


@pytest.mark.parametrize("name", ACTING)
def test_a_policy_acts_as_by_torch(name, at_once):
    model = agent(name).learn(128)
    by_numpy = ready(model)
    assert by_numpy.by_numpy
    th.manual_seed(3)
    ours = by_numpy(model._last_obs)
    state = th.get_rng_state()
    th.manual_seed(3)
    by_numpy.by_numpy = False
    torchs = by_numpy(model._last_obs)
    assert th.equal(th.get_rng_state(), state)
    for a, b in zip(ours, torchs, strict=True):
        if b is None:
            assert a is None
        else:
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ACTING)
def test_the_learner_finds_the_log_probabilities_again(name, at_once):
    model = agent(name, n_steps=16, n_epochs=1).learn(128)  # the second rollout is by numpy from its second step on
    model.collect_rollouts(model.env, callback(model), model.rollout_buffer, model.n_steps)
    assert model._sampler.acting.by_numpy
    batch = model.rollout_buffer.batch()
    with th.no_grad():
        values, log_prob, _ = model.policy.evaluate_actions(batch.observations, batch.actions)
    th.testing.assert_close(log_prob, batch.old_log_prob, rtol=1e-5, atol=1e-6)
    if values is not None:
        th.testing.assert_close(values.flatten(), batch.old_values, rtol=1e-5, atol=1e-6)


def callback(model):
    made = CallbackList([])
    made.init_callback(model)
    return made


def test_a_run_is_torchs(monkeypatch):
    ends = []
    for cost in (0, 10**9):
        monkeypatch.setattr(acting, "TRACING_COST", cost)
        model = grpo("CartPole-v1", value_head=True, group_kind="window").learn(192)
        ends.append(th.nn.utils.parameters_to_vector(model.policy.parameters()).detach())
    th.testing.assert_close(*ends, rtol=1e-4, atol=1e-4)


def test_the_program_follows_the_parameters(at_once):
    model = agent("tanh").learn(128)
    its = ready(model)
    program, before = its.program, its(model._last_obs)[1]
    with th.no_grad():
        model.policy.value_net.bias += 1
    np.testing.assert_allclose(its(model._last_obs)[1], before + 1, rtol=1e-5)
    its.begin()
    its(model._last_obs)
    assert its.by_numpy and its.program is program
    model.policy.value_net.bias.data = model.policy.value_net.bias.data + 1  # in another place now
    its.begin()
    its(model._last_obs)
    assert its.by_numpy and its.program is not program


class Counting(MlpPolicy):
    calls = 0

    def forward(self, obs, deterministic=False):
        self.calls += 1
        return super().forward(obs, deterministic)


def test_what_acts_by_torch(at_once, monkeypatch):
    assert ready(agent("gSDE").learn(128)).by_numpy is False
    model = grpo("CartPole-v1", Counting, value_head=True, group_kind="window").learn(64)
    assert model.policy.calls == 32  # vector steps
    monkeypatch.setattr(acting, "TRACING_COST", 100)  # steps: not before 200 of the two envs
    model = grpo("CartPole-v1", value_head=True, group_kind="window").learn(192)
    assert ready(model).by_numpy is False
    assert ready(model.learn(64, reset_num_timesteps=False)).by_numpy


def test_where_numpy_differs_the_rollout_is_torchs(at_once):
    model = agent("tanh").learn(128)
    its = ready(model)
    program = its.program
    its.program = lambda *obs: [array + 0.1 for array in program(*obs)]
    its.begin()
    its(model._last_obs)
    assert its.by_numpy is False
