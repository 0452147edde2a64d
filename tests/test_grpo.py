"""GRPO on probe environments with known answers, and every option against its arithmetic. What SB3 users rely on is in
test_sb3_contract.py; which steps make a group is in sampling/test_steps.py."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from probe_envs import Bandit, Constant, Counter, Delayed, Mirror, Probe, Spaces, Unknown, Walk, box, grpo
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnvWrapper, VecFrameStack, VecNormalize

from grpo_rl import GRPO, GroupVecEnv, LinearSchedule, MlpPolicy, make_group_env
from grpo_rl import advantages as adv
from grpo_rl.buffers import GroupBuffer
from grpo_rl.errors import ConfigError, ForkError, NonFiniteError

pytestmark = pytest.mark.filterwarnings("ignore:A rollout of", "ignore:builtin type", "ignore:groups. ")


def parameters(model: Any) -> th.Tensor:
    return th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()


def probability(model: Any, obs: Any, action: int = 1) -> float:
    """π(action | obs) of a discrete policy."""
    tensor, _ = model.policy.obs_to_tensor(np.asarray(obs, np.float32))
    return model.policy.get_distribution(tensor).distribution.probs[0, action].item()


class Updates(BaseCallback):
    """Keeps what `loss` gave for the first minibatch of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[dict[str, th.Tensor]] = []

    def _init_callback(self) -> None:
        loss, train = self.model.loss, self.model.train

        def watched(batch: Any, clip_range: float) -> Any:
            value, terms = loss(batch, clip_range)
            if self.fresh:
                self.first.append(terms)
                self.fresh = False
            return value, terms

        def fresh_train() -> None:
            self.fresh = True
            train()

        self.model.loss, self.model.train = watched, fresh_train

    def _on_step(self) -> bool:
        return True


# --- probes -----------------------------------------------------------------------------------------------------------
LEARNERS: dict[str, dict[str, Any]] = {
    "episode groups": {},
    "windows": {"group_kind": "window"},
    "hybrid": {"value_head": True},
    "hybrid, half groups": {"value_head": True, "group_weight": 0.5, "fork_prob": 0.5},
    "ppo": {"value_head": True, "group_size": 1},
    "batch groups": {"grouping": "batch"},
    "outcome, z-score": {"credit": "outcome", "advantage_scale": "group"},
    "mean": {"baseline": "mean", "advantage_scale": "none"},
    "weighted": {"baseline": "weighted", "compression": "layer_norm"},
    "moving average": {"baseline": "moving_average", "compression": "tanh"},
    "regression": {"baseline": "regression", "normalize_obs": True, "normalize_reward": True},
    "discounted baseline": {"baseline_discount": 0.9, "normalize_obs": True, "normalize_reward": True},
}


@pytest.mark.parametrize("settings", LEARNERS.values(), ids=list(LEARNERS))
def test_bandit_the_better_arm_is_found(settings: dict[str, Any]) -> None:
    env = make_group_env(Bandit, 1, 4, seed=0)
    model = grpo(env, n_steps=16, learning_rate=1e-2, n_epochs=4, **({"group_size": 4} | settings))
    assert 0.4 < probability(model, [0]) < 0.6
    model.learn(1000)
    assert probability(model, [0]) > 0.95


@pytest.mark.parametrize(
    "settings", [{}, {"group_kind": "window"}, {"value_head": True}, {"credit": "outcome"}], ids=str
)
def test_credit_reaches_the_action_that_was_paid_later(settings: dict[str, Any]) -> None:
    """The first of two actions decides; the second is free, so that nothing pushes it all the way to one side."""
    env = make_group_env(Delayed, 1, 4, seed=0)
    model = grpo(env, n_steps=32, learning_rate=1e-2, n_epochs=4, group_size=4, **settings).learn(2000)
    assert probability(model, [0]) > 0.95
    assert 0.05 < probability(model, [1]) < 0.95


@pytest.mark.parametrize("settings", [{}, {"normalize_obs": True}, {"grouping": "batch"}], ids=str)
def test_actions_depend_on_observations(settings: dict[str, Any]) -> None:
    env = make_group_env(Mirror, 4, 4, seed=0)
    model = grpo(env, n_steps=8, learning_rate=1e-2, n_epochs=4, group_size=4, **settings).learn(3000)
    assert probability(model, [1]) > 0.9
    assert probability(model, [-1]) < 0.1


class Tempting(Probe):
    """Reward 1 a step, obs t; action 1 takes 3 and ends it for good; after 4 steps the time is up (truncated)."""

    def observe(self) -> Any:
        return np.array([float(self.t)], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), 3.0 if action == 1 else 1.0, bool(action == 1), self.t == 4, {}


@pytest.mark.parametrize("settings", [{}, {"value_head": True, "vf_coef": 1.0}], ids=str)
def test_truncation_is_not_termination(settings: dict[str, Any]) -> None:
    """At t = 3 staying pays 1 and life goes on, 1 + γ·10 = 10; taking pays 3. If time-up were death, 3 > 1."""
    env = make_group_env(Tempting, 1, 4, seed=0)
    settings = {"group_kind": "episode", "group_size": 4, "n_steps": 32, "n_epochs": 6, "gamma": 0.9} | settings
    model = grpo(env, learning_rate=1e-2, **settings).learn(4000)
    assert probability(model, [3]) < 0.2


@pytest.mark.parametrize("scale", ["batch", "group", "none"])
@pytest.mark.parametrize("compression", [None, "tanh", "layer_norm"])
@pytest.mark.parametrize("kind", ["episode", "window"])
def test_constant_reward_moves_nothing(scale: str, compression: str | None, kind: str) -> None:
    """Equal returns: every advantage is exactly 0, no division by a spread of 0, and the policy stays bit-equal."""
    env = make_group_env(lambda: Constant(8), 1, 4)
    model = grpo(env, group_size=4, group_kind=kind, advantage_scale=scale, compression=compression, fork_prob=0.5)
    before = parameters(model)
    model.learn(256)
    assert (model.rollout_buffer.advantages == 0).all()
    assert th.equal(parameters(model), before)


# --- PPO as the special case ------------------------------------------------------------------------------------------
SAME_AS_PPO: dict[str, dict[str, Any]] = {
    "defaults": {},
    "entropy, vf": {"ent_coef": 0.1, "vf_coef": 0.9, "clip_range_vf": 0.1, "clip_range": 0.05},
    "raw advantages": {"normalize_advantage": False, "gae_lambda": 0.5, "gamma": 0.9, "max_grad_norm": 0.1},
    "target_kl": {"target_kl": 1e-5, "learning_rate": 1e-2},
}


