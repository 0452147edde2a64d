"""Twenty-four reports from SB3, Gymnasium and MuJoCo that must not come back; the number in a name is the row.

Exact forks (rows 20-24) are proved family by family in tests/forks/test_snapshot.py; here each row has its small case.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from probe_envs import Bandit, Constant, Walk, grpo
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from grpo_rl import GRPO, make_group_env, probe_fork
from grpo_rl import advantages as adv
from grpo_rl.errors import NonFiniteError
from grpo_rl.forks.snapshot import fork_support, transfer

pytestmark = pytest.mark.filterwarnings("ignore:A rollout of", "ignore:builtin type", "ignore:groups. ")


def parameters(model: Any) -> th.Tensor:
    return th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()


# 1, 2: batches of one ------------------------------------------------------------------------------------------------
def test_01_batches_of_one_are_refused_at_construction() -> None:
    with pytest.raises(AssertionError, match=r"n_steps \* n_envs"):
        GRPO("MlpPolicy", Bandit(), n_steps=1)
    with pytest.raises(AssertionError, match="batch_size"):
        GRPO("MlpPolicy", Bandit(), batch_size=1)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.filterwarnings("ignore:.*truncated mini-batch of size 1")
def test_02_a_last_minibatch_of_one_row_does_not_end_in_nan(env: str) -> None:
    model = grpo(env, batch_size=63, group_kind="window", n_epochs=3).learn(128)
    assert parameters(model).isfinite().all()
    model = grpo(make_vec_env(lambda: Constant(8), 2), batch_size=63, group_kind="window").learn(64)
    assert (model.rollout_buffer.advantages == 0).all()
    assert parameters(model).isfinite().all()


# 3, 4: time limits ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["episode", "window"])
def test_03_a_time_limit_does_not_lower_the_credit_of_late_steps(kind: str) -> None:
    """Reward 1 for ever: r̄/(1 − γ) = 100 beyond every cut, so that each step's return is 1 + 0.99·100 = 100."""
    env = make_vec_env(lambda: Constant(8, terminates=False, truncates=True), 2)
    model = grpo(env, group_kind=kind, baseline="mean", baseline_discount=0.0).learn(64)
    np.testing.assert_allclose(model.rollout_buffer.advantages, 100, rtol=1e-5)


def test_03_with_a_value_head_the_cut_is_bootstrapped() -> None:
    """γ = 1, λ = 1, V ≡ 5: A_t = (rewards to the cut) + 5 − 5; without the bootstrap the first 5 would be missing."""
    model = grpo(
        make_vec_env(lambda: Constant(8, terminates=False, truncates=True), 1),
        value_head=True,
        group_size=1,
        gamma=1.0,
        gae_lambda=1.0,
        n_steps=64,
        batch_size=64,
        normalize_advantage=False,
    )
    with th.no_grad():
        model.policy.value_net.weight.zero_()
        model.policy.value_net.bias.fill_(5.0)
    model.learn(64)
    np.testing.assert_allclose(model.rollout_buffer.advantages[:, 0], np.tile(np.arange(8, 0, -1), 8), atol=1e-4)


