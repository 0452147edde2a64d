"""Plain ids of known packages, and what is said about an env that cannot be made."""

import sys
from typing import Any

import gymnasium as gym
import pytest

from grpo_rl import registry
from grpo_rl.curriculum import make_env
from grpo_rl.errors import ConfigError
from grpo_rl.forks.probe import probe_fork
from grpo_rl.groups.make import make_group_env
from grpo_rl.groups.mujoco import make_vec
from grpo_rl.recipes import check_env_id

FAMILIES = [
    ("minigrid", "MiniGrid-Empty-5x5-v0"),
    ("ale_py", "ALE/Pong-v5"),
    ("gymnasium_robotics", "PointMaze_UMaze-v3"),
]


@pytest.mark.parametrize(("module", "env_id"), FAMILIES)
def test_ids_of_a_package_that_nobody_has_imported_are_found(
    module: str, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip(module)
    specs = {name: spec for name, spec in gym.registry.items() if module not in str(spec.entry_point)}
    spec = gym.registry.get(env_id)
    monkeypatch.setattr(gym.envs.registration, "registry", specs)
    monkeypatch.setattr(registry.gym, "registry", specs)

    def imported(name: str) -> Any:
        assert name == module
        specs[env_id] = spec
        return package

    monkeypatch.setattr(registry.importlib, "import_module", imported)
    check_env_id(env_id, "here")
    assert env_id in specs


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "registry", {})
    monkeypatch.setitem(sys.modules, "minigrid", None)
    for make in (check_env_id, lambda env_id, _: make_group_env(env_id), lambda env_id, _: probe_fork(env_id)):
        with pytest.raises(ConfigError, match=r"pip install 'grpo_rl\[minigrid\]'"):
            make("BabyAI-None-v0", "here")
    with pytest.raises(ConfigError, match=r'Gymnasium knows no "C:.runs".*is written "module:id"'):
        registry.find_env("C:\\runs")
    registry.find_env("module:Id-v0")


class Broken(gym.Env):
    def __init__(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("make", [make_group_env, probe_fork, make_vec, lambda env_id: make_env(env_id, 0.5)])
@pytest.mark.parametrize("prefix", ["", "json:"])
def test_a_constructor_that_fails_is_one_line(prefix: str, make: Any) -> None:
    gym.register("Broken-v0", Broken)
    try:
        with pytest.raises(ConfigError) as error:
            make(f"{prefix}Broken-v0")
    finally:
        del gym.registry["Broken-v0"]
    said = str(error.value)
    assert said == f"cannot make environment {prefix}Broken-v0: its constructor raised AssertionError without a message"


def test_robots_that_the_newest_mujoco_does_not_run_get_the_hint() -> None:
    gym.register("Arm-v0", "gymnasium_robotics.envs.none:Arm")
    try:
        assert "constraints-robots.txt" in str(registry.cannot_make("some:Arm-v0", AssertionError()))
        assert "constraints-robots.txt" not in str(registry.cannot_make("Arm-v0", TypeError("no such argument")))
    finally:
        del gym.registry["Arm-v0"]
