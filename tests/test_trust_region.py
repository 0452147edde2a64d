"""The trust region's arithmetic by hand, and a policy whose step size is wrong at first."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.logger import configure

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError
from grpo_rl.trust_region import LIMITS, next_scale


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.021, 1 / 1.5),  # more than twice the target: smaller
        (0.020, 1.0),  # the band's ends belong to it
        (0.010, 1.0),
        (0.005, 1.0),
        (0.004, 1.5),  # less than half of it: larger
        (0.0, 1.5),  # nothing moved at all
        (-1e-9, 1.5),  # the estimate's noise
    ],
)
def test_scale_moves_by_a_factor_outside_the_band(kl, expected):
    assert next_scale(1.0, kl, target=0.01, steered="learning_rate") == pytest.approx(expected)


@pytest.mark.parametrize("steered", ["learning_rate", "clip_range"])
def test_scale_stays_within_its_limits(steered):
    low, high = LIMITS[steered]
    assert next_scale(1.1 * low, 1.0, 0.01, steered) == low
    assert next_scale(high / 1.1, 0.0, 0.01, steered) == high


def test_two_moves_in_opposite_directions_cancel():
    assert next_scale(next_scale(1.0, 1.0, 0.01, "clip_range"), 0.0, 0.01, "clip_range") == pytest.approx(1.0)


def cartpole(**settings):
    """Plain PPO on CartPole: the KL of an update depends on the step size alone, not on groups."""
    return GRPO(
        "MlpPolicy", gym.make("CartPole-v1"), group_size=1, value_head=True, n_steps=256, n_epochs=4, seed=0, **settings
    )


def trained(model, iterations, tmp_path):
    """The columns of progress.csv after so many iterations, as arrays."""
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(256 * iterations)
    model.logger.dump(model.num_timesteps)
    model.logger.close()
    table = np.genfromtxt(tmp_path / "progress.csv", delimiter=",", names=True)
    return {name: table[name][np.isfinite(table[name])] for name in table.dtype.names}


@pytest.mark.parametrize("start", [1e-4, 5e-2])
def test_step_size_finds_the_target_from_both_sides(start, tmp_path):
    model = cartpole(learning_rate=start, trust_region="learning_rate", target_kl=0.002)
    log = trained(model, 14, tmp_path)
    first, last = np.median(log["trainkl"][:4]), np.median(log["trainkl"][-4:])
    assert first < 0.0005 if start == 1e-4 else first > 0.02  # a factor of 4 or more away on either side
    assert 0.0005 < last < 0.008
    expected = [1.0]  # the logged scales follow the rule from the logged KLs
    for kl in log["trainkl"][:-1]:
        expected.append(next_scale(expected[-1], kl, 0.002, "learning_rate"))
    np.testing.assert_allclose(log["traintrust_region_scale"], expected)
    np.testing.assert_allclose(log["trainlearning_rate"], start * np.array(expected), rtol=1e-6)


def test_clip_range_is_multiplied_by_the_scale(tmp_path):
    log = trained(cartpole(clip_range=0.2, trust_region="clip_range", target_kl=1e-5), 4, tmp_path)
    assert (log["trainkl"] > 2e-5).all()  # so each iteration narrows the range, down to a quarter
    np.testing.assert_allclose(log["trainclip_range"], 0.2 * np.array([1, 1 / 1.5, 1 / 2.25, 1 / 3.375]), rtol=1e-6)
    assert log["trainlearning_rate"] == pytest.approx(3e-4)


def test_epochs_are_not_stopped_but_steered():
    stopped, steered = cartpole(target_kl=1e-9), cartpole(target_kl=1e-9, trust_region="learning_rate")
    stopped.learn(256)
    steered.learn(256)
    assert stopped._n_updates == 1
    assert steered._n_updates == 4


def test_scale_is_saved_and_a_new_learning_rate_resets_it(tmp_path):
    model = cartpole(learning_rate=1e-5, trust_region="learning_rate")
    model.learn(512)
    assert model.kl_scale == pytest.approx(1.5**2)  # two iterations below half of the default target, 0.01
    model.save(tmp_path / "model")
    assert GRPO.load(tmp_path / "model").kl_scale == pytest.approx(1.5**2)
    assert GRPO.load(tmp_path / "model", learning_rate=3e-4).kl_scale == 1.0
    assert GRPO.load(tmp_path / "model", clip_range=0.1).kl_scale == pytest.approx(1.5**2)  # is not what is steered


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="trust_region='clip': valid: None, learning_rate, clip_range"):
        cartpole(trust_region="clip")
    with pytest.raises(ConfigError, match="target_kl=0: a trust region needs a KL above 0"):
        cartpole(trust_region="clip_range", target_kl=0)
