"""The gridworld: its rules by hand, and forks that are exact bit for bit."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from grpo_rl import make_group_env, probe_fork
from grpo_rl.forks.snapshot import CUSTOM
from grpo_rl.lab.build import build_agent, build_env, make_env
from grpo_rl.recipes import load_object, load_recipe, shipped

Gridworld = load_object(f"{shipped() / 'envs' / 'gridworld.py'}:Gridworld")
UP, RIGHT, DOWN, LEFT = range(4)
ROOM = ("#####", "#Sox#", "#..G#", "#####")


def play(env, *actions):
    """(reward, terminated) of each action."""
    return [(round(step[1], 6), step[2]) for step in (env.step(action) for action in actions)]


def room(**kwargs):
    env = Gridworld(slip=0.0, rows=ROOM, **kwargs)
    env.reset(seed=0)
    return env


def test_rules_by_hand():
    # Up is a wall: the agent stays, and pays 0.01. Right is the coin, 1 − 0.01, once. Down, right: the goal, 1 − 0.01.
    env = room()
    assert play(env, UP, RIGHT, LEFT, RIGHT, DOWN, RIGHT) == [
        (-0.01, False),
        (0.99, False),
        (-0.01, False),
        (-0.01, False),
        (-0.01, False),
        (0.99, True),
    ]
    assert play(room(), RIGHT, RIGHT) == [(0.99, False), (-1.01, True)], "the pit"
    assert play(room(max_steps=2), UP, UP) == [(-0.01, False), (-0.01, True)], "the time is over, and was seen coming"


def test_observation_by_hand():
    # 4 × 5 cells. The agent is at row 1, column 1: number 6. The coin is at row 1, column 2: number 20 + 7.
    obs, _ = room(max_steps=4).reset(seed=0)
    assert np.flatnonzero(obs).tolist() == [6, 27, 40]
    env = room(max_steps=4)
    obs = env.step(RIGHT)[0]
    assert np.flatnonzero(obs).tolist() == [7, 40], "the coin is taken"
    assert obs[-1] == 0.75


@pytest.mark.parametrize("slip", [0.0, 0.3])
def test_gymnasium_and_sb3_accept_it(slip):
    check_env(Gridworld(slip=slip, render_mode="rgb_array"), skip_render_check=False)
    sb3_check_env(Gridworld(slip=slip))


def test_slips_go_in_every_direction():
    env = Gridworld(slip=1.0, rows=("#######", "#.....#", "#..S..#", "#.....#", "#######"))
    ends = set()
    for seed in range(40):
        env.reset(seed=seed)
        env.step(UP)
        ends.add(env.state.position)
    assert ends == {(1, 3), (3, 3), (2, 2), (2, 4)}


@pytest.mark.parametrize("slip", [0.0, 0.3])
def test_its_forks_are_exact(slip):
    report = probe_fork(Gridworld, steps=400, slip=slip, max_steps=30)
    assert report.exact, report.reason
    assert report.how == CUSTOM
    assert report.steps == 400
    assert probe_fork(lambda: gym.wrappers.TimeLimit(Gridworld(), 25)).exact, "wrappers move with it"


def test_the_probe_finds_a_counter_that_was_forgotten():
    class Forgetful(Gridworld):
        def get_snapshot(self):
            return self.state._replace(steps=0)

    report = probe_fork(Forgetful, max_steps=30)
    assert not report.exact
    assert "observation" in report.reason


def test_a_fork_in_mid_episode_is_a_group():
    env = make_group_env(Gridworld, n_groups=1, group_size=4, seed=1, slip=0.5)
    env.reset()
    for _ in range(5):
        env.step(np.array([RIGHT, DOWN, LEFT, UP]))
    obs = env.fork([2, 2, 2, 2])
    assert (obs == obs[2]).all()
    for _ in range(3):  # the same actions, the same slips: the generators were copied too
        obs, rewards, _, _ = env.step(np.array([DOWN] * 4))
        assert (obs == obs[0]).all()
        assert len(set(rewards.tolist())) == 1


def test_the_recipe_trains_on_exact_groups():
    recipe = load_recipe("gridworld", ["optimization.n_epochs=2", "optimization.n_steps=16"])
    agent = build_agent(recipe, build_env(recipe)).learn(600)
    assert agent.groups.means == "fork"
    assert agent.num_timesteps >= 600
    assert agent._sampler.forks > 0


def test_it_draws_itself():
    env = make_env(load_recipe("gridworld").environment, render_mode="rgb_array")
    env.reset(seed=0)
    image = env.render()
    assert image.shape == (140, 180, 3)
    assert image.dtype == np.uint8
