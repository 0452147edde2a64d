"""The regression against values worked out by hand, and GRPO with it on probes whose values are known."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from probe_envs import Constant, Delayed, Probe, Spaces, Walk, box, grpo
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

from grpo_rl import GRPO, make_group_env
from grpo_rl import advantages as adv
from grpo_rl.errors import ConfigError
from grpo_rl.regression import CLIP, FEATURES, RidgeValue, features, refuse_images, ridge

pytestmark = pytest.mark.filterwarnings("ignore:A rollout of", "ignore:builtin type", "ignore:groups. ")


# --- the mathematics --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("x", "y", "penalty", "expected"),
    [
        # About the means x is ±1 and y is ±1: slope Σxy/(Σx² + penalty·M) = 4/(4 + 0.25·4); the level is y's mean.
        ([-1, 1, -1, 1], [1, 3, 1, 3], 0.25, [2, 0.8]),
        # About the means x is ±1 and y is ±2: slope 4/(2 + 0.5·2) = 4/3, level 3 − 4/3·1.
        ([0, 2], [1, 5], 0.5, [5 / 3, 4 / 3]),
        # As many rows, twice: Σ and penalty double, the answer is the same.
        ([0, 2, 0, 2], [1, 5, 1, 5], 0.5, [5 / 3, 4 / 3]),
        # A feature that never moves has no weight, whatever its value is.
        ([0, 0], [4, 6], 0.01, [5, 0]),
    ],
)
def test_ridge_by_hand(x, y, penalty, expected):
    phi = th.tensor([[1.0, value] for value in x])
    solution = ridge(phi, th.tensor(y, dtype=th.float32), penalty)
    assert solution.dtype == th.float64
    assert solution.tolist() == pytest.approx(expected, abs=1e-12)


def test_features_by_hand():
    x, weights, biases = th.tensor([[2.0, -3.0]]), th.tensor([[0.5], [0.25]]), th.tensor([1.0])
    # xW + b = 2·0.5 − 3·0.25 + 1
    assert features(x, weights, biases)[0].tolist() == pytest.approx([1, 2, -3, 4, 9, np.tanh(1.25)])


def test_the_order_of_rows_does_not_matter_and_a_shift_of_the_targets_shifts_the_values():
    generator = th.Generator().manual_seed(0)
    x, y = th.randn(300, 3, generator=generator), th.randn(300, generator=generator)
    phi = features(x, th.randn(3, 40, generator=generator), th.randn(40, generator=generator))
    solution, order = ridge(phi, y, 0.01), th.randperm(300, generator=generator)
    assert th.allclose(ridge(phi[order], y[order], 0.01), solution, atol=1e-9)
    shifted = ridge(phi, y + 100, 0.01)
    assert th.allclose(phi.double() @ shifted, phi.double() @ solution + 100, atol=1e-4)
    more = ridge(phi, y, 1.0)
    assert more[1:].square().sum() < solution[1:].square().sum()


# --- the module -------------------------------------------------------------------------------------------------------
def rollout(start, rows=4):
    return th.arange(start, start + rows, dtype=th.float32)[:, None], th.full((rows,), float(start))


def test_the_last_four_rollouts_are_kept_as_they_came():
    value = RidgeValue(box(1))
    assert value.empty
    for start in (0, 10, 20, 30, 40):
        value.keep(*rollout(start))
    assert value.rows.tolist() == [4] * 4
    assert value.observations.flatten().tolist() == [float(s + i) for s in (10, 20, 30, 40) for i in range(4)]
    assert value.targets.tolist() == [float(s) for s in (10, 20, 30, 40) for _ in range(4)]
    assert value.norm.count == 20 and value.norm.mean.item() == pytest.approx(21.5)


def test_old_rows_are_fitted_as_the_normaliser_sees_them_now():
    value = RidgeValue(box(1))
    for start in (0, 100):
        value.keep(*rollout(start))
    phi = features(value.norm(value.observations), value.weights, value.biases)
    solution = ridge(phi, value.targets, 0.01)
    assert th.equal(value(value.observations), (phi.double() @ solution).float())
    far = value(th.tensor([[1e9]]))
    assert th.equal(far, value(th.tensor([[1e6]]))), f"beyond ±{CLIP} all observations are one"


def test_the_state_goes_into_a_module_that_has_kept_something_else():
    value, other = RidgeValue(box(2)), RidgeValue(box(2))
    obs = th.randn(7, 2)
    value.keep(obs, th.randn(7))
    other.keep(th.randn(3, 2), th.randn(3))
    other(obs)
    other.load_state_dict(value.state_dict())
    assert th.equal(other(obs), value(obs))
    assert not list(value.parameters())
    damaged = value.state_dict() | {"targets": th.zeros(5)}
    with pytest.raises(ConfigError, match="do not go together"):
        other.load_state_dict(damaged)


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (box(3), 3),
        (box(2, 3), 6),
        (spaces.Discrete(4), 4),
        (spaces.MultiDiscrete([2, 3]), 5),
        (spaces.MultiBinary(3), 3),
        (spaces.Dict({"b": box(2), "a": spaces.Discrete(3)}), 5),
    ],
    ids=str,
)
def test_vectors_and_discrete_observations(space, size):
    env = make_vec_env(lambda: Spaces(space, spaces.Discrete(2)), 2)
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    model = grpo(env, policy, baseline="regression", grouping="batch").learn(192)
    assert model.regression.observations.shape == (192, size)
    assert model.regression.weights.shape == (size, FEATURES)


def test_images_are_refused_with_the_way_to_do_it():
    image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    env = make_vec_env(lambda: Spaces(image, spaces.Discrete(2)), 2)
    with pytest.raises(ConfigError, match=r"the observation is an image .*value_head=True"):
        grpo(env, "CnnPolicy", baseline="regression")
    with pytest.raises(ConfigError, match='the observation "eye" is an image'):
        refuse_images(spaces.Dict({"eye": image, "ear": box(2)}))


# --- the agent --------------------------------------------------------------------------------------------------------
class Clock(Constant):
    """Reward 1 at each step; the observation is the step."""

    def observe(self):
        return np.array([self.t], np.float32)


@pytest.mark.parametrize("kind", ["window", "episode"])
@pytest.mark.parametrize("terminates", [True, False])
def test_known_values_are_found(kind, terminates):
    """Before a true end the rewards left, Σ 0.9^k; before a time limit as if there were none, 1/(1 − 0.9)."""
    env = make_group_env(lambda: Clock(8, terminates=terminates, truncates=not terminates), 1, 4, seed=0)
    model = grpo(env, baseline="regression", group_size=4, gamma=0.9, group_kind=kind).learn(1500)
    steps = np.arange(8)
    expected = (1 - 0.9 ** (8 - steps)) / 0.1 if terminates else np.full(8, 10.0)
    got = model.regression(th.tensor(steps[:, None], dtype=th.float32)).numpy()
    assert got == pytest.approx(expected, abs=0.15)


class Watch(BaseCallback):
    def _init_callback(self):
        self.values, self.rewards, self.advantages, self.records = [], [], [], []

    def _on_rollout_start(self):
        self.records.append(dict(self.model.logger.name_to_value))

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        self.values.append(buffer.old_values.clone())
        self.rewards.append(buffer.rewards.copy())
        self.advantages.append(buffer.advantages.clone())

    def _on_step(self):
        return True


def test_in_the_first_rollout_every_value_is_the_mean_reward_for_ever():
    env = make_group_env(lambda: Walk(100, truncates=True), 1, 2, seed=0)
    model = grpo(env, baseline="regression", gamma=0.9, gae_lambda=0.8, group_weight=0.0)
    watch = Watch()
    model.learn(64, callback=watch)
    mean = watch.rewards[0].mean() / (1 - 0.9)
    assert watch.values[0].numpy() == pytest.approx(np.full((32, 2), mean), rel=1e-5)
    # With V constant and no end within, δ = r − r̄ at each step; after the last step nothing is left.
    surplus, later = th.tensor(watch.rewards[0]) - watch.rewards[0].mean(), 0.0
    for t in range(31, -1, -1):
        later = surplus[t] + 0.9 * 0.8 * later
        assert watch.advantages[0][t].tolist() == pytest.approx(later.tolist(), abs=1e-4)


def test_a_rollout_is_judged_by_earlier_ones_only():
    """Whatever it was paid, its values are the same; and its own λ-returns are what the next ones are fitted to."""
    env = make_group_env(Walk, 1, 2, seed=0)
    model = grpo(env, baseline="regression").learn(128)
    buffer = model.rollout_buffer
    again = [model.regression.state_dict()]
    again[0] = {name: tensor.clone() for name, tensor in again[0].items()}
    model.estimate_advantages(buffer)
    values = buffer.old_values.clone()
    assert th.equal(model.regression.targets[-64:], buffer.returns[buffer.tensor(buffer.mask)])
    model.regression.load_state_dict(again[0])
    buffer.rewards += 100
    model.estimate_advantages(buffer)
    assert th.equal(buffer.old_values, values)


def test_gae_with_the_fitted_values_and_the_groups_share():
    env = make_group_env(Walk, 1, 2, seed=0)
    model = grpo(env, baseline="regression", fork_prob=1.0, gae_lambda=0.7, group_weight=0.5).learn(128)
    buffer = model.rollout_buffer
    before = {name: tensor.clone() for name, tensor in model.regression.state_dict().items()}
    got = model.estimate_advantages(buffer)
    model.regression.load_state_dict(before)
    rewards, ends, mask, group, age = (
        buffer.tensor(getattr(buffer, name)) for name in ("rewards", "ends", "mask", "group", "age")
    )
    values = model.regression(buffer.tensor(buffer.observations.reshape(-1, 1))).reshape(rewards.shape)
    tails = th.zeros_like(rewards)
    for t, n, obs in buffer.tail_obs:
        tails[t, n] = model.regression(th.as_tensor(obs)[None])[0]
    plain, returns = adv.gae(rewards, values, ends, tails, model.gamma, 0.7)
    siblings = adv.has_sibling(group, age, mask)
    assert siblings.any() and model._shared_rows.equal(siblings)
    expected = th.where(siblings, (plain + adv.group_advantages(returns, group, age, mask)) / 2, plain)
    assert th.allclose(got, expected, atol=1e-4)


def test_scaled_rewards_have_scaled_values():
    """The rows are kept in the reward's own unit: those of before a change of the scale go on meaning the same."""
    env = make_group_env(lambda: Clock(8), 1, 4, seed=0)
    model = grpo(env, baseline="regression", group_size=4, gamma=0.9, normalize_reward=True).learn(1500)
    got = model.regression(th.tensor([[0.0], [7.0]])).tolist()
    assert got == pytest.approx([(1 - 0.9**8) / 0.1, 1.0], abs=0.15)
    unit = model._reward_unit.item()
    valid = model.rollout_buffer.mask
    assert model.regression.targets[-valid.sum() :].numpy() == pytest.approx(
        model.rollout_buffer.returns.numpy()[valid] * unit, rel=1e-5
    )
    assert unit != 1


