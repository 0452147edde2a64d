"""Writes what was measured again, between the markers of README.md and of critic-free-or-hybrid.md: `make tables`."""

import re
from pathlib import Path

import gymnasium as gym
import numpy as np

from grpo_rl import CnnPolicy, MlpPolicy
from grpo_rl.lab.records import Row
from grpo_rl.lab.report import markdown_table, results, scores
from grpo_rl.lab.statistics import bootstrap, iqm
from grpo_rl.lab.study import Study, finished, load_study

STUDIES = ("mujoco-hybrid", "cartpole-acrobot")
MARKERS = re.compile(r"(?<=<!-- results:begin -->\n).*(?=<!-- results:end -->)", re.DOTALL)
KINDS = {"critic-free": ("grpo-critic-free", "grpo"), "hybrid": ("grpo-hybrid",), "SB3's PPO": ("sb3-ppo",)}
"""The columns of critic-free-or-hybrid.md, and which agents of the studies they are."""


def section() -> str:
    """README.md's: the studies in short, each with a link to its report."""
    lines = []
    for study, rows in studies():
        name = study.name
        lines += [*results(study, rows), "", f"Rerun: `grpo-rl bench {name}`. All of it, with curves and machine:"]
        lines += [f"[report](experiments/results/{name}/report.md).", ""]
    return "\n".join(lines)


def comparison() -> str:
    """critic-free-or-hybrid.md's: scores side by side, then parameters."""
    lines = []
    for study, rows in studies():
        for task in study.tasks:
            lines += _task(study, rows, task)
    head = ["task, steps", "", *KINDS]
    note = (
        "Interquartile means over seeds and the last three evaluations, with 95 % intervals, from "
        + " and ".join(f"[{name}](../experiments/results/{name}/report.md)" for name in STUDIES)
        + ". CPU s: seconds of training on one core."
    )
    return "\n".join([*markdown_table([head, *lines]), "", note, "", *markdown_table(parameters()), ""])


def studies() -> list[tuple[Study, list[Row]]]:
    """The studies that have results, with their rows."""
    found = [load_study(name) for name in STUDIES]
    return [(study, rows) for study in found if (rows := finished(study, study.folder(), say=print))]


def _task(study: Study, rows: list[Row], task: str) -> list[list[str]]:
    """A task's lines of the comparison: mode, sampled, CPU seconds."""
    lines: dict[str, list[str]] = {"mode": [], "sampled": [], "CPU s": []}
    for agents in KINDS.values():
        mine = [row for row in rows if row.task == task and row.agent in agents]
        for kind in ("mode", "sampled"):
            cell = "–"
            if mine:
                cell = str(bootstrap(iqm, [scores(rows, task, mine[0].agent, kind, study.evaluation.last)]))
            lines[kind].append(cell)
        ends = [row.cpu_s for row in mine if row.step == max(row.step for row in mine)]
        lines["CPU s"].append(f"{np.mean(ends):.0f}" if mine else "–")
    steps = max(row.step for row in rows if row.task == task)
    return [[f"{task}, {steps:,}" if kind == "mode" else "", kind, *cells] for kind, cells in lines.items()]


def parameters() -> list[list[str]]:
    """How many parameters policies have with and without a value head, under a head row."""
    pixels = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    robots = [(gym.make(name), MlpPolicy, f"MlpPolicy on {name}") for name in ("Hopper-v5", "Humanoid-v5")]
    policies = [(label, kind, env.observation_space, env.action_space) for env, kind, label in robots]
    policies.append(("CnnPolicy on 84 × 84 × 4 pixels, 6 actions", CnnPolicy, pixels, gym.spaces.Discrete(6)))
    table = [["policy", "critic-free", "hybrid", "hybrid / critic-free"]]
    for label, kind, observations, actions in policies:
        few, many = (
            sum(p.numel() for p in kind(observations, actions, lambda _: 0.0, value_head=head).parameters())
            for head in (False, True)
        )
        table.append([label, f"{few:,}", f"{many:,}", f"{many / few:.2f}"])
    return table


PAGES = {"README.md": section, "docs/critic-free-or-hybrid.md": comparison}
"""Pages with markers, and what stands between them."""

if __name__ == "__main__":
    for name, write in PAGES.items():
        page = Path(__file__).parents[1] / name
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKERS.sub(lambda _, write=write: write(), text), encoding="utf-8")
