"""Runs healthy recipes under the monitor and writes what they show into monitor.md.

    python docs/make_monitor.py                 some minutes, then writes docs/monitor.json and the table
    python docs/make_monitor.py --tables-only   writes the table anew
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import configure

from grpo_rl import HealthMonitor
from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.lab.health import read_log
from grpo_rl.lab.pages import Page
from grpo_rl.lab.run import versions
from grpo_rl.recipes import load_recipe

RUNS = {"cartpole": 50_000, "acrobot": 40_000, "pendulum": 40_000, "hopper": 60_000, "halfcheetah": 30_000, "lunarlander": 40_000}
METRICS = {
    "reward_gap": "health/reward_gap",
    "grad_norm": "train/grad_norm",
    "approx_kl": "train/approx_kl",
    "clip_fraction": "train/clip_fraction",
    "entropy_left": "health/entropy_left",
    "group_size": "health/group_size",
    "tied_groups": "health/tied_groups",
}


def run(name: str, steps: int) -> dict[str, Any]:
    """Lowest, highest and last value of each metric over a run, and what the monitor found."""
    recipe = load_recipe(name)
    agent = build_agent(recipe, env := build_env(recipe))
    monitor = HealthMonitor(say=lambda line: None)
    with tempfile.TemporaryDirectory() as folder:
        agent.set_logger(configure(folder, ["csv"]))
        agent.learn(steps, callback=monitor)
        agent.dump_logs()
        agent.logger.close()
        rows = read_log(Path(folder))
    env.close()
    values = {metric: [row[key] for row in rows if key in row] for metric, key in METRICS.items()}
    return {
        "task": recipe.environment.id,
        "steps": steps,
        "form": "hybrid" if recipe.optimization.get("value_head") else "critic-free",
        "metrics": {metric: [min(seen), max(seen), seen[-1]] for metric, seen in values.items() if seen},
        "findings": sorted({finding.name for finding in monitor.findings}),
    }


def measure_all() -> None:
    found = {}
    for name, steps in RUNS.items():
        found[name] = run(name, steps)
        print(name, found[name]["findings"], flush=True)
    PAGE.keep({"versions": versions(), "runs": found})


def healthy(found: dict[str, Any]) -> str:
    runs = list(found["runs"].values())
    lines = [
        ["", *(f"{run['task'].partition('-')[0]}, {run['steps'] // 1000}k" for run in runs)],
        ["---"] * (len(runs) + 1),
        ["form", *(run["form"] for run in runs)],
    ]
    for metric in METRICS:
        lines.append([f"`{metric}`", *(cell(metric, run["metrics"].get(metric)) for run in runs)])
    lines.append(["findings", *(", ".join(f"`{name}`" for name in run["findings"]) or "none" for run in runs)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(metric: str, values: list[float] | None) -> str:
    """Lowest to highest; of the entropy the last."""
    if values is None:
        return "–"
    low, high, last = (f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}" for value in values)
    return f"{last} at the end" if metric == "entropy_left" else low if low == high else f"{low} to {high}"


PAGE = Page(Path(__file__).with_name("monitor.md"), Path(__file__).with_name("monitor.json"), {"healthy": healthy})
table, written = PAGE.table, PAGE.written

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--tables-only" not in sys.argv:
        measure_all()
    PAGE.write()