def test_the_policy_has_no_value_parameters():
    names = [grpo(baseline=name).policy.state_dict().keys() for name in ("regression", "leave_one_out")]
    assert names[0] == names[1]
    assert not [name for name in names[0] if "value" in name or "vf" in name]
    model = grpo(baseline="regression")
    with pytest.raises(AttributeError, match="critic-free"):
        model.policy.predict_values(th.zeros(1, 4))


def test_groups_are_the_hybrids():
    walk = make_group_env(Walk, 1, 2, seed=0)
    model, hybrid = grpo(walk, baseline="regression"), grpo(walk, value_head=True)
    for name in ("kind", "means"):
        assert getattr(model.groups, name) == getattr(hybrid.groups, name)
    assert model.groups.kind == "window" and not model._sampler.plan.respawn
    assert model._sampler.plan.fork_prob == hybrid._sampler.plan.fork_prob == 0.1
    assert model._group_weight() == hybrid._group_weight() == 0.25
    assert grpo(walk, baseline="regression", group_size=1)._group_weight() == 0


def test_the_explained_variance_is_logged(tmp_path):
    env = make_group_env(lambda: Clock(8), 1, 4, seed=0)
    model = grpo(env, baseline="regression", group_size=4, gamma=0.9)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(1024)
    rows = np.genfromtxt(tmp_path / "progress.csv", delimiter=",", names=True)
    assert rows["trainexplained_variance"][-1] > 0.95
    assert not [name for name in rows.dtype.names if "value_loss" in name]