def short(env_id: str, limit: int = 10) -> gym.Env:
    return gym.make(env_id, max_episode_steps=limit)


def pair(env_id: str, n_envs: int, **settings: Any) -> tuple[GRPO, PPO]:
    """Ours with groups of one, and PPO, with the same weights, envs and random numbers."""
    settings = {"n_steps": 64, "batch_size": 16, "n_epochs": 3, "seed": 0, "device": "cpu"} | settings
    settings["policy_kwargs"] = {"net_arch": [8]}
    ours = GRPO("MlpPolicy", make_vec_env(lambda: short(env_id), n_envs), group_size=1, value_head=True, **settings)
    theirs = PPO("MlpPolicy", make_vec_env(lambda: short(env_id), n_envs), **settings)
    theirs.policy.load_state_dict(ours.policy.state_dict())
    return ours, theirs


@pytest.mark.parametrize("settings", SAME_AS_PPO.values(), ids=list(SAME_AS_PPO))
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_group_size_one_is_ppo(env_id: str, settings: dict[str, Any]) -> None:
    """Two iterations of 64 steps with time limits, 3 epochs in minibatches of 16: the same weights, the same losses."""
    ours, theirs = pair(env_id, 1, **settings)
    for model in (ours, theirs):
        model.set_random_seed(0)
        model.learn(128)
    assert ours._n_updates == theirs._n_updates
    for name, value in theirs.policy.state_dict().items():
        th.testing.assert_close(ours.policy.state_dict()[name], value, atol=1e-6, rtol=0)
    actions = [model.rollout_buffer.actions.flatten() for model in (ours, theirs)]
    np.testing.assert_allclose(*actions, atol=1e-5)  # of the second rollout, by weights that were trained once
    for name in ("entropy_loss", "policy_gradient_loss", "value_loss", "clip_fraction", "explained_variance"):
        logged = [model.logger.name_to_value[f"train/{name}"] for model in (ours, theirs)]
        assert logged[0] == pytest.approx(logged[1], abs=1e-5, rel=1e-5), name


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_group_size_one_is_ppo_on_several_envs(env_id: str) -> None:
    """One minibatch of all 128 rows: their order does not matter. Every number in PPO's log is the same."""
    ours, theirs = pair(env_id, 4, n_steps=32, batch_size=128, n_epochs=1, ent_coef=0.01)
    for model in (ours, theirs):
        model.set_random_seed(0)
        model.learn(128)
    advantages = theirs.rollout_buffer.advantages.reshape(4, 32).T  # SB3's buffer is flat by env after train
    np.testing.assert_allclose(ours.rollout_buffer.advantages, advantages, atol=1e-4)
    for name, value in theirs.policy.state_dict().items():
        th.testing.assert_close(ours.policy.state_dict()[name], value, atol=1e-6, rtol=0)
    logged = {name: value for name, value in theirs.logger.name_to_value.items() if name.startswith("train/")}
    assert len(logged) >= 9
    for name, value in logged.items():
        assert ours.logger.name_to_value[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name


def test_hybrid_without_forks_is_ppo_too() -> None:
    """value_head=True alone: GAE, no forks, whatever the group size; the group advantage has weight 0."""
    settings = {"n_steps": 32, "batch_size": 128, "n_epochs": 1}
    ours, _ = pair("CartPole-v1", 4, **settings)
    hybrid = grpo(
        make_vec_env(lambda: short("CartPole-v1"), 4), value_head=True, group_size=4, fork_prob=0.0, **settings
    )
    hybrid.policy.load_state_dict(ours.policy.state_dict())
    for model in (ours, hybrid):
        model.set_random_seed(0)
        model.learn(256)
    th.testing.assert_close(parameters(ours), parameters(hybrid), atol=1e-6, rtol=0)


def test_target_kl_stops_beyond_one_and_a_half_times() -> None:
    """target_kl = 0.01: 0.0149 goes on, 0.0151 stops before its step; epochs that follow are left out."""
    model = grpo(target_kl=0.01, n_epochs=3, batch_size=16, group_kind="window")
    measured = iter([0.0149, 0.0149, 0.0151])
    loss, step = model.loss, model.policy.optimizer.step
    steps: list[int] = []

    def scripted(batch: Any, clip_range: float) -> Any:
        value, terms = loss(batch, clip_range)
        return value, terms | {"approx_kl": th.tensor(next(measured))}

    def counted() -> None:
        steps.append(1)
        step()

    model.loss, model.policy.optimizer.step = scripted, counted
    model.learn(64)
    assert len(steps) == 2
    assert model._n_updates == 1


# --- the first minibatch ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"normalize_obs": True}),
        ("Pendulum-v1", {"normalize_obs": True, "normalize_reward": True}),
        ("Pendulum-v1", {"normalize_obs": True, "value_head": True}),
        ("Pendulum-v1", {"use_sde": True, "group_kind": "window"}),
    ],
)
def test_the_ratio_is_one_before_the_first_update(env: str, settings: dict[str, Any]) -> None:
    """ρ = 1 to rounding in each iteration, so that KL ~ (ρ − 1)²/2 ~ 1e-12; statistics stand still while it counts."""
    watch = Updates()
    model = grpo(env, n_epochs=2, learning_rate=1e-2, **settings).learn(800, watch)
    assert len(watch.first) == model._iterations >= 2
    for terms in watch.first:
        assert terms["approx_kl"] < 1e-10
        assert terms["clip_fraction"] == 0


def test_rollouts_are_evaluated_as_they_were_sampled() -> None:
    """In eval mode the buffer's log-probabilities are those of the weights that sampled, dropout or not."""

    class WithDropout(MlpPolicy):
        def _build_mlp_extractor(self) -> None:
            super()._build_mlp_extractor()
            self.mlp_extractor.policy_net.append(th.nn.Dropout(0.5))

    model = grpo("CartPole-v1", WithDropout, normalize_obs=True).learn(64)
    _, callback = model._setup_learn(64)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 32)
    for batch in model.rollout_buffer.get(32):
        log_prob = model.policy.evaluate_actions(batch.observations, batch.actions)[1]
        th.testing.assert_close(log_prob, batch.old_log_prob, atol=1e-6, rtol=0)


