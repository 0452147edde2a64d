"""Measures which environments fork exactly and at what cost, and writes the tables of docs/forking.md.

    python docs/make_forking_table.py            measures what runs here, then writes the tables
    .venv-robots/bin/python docs/make_forking_table.py    the same for what needs an older MuJoCo (make test-robots)

Each environment is probed: two fresh instances, a fork every 25 steps, across ends of episodes, 200 steps compared bit
for bit. The findings, with costs, versions and machine, are in docs/forking.json; the tables are made from it.
tests/forks/test_families.py proves the findings anew; tests/test_docs.py fails where the page differs from them.
"""

import platform
import re
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import wrappers
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.monitor import Monitor

from grpo_rl import probe_fork
from grpo_rl.forks.snapshot import fork_support, prepare, transfer
from grpo_rl.lab.pages import Page

GYMNASIUM = {"classic_control": "classic control", "toy_text": "toy text", "mujoco": "MuJoCo", "box2d": "Box2D"}
MINIGRID = ("MiniGrid-DoorKey-8x8-v0", "MiniGrid-Dynamic-Obstacles-8x8-v0", "BabyAI-GoToRedBall-v0", "BabyAI-BossLevel-v0")
OTHERS = {
    "MiniGrid": ("minigrid", MINIGRID),
    "Atari": ("ale_py", ("ALE/Breakout-v5", "ALE/Pong-v5", "ALE/MontezumaRevenge-v5")),
    "robotics": ("gymnasium_robotics", ("PointMaze_UMaze-v3", "AntMaze_UMaze-v5", "AdroitHandDoor-v1")),
    "robotics, older MuJoCo": (
        "gymnasium_robotics",
        ("FetchReach-v4", "FetchPickAndPlace-v4", "HandReach-v3", "HandManipulateBlock-v1", "FrankaKitchen-v1"),
    ),
    "dm_control, older MuJoCo": (
        "shimmy",
        (
            *("dm_control/walker-run-v0", "dm_control/humanoid-stand-v0", "dm_control/manipulator-bring_ball-v0"),
            *("dm_control/reach_site_features-v0",),  # of dm_control's composer, not of its suite
        ),
    ),
}
OLDER = "older MuJoCo"  # families with this in their name are measured with constraints-robots.txt
PACKAGES = ("gymnasium", "mujoco", "minigrid", "ale-py", "gymnasium-robotics", "dm-control", "shimmy", "Box2D")

# One or two environments of each family, for the matrix.
MATRIX = {
    "classic control": ("CartPole-v1", "Pendulum-v1"),
    "toy text": ("Taxi-v4", "Blackjack-v1"),
    "MuJoCo": ("Hopper-v5", "Ant-v5"),
    "Box2D": ("LunarLander-v3", "BipedalWalker-v3", "CarRacing-v3"),
    "MiniGrid": ("MiniGrid-DoorKey-8x8-v0", "BabyAI-GoToRedBall-v0"),
    "Atari": ("ALE/Breakout-v5", "ALE/Pong-v5"),
    "robotics": ("PointMaze_UMaze-v3", "AdroitHandDoor-v1"),
    "robotics, older MuJoCo": ("FetchPickAndPlace-v4", "HandReach-v3", "FrankaKitchen-v1"),
    "dm_control, older MuJoCo": ("dm_control/walker-run-v0", "dm_control/manipulator-bring_ball-v0"),
}


# ------------------------------------------------------------------------------------------------------ stacks of wrappers


def monitored(env_id: str) -> gym.Env:
    return Monitor(wrappers.TimeLimit(gym.make(env_id), 60))


def statistics(env_id: str) -> gym.Env:
    """Sticky actions, flat observations, running statistics, a stack of frames."""
    env = gym.make(env_id)
    if env_id in MINIGRID:
        env = import_module("minigrid.wrappers").ImgObsWrapper(env)
    env = wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.FlattenObservation(env)))
    if not env_id.startswith("dm_control"):  # its generator is an old RandomState, which StickyAction cannot use
        env = wrappers.StickyAction(env, 0.25)
    env = wrappers.FrameStackObservation(env, 3)
    return wrappers.RecordEpisodeStatistics(wrappers.TimeLimit(env, 80))


def preprocessed(env_id: str) -> gym.Env:
    env = wrappers.AtariPreprocessing(gym.make(env_id, frameskip=1), terminal_on_life_loss=True)
    return Monitor(wrappers.FrameStackObservation(env, 4))


def sb3_atari(env_id: str) -> gym.Env:
    return Monitor(AtariWrapper(gym.make(env_id, frameskip=1), action_repeat_probability=0.25))


STACKS: dict[str, Callable[[str], gym.Env]] = {
    "bare": lambda env_id: gym.make(env_id).unwrapped,
    "TimeLimit, Monitor": monitored,
    "StickyAction, Flatten, NormalizeObservation and -Reward, FrameStack, RecordEpisodeStatistics": statistics,
    "AtariPreprocessing, FrameStack": preprocessed,
    "SB3's AtariWrapper": sb3_atari,
}


def cells() -> list[tuple[str, str, str]]:
    """(family, environment, stack): all of the matrix; the stacks of Atari for Atari alone, which has no use for statistics."""
    of_atari = ("AtariPreprocessing, FrameStack", "SB3's AtariWrapper")
    return [
        (family, env_id, stack)
        for family, ids in MATRIX.items()
        for env_id in ids
        for stack in STACKS
        if stack in ("bare", "TimeLimit, Monitor") or (stack in of_atari) == (family == "Atari")
    ]


# ------------------------------------------------------------------------------------------------------------ environments


