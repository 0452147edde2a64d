"""Measures groups in worker processes against groups in this process, and writes the table of workers in forking.md.

    python docs/make_workers.py                 measures, then writes docs/workers.json and the table
    python docs/make_workers.py --tables-only   writes the table anew

CPU time of each process, which other programs on the machine do not change, two groups of 8, two workers.
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from stable_baselines3.common.vec_env import SubprocVecEnv

from grpo_rl import make_group_env
from grpo_rl.lab.pages import Page
from grpo_rl.lab.run import versions
from grpo_rl.mujoco_log import quiet_build

ENVS = ("CartPole-v1", "Acrobot-v1", "LunarLander-v3", "Hopper-v5", "Humanoid-v5", "ALE/Breakout-v5")
WRAPPERS = {"ALE/Breakout-v5": {"obs_type": "ram"}}
STEPS = 400


def measure(env_id: str) -> dict[str, float]:
    """ms of CPU for a step of 16 columns: here, and with workers in the parent and in the busiest worker."""
    settings: dict[str, Any] = {"n_groups": 2, "group_size": 8, "seed": 0} | WRAPPERS.get(env_id, {})
    with quiet_build():
        here = make_group_env(env_id, **settings)
        there = make_group_env(env_id, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"n_workers": 2}, **settings)
    here.action_space.seed(0)
    actions = [np.stack([here.action_space.sample() for _ in range(16)]) for _ in range(50)]
    workers = [psutil.Process(worker.process.pid) for worker in there._workers]
    found = {}
    for name, env in (("here", here), ("parent", there)):
        env.reset()
        for action in actions:
            env.step(action)
        before = [sum(worker.cpu_times()[:2]) for worker in workers]
        start = time.process_time()
        for step in range(STEPS):
            env.step(actions[step % 50])
        found[name] = 1e3 * (time.process_time() - start) / STEPS
    found["worker"] = max(
        1e3 * (sum(worker.cpu_times()[:2]) - first) / STEPS for worker, first in zip(workers, before, strict=True)
    )
    for env in (here, there):
        env.close()
    return found


def measure_all() -> None:
    found = {env_id: measure(env_id) for env_id in ENVS}
    PAGE.keep({"versions": versions(), "steps": STEPS, "envs": found})


def workers(found: dict[str, Any]) -> str:
    lines = ["| environment | this process | parent | each worker | at best |", "|---|---|---|---|---|"]
    for env_id, row in found["envs"].items():
        times = row["here"] / (row["parent"] + row["worker"])
        cells = " | ".join(f"{row[name]:.2f} ms" for name in ("here", "parent", "worker"))
        lines.append(f"| {env_id} | {cells} | {times:.2g} times as fast |")
    about = found["versions"]
    return "\n".join([*lines, "", f"Python {about['python']}, {about['cpu']}, {about['cores']} cores, of which others had a part."])


PAGE = Page(Path(__file__).with_name("forking.md"), Path(__file__).with_name("workers.json"), {"workers": workers})
table, written = PAGE.table, PAGE.written

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--tables-only" not in sys.argv:
        measure_all()
    PAGE.write()