# --- terms of the loss ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("per_row", [False, True])
def test_an_auxiliary_loss_reaches_the_policy(per_row: bool) -> None:
    """L = w·(log_std − 2)², advantages 0, SGD: log_std ← 0 − lr·w·2·(0 − 2) = 0.1·0.5·4 = 0.2; the loss was 4."""

    def aim(policy: Any, batch: Any) -> th.Tensor:
        loss = (policy.log_std - 2) ** 2
        return loss.expand(len(batch.advantages)) if per_row else loss.sum()

    model = grpo(
        Spaces(box(1), spaces.Box(-1, 1, (1,), np.float32)),
        n_steps=64,
        batch_size=64,
        learning_rate=0.1,
        max_grad_norm=1e9,
        policy_kwargs={"optimizer_class": th.optim.SGD, "optimizer_kwargs": {}, "net_arch": []},
        auxiliary_losses={"aim": (aim, 0.5)},
        group_kind="episode",
    )
    others = [p.clone() for name, p in model.policy.named_parameters() if name != "log_std"]
    model.learn(64)
    assert model.policy.log_std.item() == pytest.approx(0.2)
    assert model.logger.name_to_value["train/auxiliary/aim"] == pytest.approx(4.0)
    for before, (name, after) in zip(others, list(model.policy.named_parameters())[1:], strict=True):
        assert th.equal(before, after), name


def test_an_auxiliary_loss_sees_the_batch_and_the_surrogates_gradient_stays() -> None:
    """A loss of weight 0 changes nothing; a function of logits moves them by the gradient that autograd gives."""
    seen: list[int] = []

    def entropy(policy: Any, batch: Any) -> th.Tensor:
        seen.append(len(batch.weight))
        return -policy.get_distribution(batch.observations).entropy()

    plain = grpo(ent_coef=0.3).learn(128)
    zero = grpo(ent_coef=0.3, auxiliary_losses={"entropy": (entropy, 0.0)}).learn(128)
    same = grpo(auxiliary_losses={"entropy": (entropy, 0.3)}).learn(128)  # the entropy bonus, written by hand
    assert seen
    assert th.equal(parameters(zero), parameters(plain))
    th.testing.assert_close(parameters(same), parameters(plain), atol=1e-6, rtol=0)


def test_entropy_bonus_widens() -> None:
    """Advantages 0, Gaussian entropy = log_std + const: SGD moves log_std by lr · ent_coef = 0.1 · 0.5."""
    model = grpo(
        Spaces(box(1), spaces.Box(-1, 1, (1,), np.float32)),
        n_steps=64,
        batch_size=64,
        learning_rate=0.1,
        ent_coef=0.5,
        max_grad_norm=1e9,
        policy_kwargs={"optimizer_class": th.optim.SGD, "optimizer_kwargs": {}, "net_arch": []},
        group_kind="episode",
    ).learn(64)
    assert model.policy.log_std.item() == pytest.approx(0.05)


def test_kl_to_the_reference_pulls_back() -> None:
    """Advantages 0; the policy is pushed away from its reference: only the KL term can bring it back, and it does."""

    def away(kl_coef: float) -> tuple[GRPO, float, float]:
        env = make_group_env(lambda: Constant(8), 1, 4)
        model = grpo(env, group_size=4, kl_coef=kl_coef, learning_rate=3e-2, n_epochs=4)
        with th.no_grad():
            model.policy.action_net.bias += th.tensor([0.0, 2.0])
        start = probability(model, [0])
        model.learn(512)
        return model, start, probability(model, [0])

    model, start, end = away(1.0)
    assert start > 0.85
    assert end == pytest.approx(0.5, abs=0.1)  # the reference is near uniform
    assert model.logger.name_to_value["train/reference_kl"] < 0.05
    _, start, end = away(0.0)
    assert end == start


def test_kl_gradient_is_that_of_k2() -> None:
    """∇ of mean (log π − log π_ref)²/2 over the rows, alone (advantages 0), once by hand and once by train."""
    env = make_group_env(lambda: Constant(8), 1, 2)
    model = grpo(env, kl_coef=0.7, batch_size=1000, learning_rate=1.0, max_grad_norm=1e9)
    model.policy.optimizer = th.optim.SGD(model.policy.parameters(), lr=1.0)
    with th.no_grad():
        model.policy.action_net.bias += th.tensor([0.0, 1.0])
    hand = copy.deepcopy(model.policy.state_dict())
    model.learn(64)
    obs, actions = model.rollout_buffer.rows()
    policy = grpo(make_group_env(lambda: Constant(8), 1, 2)).policy
    policy.load_state_dict(hand)
    reference = model.reference_policy.evaluate_actions(obs, actions.long())[1]
    loss = 0.7 * ((policy.evaluate_actions(obs, actions.long())[1] - reference) ** 2 / 2).mean()
    loss.backward()
    expected = th.cat([(p - p.grad).flatten() for p in policy.parameters()])
    th.testing.assert_close(parameters(model), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("every", "expected"), [(None, [0, 0, 0, 0]), (2, [0, 2, 2, 4]), (1, [1, 2, 3, 4])])
def test_the_reference_is_renewed_every_so_many_updates(every: int | None, expected: list[int]) -> None:
    model = grpo(group_kind="window", kl_coef=0.01, reference_every=every, normalize_obs=True)

    def weights(policy: Any) -> th.Tensor:
        return th.cat([value.detach().flatten() for value in policy.parameters()])

    history, of_reference = [weights(model.policy)], []
    for _ in range(4):
        model.learn(64)
        history.append(weights(model.policy))
        of_reference.append(weights(model.reference_policy))
    ages = [next(i for i, old in enumerate(history) if th.equal(old, reference)) for reference in of_reference]
    assert ages == expected
    assert not any(p.requires_grad for p in model.reference_policy.parameters())
    assert not model.reference_policy.training


# --- advantages: options against their arithmetic ---------------------------------------------------------------------
def rollout_of(rewards: list[list[float]], **arrays: Any) -> GroupBuffer:
    """A finished buffer (T, N); None in `rewards` is a frozen row. Every column is one segment of one group."""
    array = np.array(rewards, np.float32)
    mask = ~np.isnan(array)
    buffer = GroupBuffer(box(1), spaces.Discrete(2), "cpu")
    values = arrays.get("values")
    for t, row in enumerate(np.nan_to_num(array)):
        buffer.add(
            observations=np.zeros((len(row), 1), np.float32),
            actions=np.zeros(len(row), np.int64),
            rewards=row,
            log_probs=np.zeros(len(row), np.float32),
            values=None if values is None else np.array(values[t], np.float32),
            group=np.array(arrays.get("group", np.zeros(array.shape, int))[t]),
            age=np.full(len(row), t),
            mask=mask[t],
            discounted=row.astype(np.float64),
        )
        for column in range(len(row)):
            if mask[t, column] and (t + 1 == len(array) or not mask[t + 1, column]):
                buffer.end(column, column not in arrays.get("alive", ()), np.zeros(1, np.float32))
    buffer.finish()
    return buffer