def newest_ids() -> dict[str, list[str]]:
    """Ids by family, sorted: of each name the highest version that Gymnasium itself registers, then those of others."""
    newest: dict[str, gym.envs.registration.EnvSpec] = {}
    for spec in gym.registry.values():
        family = re.match(r"gymnasium\.envs\.(\w+)", str(spec.entry_point))
        if family and family[1] in GYMNASIUM and spec.namespace is None:
            known = newest.get(spec.name)
            if known is None or (spec.version or 0) > (known.version or 0):
                newest[spec.name] = spec
    found: dict[str, list[str]] = {name: [] for name in GYMNASIUM.values()}
    for spec in newest.values():
        found[GYMNASIUM[str(spec.entry_point).split(".")[2]]].append(spec.id)
    return {family: sorted(ids) for family, ids in found.items()} | {name: list(ids) for name, (_, ids) in OTHERS.items()}


def why_not_here(family: str) -> str:
    """Why environments of a family cannot run with the installed versions; "" if they can."""
    if family == "Box2D":
        return "" if installed("Box2D") else "Box2D is not installed"
    if family in OTHERS:
        try:
            module = import_module(OTHERS[family][0])
        except ImportError as error:
            return str(error)
        gym.register_envs(module)
    mujoco = tuple(map(int, installed("mujoco").split(".")[:2]))
    if OLDER in family and mujoco >= (3, 17):
        return f"needs the versions of constraints-robots.txt, here is mujoco {installed('mujoco')}"
    if OLDER in family and "dm_control" in family and not installed("dm-control"):
        return "dm-control is not installed"
    return ""


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# ---------------------------------------------------------------------------------------------------------------- measuring


def costs(env_id: str, age: int = 60) -> dict[str, float]:
    """Median time of a fork in µs, `age` steps after a reset; for a replay that of the start, and what a step adds."""
    source, target = gym.make(env_id), gym.make(env_id)
    prepare(source)
    for seed in range(50):
        source.reset(seed=seed)
        source.action_space.seed(seed)
        start = median_us(source, target)
        played = 0
        while played < age and not any(source.step(source.action_space.sample())[2:4]):
            played += 1
        if played == age:
            break
    later, grows = median_us(source, target), fork_support(source).grows
    source.close()
    target.close()
    return {"cost_us": start, "cost_us_per_step": (later - start) / max(played, 1)} if grows else {"cost_us": later}


def median_us(source: gym.Env, target: gym.Env) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        transfer(source, target)
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times))


def measure(env_id: str) -> dict[str, Any]:
    report = probe_fork(env_id)
    row: dict[str, Any] = {"exact": report.exact, "how": report.how, "reason": "" if report.exact else report.reason}
    return row | costs(env_id) if report.exact else row


def machine() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    return f"{model[1] if model else platform.processor()}, one thread, Python {platform.python_version()}"


def measure_all() -> None:
    """Measures the families that run here, and leaves what was found of the others."""
    found = PAGE.read() if PAGE.findings.exists() else {"environments": {}, "matrix": {}}
    versions = {name: installed(name) for name in PACKAGES if installed(name)}
    older = tuple(map(int, versions["mujoco"].split(".")[:2])) < (3, 17)
    for family, ids in newest_ids().items():
        if (OLDER in family) != older or why_not_here(family):
            continue
        found["environments"][family] = {env_id: measure(env_id) for env_id in ids}
        print(family, flush=True)
    for family, env_id, stack in cells():
        if (OLDER in family) == older and not why_not_here(family):
            report = probe_fork(lambda env_id=env_id, stack=stack: STACKS[stack](env_id))
            found["matrix"].setdefault(env_id, {})[stack] = "" if report.exact else report.reason
            print(env_id, stack, found["matrix"][env_id][stack], flush=True)
    found["machine"] = machine()
    found.setdefault("versions", {})["older" if older else "newest"] = versions
    PAGE.keep(found)


# ----------------------------------------------------------------------------------------------------------------- the page


def cost(row: dict[str, Any]) -> str:
    """0.07 ms, or for a replay: 0.3 ms + 0.03 ms a step."""
    if "cost_us" not in row:
        return "–"
    text = f"{row['cost_us'] / 1000:.2g} ms"
    return text + (f" + {row['cost_us_per_step'] / 1000:.2g} ms a step" if "cost_us_per_step" in row else "")


def environments(found: dict[str, Any]) -> str:
    lines = ["| family | environment | exact forks | copied by | cost of a fork |", "|---|---|---|---|---|"]
    for family, rows in sorted(found["environments"].items(), key=lambda item: list(newest_ids()).index(item[0])):
        for env_id, row in rows.items():
            exact = "yes" if row["exact"] else f"no: {row['reason']}"
            lines.append(f"| {family} | {env_id} | {exact} | {row['how'] or '–'} | {cost(row)} |")
    return "\n".join(lines)


def matrix(found: dict[str, Any]) -> str:
    lines = ["| environment | " + " | ".join(STACKS) + " |", "|---" * (len(STACKS) + 1) + "|"]
    cells = found["matrix"]
    for env_id in [env_id for ids in MATRIX.values() for env_id in ids if env_id in cells]:
        row = [("exact" if not cells[env_id][stack] else "no") if stack in cells[env_id] else "–" for stack in STACKS]
        lines.append(f"| {env_id} | " + " | ".join(row) + " |")
    return "\n".join(lines)


PAGE = Page(
    Path(__file__).with_name("forking.md"),
    Path(__file__).with_name("forking.json"),
    {"environments": environments, "matrix": matrix},
)
table, written, findings = PAGE.table, PAGE.written, PAGE.read

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--tables-only" not in sys.argv:
        measure_all()
    PAGE.write()
