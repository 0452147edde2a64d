"""The matrix of docs/forking.md: family × wrappers × 200 steps after a fork, bit-equal; and what is special in each.

Environments that need an older MuJoCo are skipped here, with the reason; `make test-robots` runs them.
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from courses import STEPS, bits, check_exact, scrambled, trace

from grpo_rl.errors import ForkError
from grpo_rl.forks import mujoco_state
from grpo_rl.forks.probe import probe_fork
from grpo_rl.forks.snapshot import (
    ALE,
    MUJOCO,
    REPLAY,
    capture,
    fork_support,
    fresh_rng,
    prepare,
    restore,
    transfer,
)

DOCS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_forking_table.py"))
FOUND = DOCS["findings"]()
pytestmark = pytest.mark.filterwarnings("ignore")


def need(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reason := DOCS["why_not_here"](family):
            pytest.skip(reason)


@pytest.mark.parametrize(("family", "env_id", "stack"), DOCS["cells"]())
def test_the_matrix(family: str, env_id: str, stack: str) -> None:
    need(family)
    assert FOUND["matrix"][env_id][stack] == "", "the page says that it is not exact"
    original, by_transfer, by_restore = (DOCS["STACKS"][stack](env_id) for _ in range(3))
    slow = 5 if "CarRacing" in env_id else 1  # it draws its observations
    prepare(original)
    original.reset(seed=0)
    trace(original, seed=0, steps=50 // slow)
    course = check_exact(original, scrambled(by_transfer), scrambled(by_restore), STEPS // slow, lasting=True)
    assert len(course) >= STEPS // slow
    for env in (original, by_transfer, by_restore):
        env.close()


@pytest.mark.parametrize(
    ("family", "env_id", "row"),
    [
        (family, env_id, row)
        for family, rows in FOUND["environments"].items()
        for env_id, row in rows.items()
        if env_id not in FOUND["matrix"]
    ],
)
def test_the_table(family: str, env_id: str, row: dict[str, Any]) -> None:
    need(family)
    report = probe_fork(env_id, steps=60)
    assert (report.exact, report.how) == (row["exact"], row["how"])
    assert row["exact"] or report.reason == row["reason"]


def test_the_table_names_what_is_measured() -> None:
    assert {family: list(rows) for family, rows in FOUND["environments"].items()} == DOCS["newest_ids"]()
    cells = [(env_id, stack) for _, env_id, stack in DOCS["cells"]()]
    assert sorted((env_id, stack) for env_id, row in FOUND["matrix"].items() for stack in row) == sorted(cells)


# ------------------------------------------------------------------------------------------------------ Box2D by replay


def lander(**kwargs: Any) -> gym.Env:
    need("Box2D")
    return gym.make("LunarLander-v3", **kwargs)


def test_box2d_is_forked_from_its_next_reset_on() -> None:
    source, target = lander(), lander()
    source.reset(seed=0)
    support = fork_support(source)
    assert (support.exact, support.how, support.grows) == (True, REPLAY, True)
    with pytest.raises(ForkError, match=r"LunarLander .* fork from its next reset on"):
        capture(source)
    source.step(0)
    with pytest.raises(ForkError, match="next reset"):
        transfer(source, target)
    source.reset(seed=1)
    trace(source, seed=1, steps=10)
    transfer(source, target)
    assert trace(target, seed=2) == trace(source, seed=2)


def test_a_fork_of_a_replay_can_be_forked() -> None:
    first, second, third = (lander(enable_wind=True) for _ in range(3))
    prepare(first)
    first.reset(seed=0)
    trace(first, seed=0, steps=20)
    transfer(first, second)
    trace(second, seed=1, steps=10)
    transfer(second, third)
    assert trace(third, seed=2) == trace(second, seed=2)


def test_a_replay_knows_numbers_that_others_drew() -> None:
    """StickyAction draws from the env's generator between two steps, and LunarLander in each of them."""
    envs = [gym.wrappers.StickyAction(lander(), 0.5) for _ in range(3)]
    prepare(envs[0])
    envs[0].reset(seed=0)
    trace(envs[0], seed=0, steps=30)
    fresh_rng(envs[0], 5)
    trace(envs[0], seed=3, steps=10)
    check_exact(envs[0], *map(scrambled, envs[1:]))


def test_a_replay_that_cannot_be_exact_is_refused() -> None:
    source, target = lander(), lander()
    prepare(source)
    source.reset(seed=0)
    trace(source, seed=0, steps=5)
    source.unwrapped.prev_shaping += 1.0  # nobody may do that
    with pytest.raises(ForkError, match="a replay of LunarLander gave prev_shaping="):
        transfer(source, target)


def test_settings_that_a_curriculum_sets_before_a_reset_are_replayed() -> None:
    source, target = lander(enable_wind=True), lander(enable_wind=True)
    prepare(source)
    source.reset(seed=0)
    source.unwrapped.wind_power = 3.0
    source.reset(seed=1)
    trace(source, seed=1, steps=20)
    transfer(source, target)
    assert target.unwrapped.wind_power == 3.0
    assert trace(target, seed=2) == trace(source, seed=2)