NAN = float("nan")
ONE_STEP = [[1.0, 2.0, 6.0]]
"""Three members, one step: mean 3; the others' means are 4, 3.5 and 1.5; sample variance (4 + 1 + 9)/2 = 7."""
TWO_STEPS = [[1.0, 2.0, 4.0], [3.0, NAN, 1.0]]
"""Returns with γ = 0.5: 1 + 1.5 = 2.5, 2 and 4.5, mean 3; at age 1 members 0 and 2 are alive, with 3 and 1."""


@pytest.mark.parametrize(
    ("rewards", "settings", "expected"),
    [
        (ONE_STEP, {}, [[-3, -1.5, 4.5]]),
        (ONE_STEP, {"baseline": "mean"}, [[-2, -1, 3]]),
        (ONE_STEP, {"baseline": "weighted"}, [[-2, -1, 3]]),
        (ONE_STEP, {"baseline": "moving_average"}, [[-2, -1, 3]]),
        (ONE_STEP, {"baseline_discount": 0.5}, [[-1, 0.25, 5.25]]),
        (ONE_STEP, {"baseline": "mean", "baseline_discount": 0.0}, [[1, 2, 6]]),
        (ONE_STEP, {"advantage_scale": "none"}, [[-3, -1.5, 4.5]]),
        (ONE_STEP, {"advantage_scale": "group"}, [np.array([-2, -1, 3]) / (7**0.5 + 1e-4)]),
        (ONE_STEP, {"compression": "tanh"}, [np.tanh([-3, -1.5, 4.5])]),
        (ONE_STEP, {"compression": "layer_norm"}, [np.array([-3, -1.5, 4.5]) / (31.5 / 3) ** 0.5]),
        # the returns so far are the rewards: population variance (1 + 4 + 36)/3 − 3² = 14/3
        (ONE_STEP, {"normalize_reward": True}, [np.array([-3, -1.5, 4.5]) / (14 / 3) ** 0.5]),
        (TWO_STEPS, {}, [[2.5 - 3.25, 2 - 3.5, 4.5 - 2.25], [2, 0, -2]]),
        (TWO_STEPS, {"credit": "outcome"}, [[-0.75, -1.5, 2.25], [2.5 - 4.5, 0, 4.5 - 2.5]]),
        # lengths 2, 1, 2: (2·2.5 + 2 + 2·4.5)/5 = 3.2; at age 1 (3 + 1)/2
        (TWO_STEPS, {"baseline": "weighted"}, [[-0.7, -1.2, 1.3], [1, 0, -1]]),
        (TWO_STEPS, {"baseline": "mean"}, [[-0.5, -1, 1.5], [1, 0, -1]]),
    ],
)
def test_group_advantages(rewards: Any, settings: dict[str, Any], expected: Any) -> None:
    model = grpo(Bandit(), n_steps=64, gamma=0.5, **settings)
    rollout = rollout_of(rewards)
    np.testing.assert_allclose(model.estimate_advantages(rollout), np.array(expected, np.float32), atol=1e-4)


def test_outcome_credit_after_frozen_and_dropped_rows() -> None:
    """A segment's outcome is the return at its own first step, also where rows that do not count came before it.

    Column 0 plays 1, waits two steps frozen, then plays 4 and 2: its second outcome is 4 + 0.5·2 = 5, not a return that
    begins in a frozen row. Column 1: the second segment (9, 9) was dropped; 8 + 0.5·6 = 11 is the third one's.
    """
    model = grpo(Bandit(), n_steps=64, gamma=0.5, credit="outcome", baseline="mean", baseline_discount=0.0)
    buffer = GroupBuffer(box(1), spaces.Discrete(2), "cpu")
    rewards = [[1, 3], [0, 9], [0, 9], [4, 8], [2, 6]]
    for t, row in enumerate(rewards):
        mask = np.array([t not in (1, 2), True])
        step = dict.fromkeys(("observations", "actions", "log_probs", "group", "age"), np.zeros(2, np.int64))
        buffer.add(**step, rewards=np.array(row, np.float32), values=None, mask=mask, discounted=np.zeros(2))
        if t in (0, 4):
            buffer.end(0, True, None)
            buffer.end(1, True, None)
        if t == 2:
            buffer.drop(1, first=1)
    buffer.finish()
    np.testing.assert_allclose(model.estimate_advantages(buffer), [[1, 3], [0, 0], [0, 0], [5, 11], [5, 11]])


def test_a_member_cut_alive_goes_on_with_the_mean_reward() -> None:
    """γ = 0.5, rewards 1, 2, 6: r̄/(1 − γ) = 3/0.5 = 6. Member 2 is alive: its return is 6 + 0.5·6 = 9."""
    model = grpo(Bandit(), n_steps=64, gamma=0.5)
    advantages = model.estimate_advantages(rollout_of(ONE_STEP, alive=[2]))
    np.testing.assert_allclose(advantages, [[1 - 5.5, 2 - 5, 9 - 1.5]])


def test_moving_average_keeps_its_table() -> None:
    """First table: the mean 3. Second rollout, mean 13: 0.9·3 + 0.1·13 = 4, refreshed every update or every second one.

    With baseline_every = 2 the table of update 0 serves update 1 as well, and changes in update 2.
    """
    rollouts = [rollout_of([row]) for row in ([1.0, 2.0, 6.0], [11.0, 12.0, 16.0], [11.0, 12.0, 16.0])]
    for every, tables in ((1, [3, 4, 4.9]), (2, [3, 3, 4])):
        model = grpo(Bandit(), n_steps=64, baseline="moving_average", baseline_every=every)
        for rollout, table in zip(rollouts, tables, strict=True):
            advantages = model.estimate_advantages(rollout)
            np.testing.assert_allclose(advantages, rollout.rewards - table, rtol=1e-6)
            model._iterations += 1