def test_04_terminated_at_the_limit_is_terminated() -> None:
    """Both flags at once: nothing lies beyond, the returns of an episode of 3 are 3, 2, 1."""
    env = make_vec_env(lambda: Constant(3, terminates=True, truncates=True), 1)
    model = grpo(
        env, n_steps=64, gamma=1.0, fork_prob=0.0, group_kind="episode", baseline="mean", baseline_discount=0.0
    ).learn(64)
    buffer = model.rollout_buffer
    assert not buffer.alive.any()
    assert buffer.tail_obs == []
    np.testing.assert_array_equal(buffer.advantages[:, 0].reshape(-1, 3), np.tile([3, 2, 1], (len(buffer) // 3, 1)))


# 5: totals -----------------------------------------------------------------------------------------------------------
class Counted(Walk):
    calls = 0

    def step(self, action: Any) -> Any:
        Counted.calls += 1
        return super().step(action)


@pytest.mark.parametrize(
    "settings", [{"group_kind": "window"}, {"group_kind": "episode"}, {"value_head": True}], ids=str
)
@pytest.mark.parametrize("make", [make_vec_env, lambda cls, n: make_group_env(cls, 1, n)], ids=["dummy", "group"])
def test_05_num_timesteps_is_the_number_of_env_steps(make: Any, settings: dict[str, Any]) -> None:
    env = make(Counted, 4)
    Counted.calls = 0  # a group env has probed the snapshots on instances of its own
    model = grpo(env, group_size=4, n_steps=32, **settings)
    model.learn(300)
    assert Counted.calls == model.num_timesteps >= 300
    if settings != {"group_kind": "episode"}:
        assert model.num_timesteps == 384  # 3 rollouts of 128
    assert "rounded up" in (GRPO.learn.__doc__ or "")


# 6, 7, 8: set_env and load -------------------------------------------------------------------------------------------
def test_06_set_env_keeps_the_count_and_forces_a_reset() -> None:
    model = grpo(group_kind="window").learn(64)
    env = make_vec_env("CartPole-v1", 2)
    model.set_env(env, force_reset=True)
    assert model._last_obs is None
    assert model.num_timesteps == 64
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == 128


def test_07_load_with_another_number_of_envs(tmp_path: Any) -> None:
    grpo(make_vec_env("CartPole-v1", 1), n_steps=64, group_kind="window").learn(64).save(tmp_path / "model")
    model = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 4), device="cpu")
    model.learn(256)
    assert model.num_timesteps == 256
    assert model.rollout_buffer.rewards.shape == (64, 4)


def test_08_load_is_a_class_method_that_gives_a_new_agent(tmp_path: Any) -> None:
    trained = grpo(seed=1).learn(64)
    trained.save(tmp_path / "model")
    other = grpo(seed=2)
    before = parameters(other)
    loaded = other.load(tmp_path / "model", device="cpu")
    assert loaded is not other
    assert th.equal(parameters(other), before)
    assert th.equal(parameters(loaded), parameters(trained))


# 9, 10, 11: schedules and settings at load ---------------------------------------------------------------------------
def test_09_schedules_are_saved_as_values(tmp_path: Any) -> None:
    grpo(clip_range=0.15, clip_range_vf=0.25, value_head=True, learning_rate=1e-3).save(tmp_path / "model")
    model = GRPO.load(tmp_path / "model", device="cpu")
    for name, value in (("clip_range", 0.15), ("clip_range_vf", 0.25), ("lr_schedule", 1e-3)):
        assert type(getattr(model, name)) is FloatSchedule
        assert getattr(model, name)(0.3) == value


def test_10_learning_rate_is_the_only_truth(tmp_path: Any) -> None:
    model = grpo(learning_rate=1e-3)
    model.policy.optimizer.param_groups[0]["lr"] = 7.0
    model.learn(64)
    assert model.policy.optimizer.param_groups[0]["lr"] == 1e-3
    model.save(tmp_path / "model")
    env = make_group_env("CartPole-v1", 1, 2)
    loaded = GRPO.load(tmp_path / "model", env=env, learning_rate=2e-4, device="cpu").learn(64)
    assert loaded.policy.optimizer.param_groups[0]["lr"] == 2e-4


def test_11_load_overrides_settings(tmp_path: Any) -> None:
    grpo(group_kind="window").learn(64).save(tmp_path / "model")
    env = make_group_env("CartPole-v1", 1, 2)
    model = GRPO.load(tmp_path / "model", env=env, n_steps=16, batch_size=8, gamma=0.5, device="cpu").learn(32)
    assert (model.n_steps, model.batch_size, model.gamma) == (16, 8, 0.5)
    assert model.rollout_buffer.rewards.shape == (16, 2)
    assert next(model.rollout_buffer.get(model.batch_size)).weight.shape == (8,)


@pytest.mark.parametrize(
    "settings", [{"group_kind": "window"}, {"group_kind": "episode"}, {"value_head": True}], ids=str
)
def test_12_a_loaded_agent_resets_its_env_first(tmp_path: Any, settings: dict[str, Any]) -> None:
    grpo(**settings).learn(64).save(tmp_path / "model")
    model = GRPO.load(tmp_path / "model", env=Monitor(gym.make("CartPole-v1")), device="cpu")
    count = model.num_timesteps
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps >= count + 64


# 13: VecNormalize; see also test_sb3_contract.py, test_44 and test_57 -------------------------------------------------
def test_13_evaluation_neither_updates_nor_lags_the_statistics() -> None:
    env = VecNormalize(make_vec_env("CartPole-v1", 2))
    eval_env = VecNormalize(make_vec_env("CartPole-v1", 1), training=False)
    model = grpo(env, group_kind="window", fork_prob=0.5, reset_prob=0.5)
    model.learn(64, EvalCallback(eval_env, eval_freq=32, n_eval_episodes=3, verbose=0))  # after the last step
    np.testing.assert_array_equal(eval_env.obs_rms.mean, env.obs_rms.mean)
    assert env.obs_rms.count == pytest.approx(2 + 64, abs=1e-3)  # the reset, and one per counted step
    assert eval_env.obs_rms.count == env.obs_rms.count


# 14, 15: actions -----------------------------------------------------------------------------------------------------
def test_14_squash_output_needs_sde_and_is_unscaled() -> None:
    with pytest.raises(AssertionError, match="squash_output"):
        grpo("Pendulum-v1", policy_kwargs={"squash_output": True})
    seen: list[float] = []

    class Torque(Walk):
        def step(self, action: Any) -> Any:
            seen.append(float(action[0]))
            return super().step(action)

    env = make_vec_env(Torque, 2)
    env.action_space = env.envs[0].action_space
    model = grpo(env, use_sde=True, policy_kwargs={"squash_output": True}, group_kind="window").learn(64)
    np.testing.assert_allclose(np.array(seen).reshape(32, 2), model.rollout_buffer.actions[:, :, 0], atol=1e-6)


def test_15_the_env_never_sees_an_action_out_of_bounds() -> None:
    """Walk asserts that its space contains the action; the log-probability is that of the action as it was sampled."""
    model = grpo(make_vec_env(Walk, 2), policy_kwargs={"log_std_init": 2.0, "net_arch": [8]}, group_kind="window")
    _, callback = model._setup_learn(64)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 32)
    (batch,) = model.rollout_buffer.get()
    assert (batch.actions.abs() > 1).float().mean() > 0.5
    log_prob = model.policy.evaluate_actions(batch.observations, batch.actions)[1]
    th.testing.assert_close(log_prob, batch.old_log_prob)


