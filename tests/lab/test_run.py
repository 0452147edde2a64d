"""Evaluation and checkpoints: what a run measures, and that measuring changes nothing."""

import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch as th

from grpo_rl.errors import ConfigError
from grpo_rl.lab.build import build_agent, build_env, open_run
from grpo_rl.lab.plots import plot_runs, read_progress
from grpo_rl.lab.run import _changed_versions, evaluate, versions
from grpo_rl.recipes import make_recipe


class Fixed:
    """An agent that counts how many observations it saw in each call."""

    def __init__(self):
        self.batches = []

    def predict(self, observations, deterministic):
        self.batches.append(len(observations))
        return np.zeros(len(observations), dtype=int), None


def lengths_by_seed(lengths):
    """A factory of envs whose episode lasts `lengths[seed - 10]` steps and gives one point a step."""
    import gymnasium as gym

    class Timed(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.left = lengths[seed - 10]
            return np.zeros(1, dtype=np.float32), {}

        def step(self, action):
            self.left -= 1
            return np.zeros(1, dtype=np.float32), 1.0, self.left == 0, False, {}

    return Timed


def test_each_episode_counts_once_however_long():
    agent = Fixed()
    played = evaluate(agent, lengths_by_seed([3, 1, 2]), episodes=3, deterministic=True, seed=10)
    assert played.returns.tolist() == [3, 1, 2]
    assert played.lengths.tolist() == [3, 1, 2]
    # The second is over after one step, the third after two: nobody is asked for them again.
    assert agent.batches == [3, 2, 1]


def test_evaluation_leaves_the_random_numbers_of_training_alone():
    recipe = make_recipe({"environment": {"id": "CartPole-v1"}}, "test")
    env = build_env(recipe)
    agent = build_agent(recipe, env)
    before = th.get_rng_state()
    import gymnasium

    first = evaluate(agent, lambda: gymnasium.make("CartPole-v1"), 3, deterministic=False, seed=1)
    assert th.equal(th.get_rng_state(), before)
    again = evaluate(agent, lambda: gymnasium.make("CartPole-v1"), 3, deterministic=False, seed=1)
    assert first.returns.tolist() == again.returns.tolist(), "one seed, one result"
    other = evaluate(agent, lambda: gymnasium.make("CartPole-v1"), 3, deterministic=False, seed=2)
    assert first.returns.tolist() != other.returns.tolist()
    env.close()


def test_an_agent_that_draws_by_numpy_is_seeded_and_training_goes_on_undisturbed():
    """As language models do: the actions depend on the seed alone, and numpy's generator is afterwards where it was."""
    drawn = []

    class Drawing:
        def predict(self, obs, deterministic):
            drawn.append(np.random.randint(2**30))
            return np.zeros(len(obs), int), None

    np.random.seed(7)
    for seed in (10, 10, 11):
        evaluate(Drawing(), lengths_by_seed([1, 1]), episodes=1, deterministic=False, seed=seed)
    after = np.random.randint(2**30)
    assert drawn[0] == drawn[1] != drawn[2]
    np.random.seed(7)
    assert after == np.random.randint(2**30)


def test_observations_pass_through_the_normaliser():
    seen = []

    def normalize(obs):
        seen.append(obs.shape)
        return obs

    evaluate(Fixed(), lengths_by_seed([2, 2]), episodes=2, deterministic=True, seed=10, normalize=normalize)
    assert seen == [(2, 1), (2, 1)]


def test_a_folder_without_a_run_is_refused_with_its_neighbours(tmp_path):
    (tmp_path / "hopper-1").mkdir()
    (tmp_path / "hopper-1" / "recipe.yaml").write_text("environment: {id: CartPole-v1}")
    with pytest.raises(ConfigError, match="runs there: hopper-1"):
        open_run(tmp_path / "hopper-2")
    with pytest.raises(ConfigError, match="holds no saved agent"):
        open_run(tmp_path / "hopper-1")


def test_progress_skips_rows_without_an_episode(tmp_path):
    (tmp_path / "progress.csv").write_text(
        "time/total_timesteps,rollout/ep_rew_mean\n10,\n20,nan\n30,1.5\n40,2.5\n", encoding="utf-8"
    )
    steps, returns = read_progress(tmp_path)
    assert (steps.tolist(), returns.tolist()) == ([30, 40], [1.5, 2.5])
    plot_runs({"a": (steps, returns), "empty": (steps[:0], returns[:0])}, tmp_path / "x.png", {"a": {"mode": 3.0}})
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_the_curve_of_a_language_model_is_the_mean_over_its_rollouts(tmp_path):
    (tmp_path / "progress.csv").write_text(
        "time/total_timesteps,rollout/ep_rew_mean,reward\n10,0.9,0.1\n20,0.8,0.3\n30,0.7,\n", encoding="utf-8"
    )
    steps, rewards = read_progress(tmp_path)
    assert (steps.tolist(), rewards.tolist()) == ([10, 20], [0.1, 0.3]), "the last row is of an update alone"


def test_versions_name_what_the_numbers_depend_on():
    assert {"python", "grpo_rl", "torch", "stable_baselines3", "mujoco", "cpu", "cores"} <= versions().keys()


def test_packages_of_language_models_are_named_where_they_are_in_use(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "transformers", object())
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    found = versions("trl", "torch")
    assert found["transformers"] == version("transformers") and "peft" not in found
    assert list(found).count("torch") == 1 and "trl" in found


def test_a_version_that_was_not_written_down_is_no_change(monkeypatch):
    before = versions() | {"numpy": "1.0"}
    del before["torch"]  # as if an older grpo_rl had not known of it
    assert _changed_versions(before) == f"numpy was 1.0, is {np.__version__}"
    assert _changed_versions({}) == ""