def test_with_a_value_head_gae_and_the_group_are_mixed() -> None:
    """γ = λ = 0.5; values 1 everywhere, beyond the cut V = v. GAE: δ = r + 0.5·v − 1 where alive, r − 1 where not."""
    settings = {"value_head": True, "gamma": 0.5, "gae_lambda": 0.5, "group_kind": "episode"}
    rollout = rollout_of(ONE_STEP, alive=[1], values=[[1.0, 1.0, 1.0]])
    model = grpo(Bandit(), n_steps=64, group_weight=0.0, **settings)
    v = model.policy.predict_values(th.zeros(1, 1)).item()
    gae = np.array([0, 1 + 0.5 * v, 5])
    returns = gae + 1
    group = returns - (returns.sum() - returns) / 2
    np.testing.assert_allclose(model.estimate_advantages(rollout)[0], gae, atol=1e-6)
    np.testing.assert_allclose(rollout.returns[0], returns, atol=1e-6)  # type: ignore[index]
    np.testing.assert_array_equal(rollout.old_values, [[1, 1, 1]])  # type: ignore[arg-type]
    for weight, share in ((1.0, 1.0), (0.25, 0.25), (None, 0.25), (LinearSchedule(0.0, 1.0), 0.5)):
        model = grpo(Bandit(), n_steps=64, group_weight=weight, **settings)
        model._current_progress_remaining = 0.5
        expected = (1 - share) * gae + share * group
        np.testing.assert_allclose(model.estimate_advantages(rollout)[0], expected, atol=1e-6)
    alone = rollout_of(ONE_STEP, alive=[1], values=[[1.0, 1.0, 1.0]], group=[[0, 1, 2]])
    np.testing.assert_allclose(model.estimate_advantages(alone)[0], gae, atol=1e-6)  # nobody to compare with: GAE


@pytest.mark.parametrize(
    "settings", [{"value_head": True, "fork_prob": 1.0}, {"baseline": "mean"}, {"advantage_scale": "group"}], ids=str
)
@pytest.mark.parametrize("kind", ["episode", "window"])
def test_a_real_rollout_agrees_with_the_pure_functions(kind: str, settings: dict[str, Any]) -> None:
    model = grpo(make_group_env(Walk, 2, 3, seed=0), group_size=3, group_kind=kind, group_weight=1.0, **settings)
    first = copy.deepcopy(model.policy.state_dict())
    model.learn(192)
    rollout = model.rollout_buffer
    group, age, mask, ends = (th.as_tensor(a) for a in (rollout.group, rollout.age, rollout.mask, rollout.ends))
    rewards, alive = th.as_tensor(rollout.rewards), th.as_tensor(rollout.alive)
    if model.value_head:
        model.policy.load_state_dict(first)  # the weights that sampled
        tails = th.zeros(rewards.shape)
        for t, n, obs in rollout.tail_obs:
            tails[t, n] = model.policy.predict_values(th.as_tensor(obs[None])).item()
        gae, returns = adv.gae(rewards, th.as_tensor(rollout.values), ends, tails, 0.99, 0.95)
    else:
        returns = adv.reward_to_go(rewards, ends, alive * rewards[mask].mean() / 0.01, 0.99)
    expected = adv.group_advantages(
        returns,
        group,
        age,
        mask,
        baseline=settings.get("baseline", "leave_one_out"),
        scale=settings.get("advantage_scale", "none"),
    )
    if model.value_head:  # without a sibling alive at its age a step keeps GAE
        cells = list(zip(group[mask].tolist(), age[mask].tolist(), strict=True))
        assert 1 < len(set(cells)) < len(cells)
        expected[mask] = th.where(th.tensor([cells.count(cell) > 1 for cell in cells]), expected[mask], gae[mask])
    th.testing.assert_close(rollout.advantages[mask], expected[mask], atol=2e-3, rtol=1e-3)


def test_normalize_reward_divides_by_the_spread_of_returns() -> None:
    """An agent paid a thousandfold makes the same run; the statistics hold the counted steps."""

    class Rich(Walk):
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, 1000 * reward, *rest

    runs = []
    for cls in (Walk, Rich):
        model = grpo(make_group_env(cls, 1, 4, seed=0), group_size=4, advantage_scale="none", normalize_reward=True)
        model.learn(300)
        runs.append(model)
    assert runs[0].reward_scale.count == runs[1].reward_scale.count
    assert runs[1].reward_scale.count == runs[1].num_timesteps  # nothing was dropped here
    assert runs[1].reward_scale.var / runs[0].reward_scale.var == pytest.approx(1e6, rel=1e-3)
    th.testing.assert_close(*(run.rollout_buffer.advantages for run in runs), atol=1e-3, rtol=1e-3)
    th.testing.assert_close(*map(parameters, runs), atol=1e-4, rtol=0)


def test_normalize_obs_moves_once_per_update_after_training() -> None:
    """Counted are the rows that were trained on; in the middle of a rollout the statistics stand still."""
    counts: list[int] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            counts.append(int(model.policy.features_extractor.norms["obs_"].count))
            return True

    model = grpo(make_group_env(Walk, 1, 2, seed=0), normalize_obs=True, group_kind="window")
    model.learn(192, Watch())
    assert counts == [0] * 32 + [64] * 32 + [128] * 32
    norm = model.policy.features_extractor.norms["obs_"]
    assert norm.count == 192


# --- groups -----------------------------------------------------------------------------------------------------------
class Steps(Walk):
    """Counts every call of step, of all instances."""

    calls = 0

    def step(self, action: Any) -> Any:
        Steps.calls += 1
        return super().step(action)


class GroupWatch(BaseCallback):
    """Checks after each rollout that the members of a group share their first observation, and collects sizes."""

    def __init__(self, members: int, exact: bool) -> None:
        super().__init__()
        self.members, self.exact = members, exact
        self.groups = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer
        starts, ends = defaultdict(list), defaultdict(int)
        for t, n in zip(*np.nonzero(buffer.mask), strict=True):
            if buffer.age[t, n] == 0:
                starts[buffer.group[t, n]].append(buffer.observations[t, n])
            ends[buffer.group[t, n]] += int(buffer.ends[t, n])
        for group, observations in starts.items():
            assert all(np.array_equal(observations[0], obs) for obs in observations)
            if self.exact:
                assert len(observations) == ends[group] == self.members
            else:
                assert len(observations) == ends[group] >= self.members
        self.groups += len(starts)


@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (lambda: make_group_env(Steps, 1, 4, seed=0), True),
        (lambda: make_group_env(Steps, 3, 4, seed=0), True),
        (lambda: make_vec_env(Steps, 4, seed=0), False),
        (lambda: make_vec_env(Steps, 3, seed=0), False),
        (lambda: VecNormalize(make_vec_env(Steps, 2, seed=0)), False),
        (lambda: VecFrameStack(make_group_env(Steps, 1, 4, seed=0), 3), False),
        (Steps, True),
    ],
    ids=["group", "groups", "dummy", "dummy 3", "normalized", "stacked", "single"],
)
def test_episode_groups_start_alike_and_are_whole(make: Any, exact: bool) -> None:
    env = make()
    Steps.calls = 0  # a group env has probed the snapshots on instances of its own
    watch = GroupWatch(4, exact)
    model = grpo(env, group_size=4, group_kind="episode").learn(400, watch)
    assert watch.groups >= 8
    assert model.groups.means == "fork"
    assert Steps.calls == model.num_timesteps >= 400  # forks cost no step, and every step is counted