# 16: numbers that run away -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", [{}, {"value_head": True}, {"use_sde": True}], ids=str)
def test_16_a_large_learning_rate_for_fifty_updates_stays_finite(settings: dict[str, Any]) -> None:
    model = grpo("Pendulum-v1", learning_rate=0.5, group_kind="window", n_epochs=5, **settings).learn(640)
    assert model._n_updates == 50
    assert parameters(model).isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"value_head": True}, {"use_sde": True}, {"ent_coef": -1.0}], ids=str)
@pytest.mark.parametrize("learning_rate", [50.0, 1e3, 1e6])
def test_16_a_std_that_vanishes_or_explodes_is_a_clear_error(settings: dict[str, Any], learning_rate: float) -> None:
    """Not "normal expects std >= 0" from inside torch; and the policy is one that can still be used."""
    model = grpo("Pendulum-v1", learning_rate=learning_rate, group_kind="window", n_epochs=5, **settings)
    with pytest.raises(NonFiniteError, match="put back"):
        model.learn(640)
    assert parameters(model).isfinite().all()
    action, _ = model.predict(np.zeros(3, np.float32))
    assert model.action_space.contains(action)


# 17, 18, 19: interfaces ----------------------------------------------------------------------------------------------
def test_17_predict_refuses_the_tuple_of_reset() -> None:
    env = gym.make("CartPole-v1")
    with pytest.raises(ValueError, match="mixing Gym API"):
        grpo(env).predict(env.reset(seed=0))


@pytest.mark.parametrize("settings", [{"grouping": "seed", "group_kind": "episode"}, {"grouping": "batch"}], ids=str)
def test_18_worker_processes_train_the_same_as_one_process(settings: dict[str, Any]) -> None:
    """Wrapped envs, so that an attribute of the wrong layer would show."""

    def run(cls: Any, **kwargs: Any) -> th.Tensor:
        env = make_vec_env(
            "CartPole-v1",
            2,
            wrapper_class=gym.wrappers.TimeAwareObservation,
            vec_env_cls=cls,
            vec_env_kwargs=kwargs,
        )
        result = parameters(grpo(env, **settings).learn(128))
        env.close()
        return result

    assert th.equal(run(DummyVecEnv), run(SubprocVecEnv, start_method="fork"))


