"""The reaching arm: its rules by hand, a dial that changes the dynamics, and groups with one difficulty."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from grpo_rl import make_group_env, probe_fork
from grpo_rl.curriculum import Curriculum, CurriculumDriver, LinearSchedule, make_env
from grpo_rl.forks.snapshot import CUSTOM
from grpo_rl.lab import build
from grpo_rl.lab.film import offscreen_backends
from grpo_rl.recipes import load_object, load_recipe, shipped

Reach = load_object(f"{shipped() / 'envs' / 'reach.py'}:Reach")
STILL = np.zeros(2, np.float32)


def placed(env, qpos, qvel=(0.0, 0.0), target=None):
    """`env` after a reset, with this state and target."""
    env.reset(seed=0)
    env.unwrapped.set_state(np.array(qpos, float), np.array(qvel, float))
    if target is not None:
        env.unwrapped.data.mocap_pos[0, :2] = target
    return env


def velocities(difficulty, actions):
    """Joint velocities (T, 2) in rad/s from one state, under `actions`."""
    env = placed(Reach(difficulty), (0.4, 0.9), (1.0, -2.0))
    return np.array([env.step(action)[0][4:6] for action in actions])


# ---------------------------------------------------------------------------------------------------------------- rules


def test_gymnasium_and_sb3_accept_it():
    check_env(Reach(), skip_render_check=True)
    sb3_check_env(Reach())


def test_a_step_by_hand():
    # Stretched along x the hand is at 0.45 + 0.45 = 0.9. On the level table, at rest, nothing moves: the target at
    # (0.9, 0.3) stays 0.3 away, and torques of (0, 0) cost nothing.
    env = placed(Reach(difficulty=0.0), (0.0, 0.0), target=(0.9, 0.3))
    obs, reward, terminated, truncated, info = env.step(STILL)
    assert obs == pytest.approx([1, 1, 0, 0, 0, 0, 0.9, 0.3, 0, 0.3])
    assert (reward, terminated, truncated, info) == (
        pytest.approx(-0.3),
        False,
        False,
        {"distance": pytest.approx(0.3)},
    )
    # Full torque costs 0.02 · (1 + 1) / 2.
    _, reward, *_, info = placed(env, (0.0, 0.0), target=(0.9, 0.3)).step(np.ones(2, np.float32))
    assert reward == pytest.approx(-info["distance"] - 0.02)


def test_success_is_to_be_there_and_slow():
    env = placed(Reach(difficulty=0.0), (0.0, 0.0), target=(0.9, 0.05))
    _, reward, terminated, truncated, info = env.step(STILL)
    assert (terminated, truncated, info["is_success"]) == (True, False, True)
    assert reward == pytest.approx(5 - 0.05)
    # At 3 rad/s the hand passes the target at about 0.9 · 3 = 2.7 m/s.
    _, reward, terminated, _, info = placed(env, (-0.1, 0.0), (3.0, 0.0), target=(0.9, 0.0)).step(STILL)
    assert info["distance"] < 0.06 and not terminated and reward < 0
    assert "is_success" not in info


def test_the_time_is_limited():
    env = placed(Reach(difficulty=0.0, max_steps=2), (0.0, 0.0), target=(0.0, 0.8))
    assert env.step(STILL)[2:4] == (False, False)
    _, _, terminated, truncated, info = env.step(STILL)
    assert (terminated, truncated, info["is_success"]) == (False, True, False)


@pytest.mark.parametrize(("difficulty", "farthest"), [(0.0, 0.15), (0.5, 0.525), (1.0, 0.9)])
def test_targets_are_as_far_as_the_dial_says(difficulty, farthest):
    env = Reach(difficulty)  # 0.15 + difficulty · (0.9 − 0.15)
    distances = [np.hypot(*env.reset(seed=seed)[0][8:]) for seed in range(200)]
    assert min(distances) > 0.06
    assert 0.9 * farthest < max(distances) <= farthest


def test_a_difficulty_beyond_the_dial_is_refused():
    with pytest.raises(ValueError, match=r"0 … 1, got 1\.1"):
        Reach(difficulty=1.1)


@pytest.mark.skipif(not offscreen_backends(), reason="no GL to render with")
def test_it_draws_itself(tmp_path):
    # MuJoCo takes its GL from the environment when it is first imported, so a process of its own draws.
    code = f"""
import numpy
from grpo_rl.recipes import load_object
env = load_object({str(shipped() / "envs" / "reach.py:Reach")!r})(render_mode="rgb_array")
env.reset(seed=0)
numpy.save({str(tmp_path / "image.npy")!r}, env.render())
env.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"MUJOCO_GL": offscreen_backends()[0]})
    image = np.load(tmp_path / "image.npy")
    assert (image.shape, image.dtype) == ((480, 480, 3), np.uint8)
    assert image.std() > 10, "not one color"


# ------------------------------------------------------------------------------------------------------------- dynamics