def test_a_recorded_walker_starts_each_episode_in_a_new_world() -> None:
    """BipedalWalker's own keeps traces of earlier episodes: after the same seed it starts differently."""
    need("Box2D")
    fresh, used, recorded = (gym.make("BipedalWalker-v3") for _ in range(3))
    prepare(recorded)
    actions = np.random.default_rng(0).uniform(-1, 1, (60, 4)).astype(np.float32)
    for env in (used, recorded):
        for seed in (3, 4):
            env.reset(seed=seed)
            for action in actions:
                env.step(action)
    courses = []
    for env in (fresh, used, recorded):
        env.reset(seed=5)
        courses.append([bits(env.step(action)[0]) for action in actions])
    assert courses[2] == courses[0] != courses[1]


# ---------------------------------------------------------------------------------------------------------------- Atari


@pytest.mark.parametrize("sticky", [0.0, 0.25, 0.9])
def test_the_sticky_action_of_ale_is_forked(sticky: float) -> None:
    """Without it one fork in four would go wrong at the first frame, at p = 0.25; here are 30."""
    need("Atari")
    source, target, wrong = (
        gym.make("ALE/Pong-v5", repeat_action_probability=sticky, frameskip=1, obs_type="ram") for _ in range(3)
    )
    prepare(source)
    source.reset(seed=0)
    trace(source, seed=0, steps=60)
    assert fork_support(source).how == ALE
    differ = 0
    for seed in range(30):
        trace(source, seed, steps=2)
        target.reset()
        transfer(source, target)
        restore(wrong, capture(source))
        state, (action, strength) = capture(source).layers[-1].native
        wrong.unwrapped.ale.write(state, (3 if action != 3 else 4, strength))  # right or left is stuck instead
        expected = trace(source, seed, steps=3)
        assert trace(target, seed, steps=3) == expected
        differ += trace(wrong, seed, steps=3) != expected
    assert differ > 0 if sticky else differ == 0


def test_ale_is_forked_from_its_next_reset_on_if_the_action_is_not_known() -> None:
    need("Atari")
    env = gym.make("ALE/Pong-v5")
    env.reset(seed=0)
    env.step(2)
    with pytest.raises(ForkError, match="not known amid this episode: fork from its next reset on"):
        capture(env)
    env.reset()
    env.step(0)
    capture(env)
    env.unwrapped.ale._ale.act(3)  # behind its back
    with pytest.raises(ForkError, match="not known"):
        capture(env)


def test_fresh_rng_parts_the_sticky_actions_of_siblings() -> None:
    need("Atari")
    source, target = (gym.make("ALE/Pong-v5", obs_type="ram") for _ in range(2))
    prepare(source)
    source.reset(seed=0)
    trace(source, seed=0, steps=5)
    transfer(source, target)
    ram = source.unwrapped.ale.getRAM()
    fresh_rng(target, 1)
    np.testing.assert_array_equal(target.unwrapped.ale.getRAM(), ram)  # no reset
    courses = []
    for env in (source, target):
        courses.append([bits(env.step(2 + step % 2)[0]) for step in range(30)])
    assert courses[0] != courses[1]


# ------------------------------------------------------------------------------------------------------------ robotics


@pytest.mark.parametrize("env_id", ["PointMaze_UMaze-v3", "AntMaze_UMaze-v5"])
def test_the_env_inside_a_maze_is_a_layer_of_its_own(env_id: str) -> None:
    need("robotics")
    source, target = gym.make(env_id), gym.make(env_id)
    scrambled(source)
    target.reset(seed=0)
    inner = next(value for value in vars(target.unwrapped).values() if isinstance(value, gym.Env))
    transfer(source, target)
    assert any(value is inner for value in vars(target.unwrapped).values())
    assert fork_support(target).how == MUJOCO


def test_forks_work_without_mj_copydata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has it since MuJoCo 3.5; before, arrays are copied one by one."""
    import mujoco

    monkeypatch.delattr(mujoco, "mj_copyData")
    original, *others = (gym.make("Ant-v5") for _ in range(3))
    original.reset(seed=0)
    trace(original, seed=0, steps=30)
    check_exact(original, *map(scrambled, others))


def test_geometry_of_meshes_is_not_compared_at_each_fork() -> None:
    model = gym.make("Hopper-v5").unwrapped.model
    views = sum(view.size for view in mujoco_state._model_views(model))
    assert 0 < views < model.body_mass.size * 1000


def test_tasks_that_compile_their_model_anew_are_refused() -> None:
    need("dm_control, older MuJoCo")
    support = fork_support(gym.make("dm_control/reach_site_features-v0"))
    assert not support.exact
    assert "not an env of dm_control's suite" in support.reason