@pytest.mark.parametrize("settings", [{"group_kind": "window", "fork_prob": 1.0, "reset_prob": 0.0}, {}], ids=str)
def test_19_forks_past_the_end_of_an_episode_leave_monitors_in_order(settings: dict[str, Any]) -> None:
    """Monitor raises when it is stepped and needs a reset; it is restored together with its env."""
    env = DummyVecEnv([lambda: Monitor(Constant(3))] * 3)
    model = grpo(env, n_steps=64, group_size=3, **settings).learn(192 * 3)
    assert {(episode["l"], episode["r"]) for episode in model.ep_info_buffer} == {(3, 3.0)}


# 20-24: exact forks; by family in tests/forks/test_snapshot.py ------------------------------------------------------
def follow(env_id: str, before: int, after: int) -> list[tuple[Any, ...]]:
    """Steps an env, forks it into a second one, and gives (obs, reward) pairs of both, step by step."""
    original, copied = gym.make(env_id), gym.make(env_id)
    original.reset(seed=1)
    copied.reset(seed=2)
    original.action_space.seed(3)
    for _ in range(before):
        if any(original.step(original.action_space.sample())[2:4]):
            original.reset()
    transfer(original, copied)
    steps = []
    for _ in range(after):
        action = original.action_space.sample()
        left, right = original.step(action), copied.step(action)
        steps.append((left[0], right[0], left[1], right[1]))
        assert left[2:4] == right[2:4]
        if left[2] or left[3]:
            original.reset(seed=9)
            copied.reset(seed=9)
    return steps


@pytest.mark.parametrize(
    ("env_id", "before", "after"),
    [
        ("Hopper-v5", 25, 60),  # 20: deepcopy of a MuJoCo env is another state, in silence
        ("Walker2d-v5", 10, 200),  # 21: drift after contacts, unless the solver's warm start is copied
        ("Ant-v5", 25, 5),  # 24: xpos lags qpos by a substep, so that the first reward would differ
    ],
)
def test_20_21_24_forks_are_bit_equal(env_id: str, before: int, after: int) -> None:
    for left_obs, right_obs, left_reward, right_reward in follow(env_id, before, after):
        assert left_obs.tobytes() == right_obs.tobytes()
        assert left_reward == right_reward


def test_22_nothing_leaks_from_a_fork_into_the_next_episode() -> None:
    """FetchPush does not run on this MuJoCo; what leaked there (ctrl, warm start, mocap) is in mjData here too."""
    env, other = gym.make("Walker2d-v5"), gym.make("Walker2d-v5")

    def first_ten() -> bytes:
        obs = [env.reset(seed=7)[0]]
        env.action_space.seed(7)
        obs += [env.step(env.action_space.sample())[0] for _ in range(10)]
        return np.array(obs).tobytes()

    clean = first_ten()
    other.reset(seed=1)
    for _ in range(30):
        other.step(other.action_space.sample())
    transfer(other, env)
    env.step(env.action_space.sample())
    assert first_ten() == clean


def test_23_box2d_worlds_are_not_copied_but_replayed() -> None:
    pytest.importorskip("Box2D")
    support = fork_support(gym.make("LunarLander-v3"))
    assert support.exact and support.grows
    assert probe_fork("LunarLander-v3").exact
    model = grpo("LunarLander-v3", group_kind="episode", n_steps=64, verbose=0)
    assert model.groups.means == "fork"
    model.learn(64)
    buffer = model.rollout_buffer
    np.testing.assert_array_equal(buffer.observations[0, 0], buffer.observations[0, 1])


def test_returns_of_a_truncated_group_by_hand() -> None:
    """The arithmetic behind rows 3 and 4: rewards 1, 1; cut alive with r̄/(1 − γ) = 2 at γ = 0.5, or dead."""
    rewards, ends = th.ones(2, 1), th.tensor([[False], [True]])
    alive = adv.reward_to_go(rewards, ends, th.full((2, 1), 2.0), 0.5)
    dead = adv.reward_to_go(rewards, ends, th.zeros(2, 1), 0.5)
    assert alive.flatten().tolist() == [2.0, 2.0]
    assert dead.flatten().tolist() == [1.5, 1.0]