@pytest.mark.parametrize("n_envs", [4, 2])
@pytest.mark.parametrize("make", [make_vec_env, lambda cls, n, seed: make_group_env(cls, 1, n, seed=seed)])
def test_windows_start_alike_and_forks_are_logged(make: Any, n_envs: int) -> None:
    """Every window is forked: with 4 columns for 4 members at its start, with 2 also before its second round."""
    starts: list[bool] = []
    forks: list[int] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            buffer = model.rollout_buffer
            for t in range(0, 32, 32 * n_envs // 4):
                starts.append(len(np.unique(buffer.observations[t], axis=0)) == 1)
                assert len(np.unique(buffer.group[t])) == 1
                assert (buffer.age[t] == 0).all()
            forks.append(model.logger.name_to_value["group/forks"] - sum(forks))  # the log has their total
            assert model.logger.name_to_value["group/fork_depth"] >= 0

    env = make(Steps, n_envs, seed=0)
    Steps.calls = 0
    model = grpo(env, group_size=4, group_kind="window", fork_prob=1.0, reset_prob=0.0)
    model.learn(32 * n_envs * 4, Watch())
    assert all(starts)
    assert len(starts) == 4 * 4 // n_envs
    least = n_envs - 1 + (n_envs if n_envs == 2 else 0)  # columns that were moved to a common state
    assert min(forks) >= least
    assert Steps.calls == model.num_timesteps == 32 * n_envs * 4


@pytest.mark.parametrize("restored", ["fork", "reset", "rounds"])
def test_siblings_in_a_dummy_vec_env_do_not_share_later_starts(restored: str) -> None:
    """A state is copied with its generator; were that not renewed, all columns would start each later episode alike."""
    settings = {"fork": {"fork_prob": 1.0, "reset_prob": 0.0}, "reset": {"fork_prob": 0.0, "reset_prob": 1.0}}
    settings["rounds"] = settings["fork"] | {"group_size": 8}
    env = make_vec_env(lambda: Walk(8), 4, seed=0)
    model = grpo(env, **({"group_size": 4, "group_kind": "window", "n_steps": 16} | settings[restored]))  # type: ignore[arg-type]
    later: list[np.ndarray] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.locals["dones"].all():
                later.append(self.locals["new_obs"])
            return True

    model.learn(64 * 8, Watch())
    assert len(later) >= 3  # all columns were reset in one step, as they had been forked together
    assert all(len(np.unique(obs)) == 4 for obs in later)


def test_stacked_frames_move_with_a_fork() -> None:
    """Each row of a VecFrameStack over Counter holds successive observations of one episode, after forks too."""
    env = VecFrameStack(make_vec_env(Counter, 4, seed=0), 3)
    model = grpo(env, group_size=4, group_kind="window", fork_prob=0.7, reset_prob=0.3).learn(32 * 4 * 4)
    rows = model.rollout_buffer.observations.reshape(-1, 3, 2)  # type: ignore[union-attr]
    checked = 0
    for frames in rows:
        episode, t = frames[-1]
        for back, frame in enumerate(frames[::-1]):
            expected = [episode, t - back] if t >= back else [0, 0]
            np.testing.assert_array_equal(frame, expected)
            checked += t >= 2
    assert checked > 50


class Foreign(VecEnvWrapper):
    """A wrapper that the library does not know."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


FALL_BACKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one env": (lambda: Walk(), {"group_kind": "episode"}, r"groups: episode, by fork \(members start from exactly"),
    "DummyVecEnv": (lambda: make_vec_env(Walk, 2), {"group_kind": "episode"}, r"groups: episode, by fork"),
    "3 envs, groups of 8": (lambda: make_vec_env("CartPole-v1", 3), {"group_size": 8}, r"groups: episode, by fork"),
    "SubprocVecEnv": (
        lambda: make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"}),
        {},
        r"groups: episode, by seed \(no exact forks: SubprocVecEnv gives no access.*make_group_env",
    ),
    "unknown env": (Unknown, {"group_kind": "episode"}, r"groups: episode, by seed .*Unknown .*get_snapshot\(\)"),
    "unknown env, windows": (Unknown, {}, r"groups: window, by batch .*Unknown"),
    "unknown wrapper": (
        lambda: Foreign(make_vec_env("CartPole-v1", 2)),
        {},
        r"groups: episode, by seed .*the wrapper Foreign may keep",
    ),
    "unlike envs": (
        lambda: DummyVecEnv([lambda: gym.make("CartPole-v1"), lambda: gym.make("CartPole-v1").unwrapped]),
        {"group_kind": "episode"},
        r"by seed .*built alike",
    ),
    "box2d by name": ("LunarLander-v3", {"group_kind": "episode"}, r"groups: episode, by fork"),
    "long episodes": (lambda: make_vec_env(lambda: short("CartPole-v1", 501), 2), {}, r"groups: window, by fork"),
    "short episodes": (lambda: make_vec_env(lambda: short("CartPole-v1", 500), 2), {}, r"groups: episode, by fork"),
    "time limit of a wrapper": (lambda: gym.wrappers.TimeLimit(Walk(), 20), {}, r"groups: episode, by fork"),
    "as asked": (
        lambda: make_vec_env("CartPole-v1", 2),
        {"grouping": "seed"},
        r"groups: episode, by seed \(as asked\)",
    ),
    "batch as asked": (lambda: make_vec_env("CartPole-v1", 2), {"grouping": "batch"}, r"by batch \(as asked\)"),
    "no groups": (lambda: make_vec_env("CartPole-v1", 2), {"group_size": 1, "value_head": True}, r"no groups"),
}


@pytest.mark.parametrize("case", FALL_BACKS)
@pytest.mark.filterwarnings("ignore:.*truncated mini-batch", "ignore:A rollout of", "ignore:builtin type")
def test_every_env_trains_and_the_log_says_how(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, settings, said = FALL_BACKS[case]
    model = grpo(make() if callable(make) else make, verbose=1, **settings)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("groups: "))
    assert re.search(said, line), line
    model.learn(128)
    assert model.num_timesteps >= 128
    assert parameters(model).isfinite().all()
    buffer = model.rollout_buffer
    if model.groups.means != "batch" and model.groups.kind == "episode":
        for group in np.unique(buffer.group[buffer.mask]):
            rows = buffer.mask & (buffer.group == group) & (buffer.age == 0)
            starts = buffer.observations[rows]  # type: ignore[call-overload, index]
            assert len(starts) in (1, *range(model.group_size, 100))  # a group, or an episode beside it
            np.testing.assert_array_equal(starts, np.broadcast_to(starts[0], starts.shape))
    model.env.close()


def test_a_grouping_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(ForkError, match="Unknown"):
        grpo(Unknown(), grouping="fork")
    with pytest.raises(ConfigError, match="group_kind='episode'"):
        grpo(Unknown(), grouping="seed", group_kind="window")


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "nobody to be compared with.*value_head=True"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_kind": "windows"}, 'did you mean "window"'),
        ({"grouping": "forks"}, 'did you mean "fork"'),
        ({"baseline": "mean_"}, 'did you mean "mean"'),
        ({"credit": "outcomes"}, 'did you mean "outcome"'),
        ({"advantage_scale": "groups"}, 'did you mean "group"'),
        ({"compression": "tan"}, 'did you mean "tanh"'),
        ({"advantage_scale": "group", "baseline": "weighted"}, "z-score about the group mean"),
        ({"advantage_scale": "group", "baseline_discount": 0.9}, "z-score about the group mean"),
        ({"fork_prob": 0.8, "reset_prob": 0.3}, "sum to more than 1"),
        ({"fork_prob": 0.8}, None),  # reset_prob follows: 1 − fork_prob at most
        ({"gamma": 1.1}, "gamma"),
        ({"gae_lambda": -0.1}, "gae_lambda"),
        ({"kl_coef": -1}, "kl_coef"),
        ({"group_weight": 1.5, "value_head": True}, "group_weight"),
        ({"batch_size": 0}, "batch_size"),
        ({"n_epochs": 0}, "n_epochs"),
        ({"baseline_every": 0}, "baseline_every"),
        ({"clip_range_vf": 0.0, "value_head": True}, "clip_range_vf"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str | None) -> None:
    if message is None:
        grpo(group_kind="window", **settings).learn(64)
        return
    with pytest.raises(ConfigError, match=message):
        grpo(**settings)


def test_a_small_rollout_for_its_groups_warns() -> None:
    """A baseline wants about 32 steps a member: 32 · 4 = 128 steps."""
    with pytest.warns(UserWarning, match=r"64 steps is small for group_size=4: .*about 128 steps"):
        grpo(group_size=4, n_steps=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grpo(group_size=4, n_steps=32)


def test_a_critic_free_fall_back_warns_also_when_silent() -> None:
    with pytest.warns(UserWarning, match=r"groups: episode, by seed \(no exact forks"):
        grpo(Unknown(), n_steps=64, group_kind="episode")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grpo(Unknown(), n_steps=64, group_kind="episode", grouping="seed")  # as asked
        grpo(Unknown(), n_steps=64, value_head=True)  # needs no groups


def test_a_gymnasium_vector_env_is_converted_or_refused_with_the_way_to_do_it() -> None:
    env = gym.make_vec("CartPole-v1", 2)
    with pytest.warns(UserWarning, match="2 new envs were built from its spec"):
        model = grpo(env)
    assert isinstance(model.get_env(), GroupVecEnv)
    assert model.learn(64).num_timesteps >= 64
    with pytest.warns(UserWarning, match="2 new envs"):
        model.set_env(env)
    with pytest.raises(ConfigError, match=r'make_group_env\("CartPole-v1", n_groups=1, group_size=2\)'):
        grpo(gym.wrappers.vector.RecordEpisodeStatistics(env))
    env.close()


def test_normalising_twice_is_refused() -> None:
    env = VecNormalize(make_vec_env("CartPole-v1", 2))
    with pytest.raises(ConfigError, match="normalised twice"):
        grpo(env, normalize_obs=True)
    with pytest.raises(ConfigError, match="scaled twice"):
        grpo(env, normalize_reward=True)
    grpo(VecNormalize(make_vec_env("CartPole-v1", 2), norm_obs=False), normalize_obs=True).learn(64)


# --- what is not finite -----------------------------------------------------------------------------------------------
def test_a_loss_that_is_not_finite_leaves_the_policy_as_it_was() -> None:
    """NaN in the second update: the parameters are those after the first, and training can go on, Adam too."""
    factor = {"of": 0.0}
    model = grpo(auxiliary_losses={"nan": (lambda policy, batch: policy.action_net.bias.sum() * factor["of"], 1.0)})
    model.learn(64)
    before = parameters(model)
    factor["of"] = np.nan
    with pytest.raises(NonFiniteError, match=r"not finite at update .*put back"):
        model.learn(64)
    assert th.equal(parameters(model), before)
    factor["of"] = 0.0
    model.learn(64)
    assert parameters(model).isfinite().all()
    assert not th.equal(parameters(model), before)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_parameters_that_overflow_are_noticed(env: str) -> None:
    model = grpo(env, learning_rate=1e38, max_grad_norm=1e9)
    before = parameters(model)
    with pytest.raises(NonFiniteError, match="lower learning_rate"):
        model.learn(1000)
    assert parameters(model).isfinite().all()
    assert th.equal(parameters(model), before)


class NotFinite(Walk):
    """From the 20th step on, `what` is NaN."""

    what = "reward"
    calls = 0

    def step(self, action: Any) -> Any:
        type(self).calls += 1
        obs, reward, *rest = super().step(action)
        if self.calls > 20:
            obs, reward = (obs, np.nan) if self.what == "reward" else (obs * np.nan, reward)
        return obs, reward, *rest


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_numbers_from_the_env_that_are_not_finite_stop_training(what: str) -> None:
    NotFinite.what, NotFinite.calls = what, 0
    model = grpo(make_vec_env(NotFinite, 2), n_steps=64)
    before = parameters(model)
    with pytest.raises(NonFiniteError, match=rf"env 0, step 20: the {what} is not finite"):
        model.learn(128)
    assert th.equal(parameters(model), before)


def test_an_env_that_raises_comes_through_with_a_note() -> None:
    class Raises(Walk):
        def step(self, action: Any) -> Any:
            raise OSError("motor off")

    with pytest.raises(OSError, match="motor off") as error:
        grpo(Raises(), n_steps=64).learn(64)
    assert "raised by env.step at 0 env steps" in error.value.__notes__[0]


# --- critic-free ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["episode", "window"])
def test_critic_free_never_asks_for_a_value(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, obs: Any) -> Any:
        raise AssertionError("predict_values was called")

    monkeypatch.setattr(MlpPolicy, "predict_values", refuse)
    model = grpo("Pendulum-v1", group_kind=kind, max_grad_norm=0.5).learn(400)
    names = [*dict(model.policy.named_parameters()), *model.policy.state_dict()]
    assert not [name for name in names if "value" in name or "vf" in name]
    assert "train/value_loss" not in model.logger.name_to_value
    assert model.rollout_buffer.values is None


# --- seeds ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings",
    [
        {"group_kind": "window", "fork_prob": 0.5, "reset_prob": 0.5},
        {"group_kind": "episode", "normalize_obs": True, "normalize_reward": True},
        {"value_head": True, "fork_prob": 1.0, "group_weight": 0.5},
        {"grouping": "seed", "group_kind": "episode"},
    ],
    ids=str,
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_two_iterations_from_one_seed_are_equal(settings: dict[str, Any], n_envs: int) -> None:
    def run() -> th.Tensor:
        env = make_vec_env(Walk, n_envs)
        model = grpo(env, seed=11, group_size=3, n_steps=48, batch_size=24, **settings)
        return parameters(model.learn(96 * n_envs))

    first = run()
    np.random.default_rng().normal()
    assert th.equal(first, run())


def test_load_and_go_on_is_the_run_that_never_stopped(tmp_path: Any) -> None:
    """Save after one iteration, load, seed both alike: the second iteration is the same, with its moving averages."""
    settings = {"baseline": "moving_average", "normalize_obs": True, "normalize_reward": True, "kl_coef": 0.1}
    settings |= {"reference_every": 2, "group_kind": "window", "fork_prob": 0.5}
    model = grpo(make_vec_env(Walk, 2, seed=0), **settings).learn(64)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", device="cpu")
    results = []
    for agent in (model, loaded):
        agent.set_random_seed(5)
        agent.set_env(make_vec_env(Walk, 2, seed=1))
        agent.set_random_seed(5)
        agent.learn(128, reset_num_timesteps=False)
        results.append((parameters(agent), agent.num_timesteps, agent._baseline_table, agent._iterations))
    assert th.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert results[0][1] == 192


@pytest.mark.parametrize("share", [True, False])
def test_the_reference_sees_observations_as_the_policy_does(share: bool) -> None:
    """With a learning rate of 0 nothing moves but the observation statistics: the KL to the reference stays 0."""
    model = GRPO(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=0.0,
        n_steps=32,
        n_epochs=1,
        seed=0,
        kl_coef=0.1,
        normalize_obs=True,
        value_head=True,
        policy_kwargs={"share_features_extractor": share},
    )
    model.learn(3 * 32 * 8)
    assert model.logger.name_to_value["train/reference_kl"] == pytest.approx(0, abs=1e-7)


def test_the_age_discount_weighs_each_step_by_the_steps_since_its_root() -> None:
    """γ = 1, rewards 1 for two members, one of whom ends after 2 of 3 steps: R = 3, 2, 1 and 2, 1; the tail is 0."""
    model = grpo(Unknown(), gamma=1.0, grouping="batch", group_kind="window", group_size=2)
    rollout = rollout_of([[1.0, 1.0], [1.0, 1.0], [1.0, None]])
    plain = model.estimate_advantages(rollout)
    assert plain[:2].tolist() == [[1.0, -1.0], [1.0, -1.0]]
    model.age_discount = 0.5
    assert model.estimate_advantages(rollout)[:2].tolist() == [[1.0, -1.0], [0.5, -0.5]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 2.5}, "group_size=2.5: expected a whole number"),
        ({"group_size": 0}, "group_size=0: expected 2 or more"),
        ({"clip_range": -0.1}, "clip_range=-0.1: expected a positive number"),
        ({"target_kl": -1.0}, "target_kl=-1.0 is outside"),
        ({"n_steps": -5}, "n_steps=-5"),
        ({"n_steps": "x"}, "n_steps='x': expected a whole number, or None"),
        ({"gamma": None}, "gamma=None: expected a number"),
        ({"ent_coef": "auto"}, "ent_coef='auto': expected a number"),
        ({"kl_coef": "x"}, "kl_coef='x': expected a number"),
        ({"clip_range": float("nan")}, "clip_range=nan: expected a positive number"),
        ({"max_grad_norm": -1}, r"max_grad_norm=-1 is outside \[0, inf\]"),
        ({"policy_kwargs": 5}, "policy_kwargs: expected a dict, got 5"),
        ({"policy_kwargs": {"net_arc": [8]}}, 'MlpPolicy has no "net_arc": did you mean "net_arch"'),
        ({"policy_kwargs": {"activation_fn": "tanh"}}, "build no MlpPolicy: TypeError: 'str' object is not callable"),
        ({"auxiliary_losses": [1]}, r"auxiliary_losses: expected a dict, name -> \(function, weight\), got \[1\]"),
        ({"auxiliary_losses": {"a": (len, "x")}}, r"weight of auxiliary_losses\['a'\]='x': expected a number"),
        ({"auxiliary_losses": {"a": 3}}, r"auxiliary_losses\['a'\]: expected \(function"),
    ],
)
def test_bad_numbers_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPO("MlpPolicy", Unknown(), **settings)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda policy, batch: th.zeros(3), r"a tensor of shape \(3,\)"),
        (lambda policy, batch: th.zeros(len(batch.weight), 1), r"a tensor of shape \(\d+, 1\)"),
        (lambda policy, batch: None, "None"),
        (lambda policy, batch: 1.0, r"1\.0"),
    ],
)
def test_an_auxiliary_loss_is_one_number_a_row_or_one(loss: Any, got: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"auxiliary_losses\['a'\]: expected a tensor of one loss per row, .* got {got}"
    ):
        grpo(auxiliary_losses={"a": (loss, 1.0)}).learn(64)


@pytest.mark.parametrize("steps", [-5, math.nan, math.inf, "5", None])
def test_learn_wants_a_number_of_steps(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"total_timesteps=.*: expected a number of env steps"):
        grpo().learn(steps)


def test_learn_of_no_steps_trains_nothing_as_in_sb3() -> None:
    model = grpo()
    before = parameters(model)
    assert model.learn(0) is model and model.num_timesteps == 0
    assert th.equal(parameters(model), before)


def test_groups_by_seed_are_groups_of_episodes() -> None:
    """What the message about an env that cannot be forked advises works as it is written."""
    with pytest.warns(UserWarning, match="grouping='seed'"):
        GRPO("MlpPolicy", Unknown())
    model = GRPO("MlpPolicy", Unknown(), grouping="seed")
    assert (model.groups.kind, model.groups.means) == ("episode", "seed")
