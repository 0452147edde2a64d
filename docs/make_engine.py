"""Measures the batched MuJoCo engine against bare physics, Gymnasium and EnvPool, and writes the tables of engine.md.

    python docs/make_engine.py                 measures, some minutes, then writes docs/engine.json and the tables
    python docs/make_engine.py --costs-only    measures forks and resets alone, half a minute, and keeps the rest
    python docs/make_engine.py --tables-only   writes the tables anew

All engines take turns, round by round, on the same cores, so that their ratios mean something on a busy machine too.
Bare physics is the upper bound: the same episodes, their actions and starts recorded before, played back by `mj_step`
alone in as many threads, without observations, rewards, or waiting for each other. EnvPool is measured where
`import envpool` works; it cannot fork, and brings a MuJoCo of its own.
"""

import platform
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from grpo_rl.groups.make import make_group_env
from grpo_rl.groups.mujoco import MujocoVecEnv
from grpo_rl.groups.threads import usable_cores
from grpo_rl.groups.vec_env import GroupVecEnv
from grpo_rl.lab.pages import Page
from grpo_rl.mujoco_log import quiet_build

TASKS = ("Hopper-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
NUMBERS = (1, 8, 32, 64)
ROUNDS, STEPS = 5, 1024  # env steps a round
COLUMNS, MOVED = 32, 28  # of forks: how many columns, and how many of them move
REPEATS = 50  # forks or resets a round
PPO_TASK, PPO_STEPS, PPO_ROUNDS = "HalfCheetah-v5", 8192, 2
PPO_RUNS = ((8, 64), (64, 64), (64, 1024))  # columns, minibatch
PACKAGES = ("grpo_rl", "gymnasium", "mujoco", "stable-baselines3", "numpy", "torch", "envpool")

Clock = tuple[float, float]  # seconds on the wall, seconds of all threads


def timed(work: Callable[[], None]) -> Clock:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return round(time.perf_counter() - wall, 5), round(time.process_time() - cpu, 5)


def one_by_one(env_id: str, n_envs: int) -> VecEnv:
    with quiet_build():
        return make_vec_env(env_id, n_envs, 0)


def random_actions(env: VecEnv) -> np.ndarray:
    """(16, N, A): what every engine plays, over and over."""
    space: Any = env.action_space
    rng = np.random.default_rng(0)
    return rng.uniform(space.low, space.high, (16, env.num_envs, *space.shape)).astype(np.float32)


def player(env: VecEnv, actions: np.ndarray) -> Callable[[int], None]:
    def play(steps: int) -> None:
        for step in range(steps):
            env.step(actions[step % 16])

    env.reset()
    return play


def bare(env_id: str, actions: np.ndarray, n_threads: int, steps: int) -> Callable[[int], None]:
    """Physics alone: the first `steps` of the env, over and over."""
    n_envs = actions.shape[1]
    env = MujocoVecEnv(env_id, n_envs, seed=0)
    env.reset()
    datas = env.get_attr("data")
    starts = {(0, column): (data.qpos.copy(), data.qvel.copy()) for column, data in enumerate(datas)}
    for step in range(steps - 1):
        for column in np.flatnonzero(env.step(actions[step % 16])[2]).tolist():
            starts[step + 1, column] = datas[column].qpos.copy(), datas[column].qvel.copy()
    model, frame_skip = env.get_attr("model")[0], env.get_attr("frame_skip")[0]

    def work(columns: range) -> None:
        for step in range(steps):
            for column in columns:
                data = datas[column]
                if (start := starts.get((step, column))) is not None:
                    mujoco.mj_resetData(model, data)
                    data.qpos[:], data.qvel[:] = start
                    mujoco.mj_forward(model, data)
                data.ctrl[:] = actions[step % 16, column]
                mujoco.mj_step(model, data, frame_skip)

    def play(steps: int) -> None:
        threads = [threading.Thread(target=work, args=(range(k, n_envs, n_threads),)) for k in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return play


def pooled(env_id: str, actions: np.ndarray, n_threads: int) -> Callable[[int], None] | None:
    try:
        import envpool
    except ImportError:
        return None
    env = envpool.make_gymnasium(env_id, num_envs=actions.shape[1], num_threads=n_threads, seed=0)
    env.reset()
    actions = actions.astype(env.action_space.dtype)

    def play(steps: int) -> None:
        for step in range(steps):
            env.step(actions[step % 16])

    return play


def measure(env_id: str, n_envs: int) -> dict[str, list[Clock]]:
    """Seconds of each engine for STEPS env steps, round by round."""
    n_threads, steps = min(usable_cores(), n_envs), STEPS // n_envs
    env = MujocoVecEnv(env_id, n_envs, seed=0, n_threads=n_threads)
    actions = random_actions(env)
    engines = {
        "bare mj_step": bare(env_id, actions, n_threads, steps),
        "grpo_rl": player(env, actions),
        "Gymnasium": player(one_by_one(env_id, n_envs), actions),
        "EnvPool": pooled(env_id, actions, n_threads),
    }
    found: dict[str, list[Clock]] = {name: [] for name, play in engines.items() if play is not None}
    for round_ in range(ROUNDS + 1):
        for name, play in engines.items():
            if play is not None:
                clock = timed(lambda play=play: play(steps))
                if round_:  # the first one warms up
                    found[name].append(clock)
    env.close()
    return found


def measure_ppo(n_envs: int, minibatch: int) -> dict[str, list[list[float]]]:
    """Seconds on the wall of SB3's PPO for PPO_STEPS env steps, by turns on both: all of learn, train alone."""
    found: dict[str, list[list[float]]] = {"Gymnasium": [], "grpo_rl": []}
    for _ in range(PPO_ROUNDS):
        for name, env in (
            ("Gymnasium", one_by_one(PPO_TASK, n_envs)),
            ("grpo_rl", MujocoVecEnv(PPO_TASK, n_envs, seed=0)),
        ):
            model = PPO("MlpPolicy", env, n_steps=PPO_STEPS // 2 // n_envs, batch_size=minibatch, seed=0, device="cpu")
            train, spent = model.train, []
            model.train = lambda train=train, spent=spent: spent.append(timed(train)[0])  # type: ignore[method-assign]
            whole = timed(lambda model=model: model.learn(PPO_STEPS))[0]
            found[name].append([whole, sum(spent)])
            env.close()
    return found


def measure_costs(env_id: str) -> dict[str, list[float]]:
    """CPU µs a column, round by round: of forks of MOVED of COLUMNS columns, of `mj_copyData` alone, and of resets."""
    ours, theirs = (make_group_env(env_id, 4, COLUMNS // 4, seed=0, vec_env_cls=cls) for cls in (None, GroupVecEnv))
    assert isinstance(ours, MujocoVecEnv) and not isinstance(theirs, MujocoVecEnv)
    sources = np.arange(COLUMNS) // 8 * 8  # each group goes on from its first member
    assert (sources != np.arange(COLUMNS)).sum() == MOVED
    for env in (ours, theirs):
        env.reset()
        env.step(random_actions(env)[0])
    datas, model = ours.get_attr("data"), ours.get_attr("model")[0]

    def copies() -> None:
        for column, source in enumerate(sources.tolist()):
            if column != source:
                mujoco.mj_copyData(datas[column], model, datas[source])

    works: dict[str, tuple[Callable[[], Any], int]] = {
        "fork": (lambda: ours.fork(sources), MOVED),
        "mj_copyData": (copies, MOVED),
        "fork, Gymnasium": (lambda: theirs.fork(sources), MOVED),
        "reset": (ours.reset, COLUMNS),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(ROUNDS + 1):
        for name, (work, columns) in works.items():
            cpu = timed(lambda work=work: [work() for _ in range(REPEATS)])[1]
            if round_:  # the first one warms up
                found[name].append(round(1e6 * cpu / REPEATS / columns, 2))
    for env in (ours, theirs):
        env.close()
    return found


def machine() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = model[1] if model else platform.processor()
    return f"{name}, {usable_cores()} cores, Python {platform.python_version()}"


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure_all() -> None:
    found: dict[str, Any] = {"machine": machine(), "versions": installed(), "steps": STEPS, "engines": {}, "ppo": {}}
    found["costs"] = {env_id: measure_costs(env_id) for env_id in TASKS}
    for env_id in TASKS:
        for n_envs in NUMBERS:
            found["engines"].setdefault(env_id, {})
            row = found["engines"][env_id][str(n_envs)] = measure(env_id, n_envs)
            print(env_id, n_envs, {name: round(rate(clocks)) for name, clocks in row.items()}, flush=True)
    for n_envs, minibatch in PPO_RUNS:
        found["ppo"][f"{n_envs} {minibatch}"] = measure_ppo(n_envs, minibatch)
        print("PPO", n_envs, minibatch, flush=True)
    PAGE.keep(found)


# ------------------------------------------------------------------------------------------------------------ the page


def rate(clocks: list[Clock]) -> float:
    """Env steps per second on the wall, median over rounds."""
    return STEPS / float(np.median([wall for wall, _ in clocks]))


def ratio(clocks: list[Clock], others: list[Clock], which: int = 0) -> float:
    """How many times as fast as the others, median over rounds of the ratio in one round."""
    return float(np.median([other[which] / own[which] for own, other in zip(clocks, others, strict=True)]))


def engines(found: dict[str, Any]) -> str:
    lines = [
        "| task | columns | bare `mj_step` | grpo_rl | of bare, wall | of bare, CPU | × Gymnasium | × EnvPool |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for env_id, rows in found["engines"].items():
        for n_envs, row in rows.items():
            ours, physics = row["grpo_rl"], row["bare mj_step"]
            pool = f"{ratio(ours, row['EnvPool']):.2f}" if "EnvPool" in row else "–"
            lines.append(
                f"| {env_id} | {n_envs} | {rate(physics):,.0f} | {rate(ours):,.0f} | {ratio(ours, physics):.0%} |"
                f" {ratio(ours, physics, 1):.0%} | {ratio(ours, row['Gymnasium']):.1f} | {pool} |"
            )
    return "\n".join(lines)


def ppo(found: dict[str, Any]) -> str:
    lines = [
        "| columns | minibatch | sampling, Gymnasium | sampling, grpo_rl | × | learn, Gymnasium | learn, grpo_rl | × |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run, row in found["ppo"].items():
        theirs, ours = (np.median(np.array(row[name]), axis=0) for name in ("Gymnasium", "grpo_rl"))
        cells = []
        for other, own in ((theirs[0] - theirs[1], ours[0] - ours[1]), (theirs[0], ours[0])):
            cells += [f"{other:.2f} s", f"{own:.2f} s", f"{other / own:.2f}"]
        lines.append(f"| {' | '.join([*run.split(), *cells])} |")
    return "\n".join(lines)


def costs(found: dict[str, Any]) -> str:
    lines = [
        "| CPU µs a column | fork | `mj_copyData` alone | fork, Gymnasium's envs in a `GroupVecEnv` | reset |",
        "|---|---|---|---|---|",
    ]
    for env_id, row in found["costs"].items():
        lines.append(f"| {env_id} | {' | '.join(f'{min(rounds):.0f}' for rounds in row.values())} |")
    return "\n".join(lines)


def lost(found: dict[str, Any]) -> str:
    """The work between the steps: a line over the columns, through what a step of HalfCheetah takes beyond physics."""
    rows = found["engines"]["HalfCheetah-v5"]  # it has no resets within a round
    numbers = np.array([int(number) for number in rows])
    beyond = [
        np.median([own[1] - bare[1] for own, bare in zip(row["grpo_rl"], row["bare mj_step"], strict=True)])
        / (found["steps"] // int(number))
        for number, row in rows.items()
    ]
    a_column, a_step = 1e6 * np.polyfit(numbers, np.array(beyond), 1, w=1 / (1 + numbers))
    return (
        f"What is lost is the work between the steps: {a_step:.0f} µs a step and {a_column:.1f} µs a column"
        " (HalfCheetah, a line through the CPU times of its rows), and resets, of which random actions cause many in Hopper and"
        " Humanoid."
    )


def where(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return f"Measured on {found['machine']}, with {versions}."


PAGE = Page(
    Path(__file__).with_name("engine.md"),
    Path(__file__).with_name("engine.json"),
    {"costs": costs, "lost": lost, "where": where, "engines": engines, "ppo": ppo},
)
table, written = PAGE.table, PAGE.written

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--costs-only" in sys.argv:
        PAGE.keep(PAGE.read() | {"costs": {env_id: measure_costs(env_id) for env_id in TASKS}})
    elif "--tables-only" not in sys.argv:
        measure_all()
    PAGE.write()
