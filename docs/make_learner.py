"""Measures the learner by NumPy against torch, and SB3's PPO beside both, and writes the table of learner.md.

    python docs/make_learner.py                 measures, some minutes, then writes docs/learner.json and the table
    python docs/make_learner.py --tables-only   writes the table anew

Hopper-v5 with the settings of agents/hopper.yaml, CPU time of this process with one thread. All take turns, round by round.
"""

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from grpo_rl.fast import acting, update
from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.lab.pages import Page
from grpo_rl.lab.run import versions
from grpo_rl.mujoco_log import quiet_build
from grpo_rl.recipes import load_recipe

ROUNDS, WARM_UP, STEPS = 5, 4096, 8192  # env steps before and in each round
COSTS = {"torch": (10**9, 10**9), "NumPy": (update.TRACING_COST, acting.TRACING_COST)}  # never traced, or as shipped


def cpu(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def best(work: Callable[[], Any], times: int = 100, of: int = 20) -> float:
    """µs of one call: the lowest of `of` means over `times` calls."""
    return min(cpu(lambda: [work() for _ in range(times)]) for _ in range(of)) / times * 1e6


def ours(name: str) -> dict[str, float]:
    """A round of GRPO by torch or by NumPy."""
    update.TRACING_COST, acting.TRACING_COST = COSTS[name]
    recipe = load_recipe("hopper")
    model: Any = build_agent(recipe, build_env(recipe))
    model.learn(WARM_UP)
    train, spent = model.train, []
    model.train = lambda: spent.append(cpu(train))
    before = model._n_updates
    whole = cpu(lambda: model.learn(STEPS, reset_num_timesteps=False))
    epochs = model._n_updates - before
    minibatches = epochs * max(int(model.rollout_buffer.mask.sum()) // model.batch_size, 1)
    step = model._programs.update(model.clip_range(0.5))
    batches = list(step.minibatches())

    def one() -> None:
        step.differentiate(batches[0])
        step.clip()
        step.step()

    act = model._sampler.acting
    found = {
        "an update": best(one),
        "a step of the policy": best(lambda: act(model._last_obs)),
        "train, an update": 1e6 * sum(spent) / minibatches,
        "env steps a second": STEPS / whole,
    }
    model.env.close()
    return found


def theirs(n_envs: int) -> dict[str, float]:
    """A round of SB3's PPO, 2048 env steps a rollout, its defaults."""
    with quiet_build():
        env = make_vec_env("Hopper-v5", n_envs, 0)
    model = PPO("MlpPolicy", env, n_steps=2048 // n_envs, device="cpu", seed=0)
    model.learn(WARM_UP)
    seconds = cpu(lambda: model.learn(STEPS, reset_num_timesteps=False))
    env.close()
    return {"env steps a second": STEPS / seconds}


def measure_all() -> None:
    th.set_num_threads(1)
    runs: dict[str, Callable[[], dict[str, float]]] = {
        "torch": lambda: ours("torch"),
        "NumPy": lambda: ours("NumPy"),
        "SB3's PPO, 1 env": lambda: theirs(1),
        "SB3's PPO, 8 envs": lambda: theirs(8),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            found[name].append(run())
            print(name, {key: round(value) for key, value in found[name][-1].items()}, flush=True)
    PAGE.keep({"versions": versions(), "rounds": found})


# ------------------------------------------------------------------------------------------------------------ the page

ROWS = {
    "an update": "an update: loss, gradient, clipping, Adam (64 rows)",
    "a step of the policy": "a step of the policy for 8 envs",
    "train, an update": "all of `train`, per update",
    "env steps a second": "env steps a CPU-second, physics and all",
}


def learner(found: dict[str, Any]) -> str:
    rounds = found["rounds"]
    lines = ["| CPU time, one thread | by torch | by NumPy | times as fast |", "|---|---|---|---|"]
    for key, text in ROWS.items():
        slow, fast = (np.array([row[key] for row in rounds[name]]) for name in ("torch", "NumPy"))
        ratios = fast / slow if "a second" in key else slow / fast
        unit = "" if "a second" in key else " µs"
        lines.append(
            f"| {text} | {np.median(slow):,.0f}{unit} | {np.median(fast):,.0f}{unit} |"
            f" {np.median(ratios):.1f} ({ratios.min():.1f} to {ratios.max():.1f}) |"
        )
    for name in rounds:
        if name.startswith("SB3"):
            median = np.median([row["env steps a second"] for row in rounds[name]])
            lines.append(f"| env steps a CPU-second, {name} | {median:,.0f} | – | – |")
    about = found["versions"]
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {len(rounds['torch'])} rounds in turn; torch {about['torch']}, SB3 {about['stable_baselines3']},"
            f" mujoco {about['mujoco']}, Python {about['python']}, {about['cpu']}, {about['cores']} cores.",
        ]
    )


PAGE = Page(Path(__file__).with_name("learner.md"), Path(__file__).with_name("learner.json"), {"learner": learner})
table, written = PAGE.table, PAGE.written

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--tables-only" not in sys.argv:
        measure_all()
    PAGE.write()