@pytest.mark.parametrize("kind", ["window", "episode"])
def test_credit_reaches_the_action_that_was_paid_later(kind):
    env = make_group_env(Delayed, 1, 4, seed=0)
    settings = {"learning_rate": 1e-2, "n_epochs": 4, "group_size": 4, "group_kind": kind}
    model = grpo(env, baseline="regression", **settings).learn(2000)
    obs = th.tensor([[0.0]])
    assert model.policy.get_distribution(obs).distribution.probs[0, 1].item() > 0.95


def test_saved_and_loaded_it_goes_on_as_if_it_had_not_stopped(tmp_path):
    class Fixed(Probe):
        """The same course after every reset: a load begins with one."""

        def step(self, action):
            self.t += 1
            return np.array([self.t], np.float32), float(action) + self.t, self.t == 16, False, {}

    def build():
        return make_group_env(Fixed, 1, 2, seed=0)

    settings = {"baseline": "regression", "n_steps": 16, "normalize_obs": True, "normalize_reward": True}
    model = grpo(build(), **settings).learn(320)
    model.save(tmp_path / "m")
    loaded = GRPO.load(tmp_path / "m", env=build(), device="cpu")
    for name, tensor in model.regression.state_dict().items():
        assert th.equal(loaded.regression.state_dict()[name], tensor), name
    model.set_env(build())
    results = []
    for agent in (model, loaded):
        agent.set_random_seed(5)
        agent.learn(320, reset_num_timesteps=False)
        results.append(th.nn.utils.parameters_to_vector(agent.policy.parameters()).detach())
    assert th.equal(*results)


def test_a_file_with_and_a_model_without_and_the_other_way_round(tmp_path):
    model = grpo(baseline="regression").learn(64)
    model.save(tmp_path / "with")
    assert GRPO.load(tmp_path / "with", baseline="leave_one_out").regression is None
    grpo().learn(64).save(tmp_path / "without")
    assert GRPO.load(tmp_path / "without", baseline="regression").regression.empty


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value_head": True}, "in the place of a value network"),
        ({"baseline_discount": 0.9}, "baseline_discount=0.9 .*leave it at 1.0"),
        ({"baseline_every": 2}, "baseline_every=2 .*leave it at 1"),
        ({"credit": "outcome"}, "credit='outcome' .*'reward_to_go'"),
        ({"advantage_scale": "group"}, "z-score within the group"),
        ({"cold_start": 100}, "needs value_head=True"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        grpo(baseline="regression", **settings)


def test_what_it_reads_is_no_warning(recwarn):
    grpo(baseline="regression", gae_lambda=0.9, group_weight=0.5)
    assert not [w for w in recwarn if "nothing reads" in str(w.message)]
    with pytest.warns(UserWarning, match="nothing reads vf_coef"):
        grpo(baseline="regression", gae_lambda=0.9, vf_coef=0.1)