@pytest.mark.parametrize(
    ("difficulty", "tilt", "payload"),
    [(0.0, 0.0, 0.1), (0.5, 25.0, 0.35), (1.0, 50.0, 0.6)],
    ids=["easy", "half", "full"],
)
def test_torques_that_hold_the_stretched_arm_by_hand(difficulty, tilt, payload):
    # Masses 0.5 and 0.4 kg in the middle of links of 0.45 m, the payload at the end, gravity along the tilted table.
    gravity = 9.81 * np.sin(np.deg2rad(tilt))
    shoulder = gravity * (0.5 * 0.225 + 0.4 * 0.675 + payload * 0.9)
    elbow = gravity * (0.4 * 0.225 + payload * 0.45)
    env = placed(Reach(difficulty), (0.0, 0.0))
    assert env.data.qfrc_bias == pytest.approx([shoulder, elbow])  # at 1: 6.93 and 2.71 Nm, of 8 and 4 that it has
    assert env.data.qfrc_bias[0] < 8 and env.data.qfrc_bias[1] < 4, "the motors can hold it"


def test_dynamics_differ_measurably_by_difficulty():
    # One state, the same ten actions (0.4 s): how far joint velocities are from those at difficulty 0, in rad/s.
    actions = np.random.default_rng(0).uniform(-1, 1, (10, 2)).astype(np.float32)
    easy = velocities(0.0, actions)
    gaps = [np.sqrt(np.mean((velocities(d, actions) - easy) ** 2)) for d in (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)]
    assert gaps == sorted(gaps)
    assert gaps == pytest.approx([0.022, 0.214, 0.518, 0.997, 1.441, 1.855], rel=0.05)
    assert gaps[-1] > 0.5 * np.sqrt(np.mean(easy**2)), "more than half of the velocities themselves"


def test_bearings_lose_their_damping():
    # On a level table the energy of a spinning arm is lost to the bearings alone; the dial sets tilt and payload too,
    # so they are put back here to see the damping by itself.
    left = []
    for difficulty in (0.0, 0.5, 1.0):
        env = placed(Reach(difficulty), (0.0, 1.0), (3.0, 0.0))
        env.model.opt.gravity[:] = 0
        for _ in range(10):
            obs = env.step(STILL)[0]
        left.append(np.linalg.norm(obs[4:6]))
    assert left == sorted(left)
    assert left[2] > 2 * left[0]


def test_setting_the_dial_twice_or_back_is_setting_it_once():
    def model(env):
        arrays = ("body_mass", "body_inertia", "dof_damping", "dof_M0", "body_subtreemass", "dof_invweight0")
        return [getattr(env.model, name).tobytes() for name in arrays] + [env.model.opt.gravity.tobytes()]

    env, fresh = Reach(difficulty=0.3), Reach(difficulty=0.3)
    env.difficulty = 1.0
    assert model(env) != model(fresh)
    env.difficulty = 0.3
    env.difficulty = 0.3
    assert model(env) == model(fresh)


# ---------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("difficulty", [0.0, 1.0])
def test_its_forks_are_exact(difficulty):
    report = probe_fork(Reach, steps=300, difficulty=difficulty, max_steps=30)
    assert report.exact, report.reason
    assert (report.how, report.steps) == (CUSTOM, 300)


def test_its_forks_are_exact_within_a_curriculum_that_moves():
    report = probe_fork(lambda: Curriculum(Reach(max_steps=30), LinearSchedule(0, 1, 300)), steps=300)
    assert report.exact, report.reason


def test_a_group_has_one_difficulty_and_the_same_dynamics_bit_for_bit():
    env = make_group_env(lambda: make_env(Reach, LinearSchedule(0, 1, 100)), n_groups=1, group_size=4, seed=0)
    driver = CurriculumDriver.of(env)
    env.reset()
    for column, steps in enumerate((0, 30, 60, 90)):  # columns of four difficulties
        driver.before_rollout(steps)
        env.envs[column].reset(seed=column)
    assert env.get_attr("difficulty") == [0.0, 0.3, 0.6, 0.9]
    for _ in range(3):
        env.step(np.array([[0.5, -0.5]] * 4))
    for root in (2, 0):
        obs = env.fork([root] * 4)
        assert (obs == obs[root]).all()
        difficulty = env.get_attr("difficulty")
        assert difficulty == [[0.0, 0.3, 0.6, 0.9][root] if root == 2 else 0.6] * 4
        assert len({env.envs[column].unwrapped.model.body_mass.tobytes() for column in range(4)}) == 1
        for action in np.random.default_rng(0).uniform(-1, 1, (20, 2)):
            obs, rewards, _, infos = env.step(np.array([action] * 4))
            assert (obs == obs[0]).all()
            assert len(set(rewards.tolist())) == 1
            assert [info["difficulty"] for info in infos] == difficulty


# --------------------------------------------------------------------------------------------------------------- recipe


def test_the_recipe_trains_with_its_curriculum_and_evaluates_at_the_full_difficulty():
    small = ["optimization.n_epochs=1", "optimization.n_steps=64", "environment.curriculum.difficulty.steps=2000"]
    recipe = load_recipe("reach", small)
    agent = build.build_agent(recipe, build.build_env(recipe)).learn(1500)
    assert agent.groups.means == "fork"
    # Rollouts of 64 · 8 = 512 steps: the third starts after 1,024 of 2,000.
    assert agent.curriculum.metrics()["curriculum/difficulty"] == 0.512
    assert build.make_env(recipe.environment).unwrapped.difficulty == 1.0
