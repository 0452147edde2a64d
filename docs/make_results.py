"""Writes what studies measured into README.md, critic-free-or-hybrid.md and text.md, between markers: `make tables`."""

import re
from pathlib import Path

import gymnasium as gym
import numpy as np

from grpo_rl import CnnPolicy, MlpPolicy
from grpo_rl.lab.measurements import measured
from grpo_rl.lab.records import Row
from grpo_rl.lab.report import before, markdown_table, results, scores
from grpo_rl.lab.statistics import bootstrap, iqm
from grpo_rl.lab.study import Study, finished, load_study

STUDIES = ("mujoco-hybrid", "cartpole-acrobot")
MARKERS = re.compile(r"(?<=<!-- results:begin -->\n).*(?=<!-- results:end -->)", re.DOTALL)
COMPARED = (*STUDIES, "regression-baseline")
"""The studies that critic-free-or-hybrid.md puts side by side; those of one task differ in their seeds."""
KINDS = {
    "critic-free": ("grpo-critic-free", "grpo"),
    "regression": ("grpo-regression",),
    "hybrid": ("grpo-hybrid",),
    "SB3's PPO": ("sb3-ppo",),
}
"""Its columns, and which agents of the studies they are."""
FEWEST_SEEDS = 3
"""Finished runs that make a cell."""


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
    found = [(study, mine) for study, mine in studies(COMPARED) if len({row.seed for row in mine}) >= FEWEST_SEEDS]
    rows = [row for _, of_study in found for row in of_study]
    tasks = _tasks(found)
    kinds = {kind: agents for kind, agents in KINDS.items() if any(_enough(rows, task, agents) for task in tasks)}
    lines = [line for task, last in tasks.items() for line in _task(rows, task, last, kinds)]
    head = ["task, steps", "", *kinds]
    note = (
        "Interquartile means over seeds and the last three evaluations, with 95 % intervals, from "
        + " and ".join(f"[{study.name}](../experiments/results/{study.name}/report.md)" for study, _ in found)
        + ". CPU s: seconds of training on one core."
    )
    return "\n".join([*markdown_table([head, *lines]), "", note, "", *markdown_table(parameters()), ""])


def studies(names: tuple[str, ...] = STUDIES) -> list[tuple[Study, list[Row]]]:
    """The studies that have results, with their rows."""
    found = [load_study(name) for name in names]
    return [(study, rows) for study in found if (rows := finished(study, study.folder(), say=print))]


def _tasks(found: list[tuple[Study, list[Row]]]) -> dict[str, int]:
    """The tasks of studies in their order, and how many of the last evaluations are a score."""
    tasks: dict[str, int] = {}
    for study, _ in found:
        for task in study.tasks:
            tasks.setdefault(task, study.evaluation.last)
    return tasks


def _enough(rows: list[Row], task: str, agents: tuple[str, ...]) -> list[Row]:
    """The rows of agents on a task, none of too few seeds."""
    mine = [row for row in rows if row.task == task and row.agent in agents]
    return mine if len({row.seed for row in mine}) >= FEWEST_SEEDS else []


def _task(rows: list[Row], task: str, last: int, kinds: dict[str, tuple[str, ...]]) -> list[list[str]]:
    """A task's lines of the comparison: mode, sampled, CPU seconds."""
    lines: dict[str, list[str]] = {"mode": [], "sampled": [], "CPU s": []}
    for agents in kinds.values():
        mine = _enough(rows, task, agents)
        for kind in ("mode", "sampled"):
            cell = "–"
            if mine:
                cell = str(bootstrap(iqm, [scores(rows, task, mine[0].agent, kind, last)]))
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


def text_tasks() -> str:
    """text.md's: what sampled and most likely answers of each task earn, before and after training."""
    study = load_study("text-tasks")
    rows = finished(study, study.folder(), say=print)
    lines = [["task", "seeds", "sampled: before", "after", "mode: before", "after", "tokens", "CPU s"]]
    for task in study.tasks:
        mine = [row for row in rows if row.task == task]
        if not mine:
            lines.append([task, *["–"] * 7])
            continue
        cells = []
        for kind in ("sampled", "mode"):
            for found in (before(rows, task, "grpo", kind), scores(rows, task, "grpo", kind, study.evaluation.last)):
                cells.append(str(bootstrap(iqm, [found])))
        steps = max(row.step for row in mine)
        seconds = np.mean([row.cpu_s for row in mine if row.step == steps])
        lines.append([task, str(len({row.seed for row in mine})), *cells, f"{steps:,}", f"{seconds:.0f}"])
    return "\n".join([*markdown_table(lines), ""])


def against_trl() -> str:
    """from-trl.md's: scores and seconds of the runs, then what was measured beside them."""
    study = load_study("text-vs-trl")
    rows = finished(study, study.folder(), say=print)
    lines = [["", *study.agents]]
    for kind in ("sampled", "mode"):
        found = [scores(rows, "reversal", agent, kind, study.evaluation.last) for agent in study.agents]
        lines.append([f"{kind} answers right, after", *(str(bootstrap(iqm, [score])) for score in found)])
    ends = {agent: [row for row in rows if row.agent == agent and row.step == rows[-1].step] for agent in study.agents}
    seconds = {agent: [row.cpu_s for row in runs] for agent, runs in ends.items()}
    lines.append(["CPU s a run", *(f"{np.mean(spent):.0f}" for spent in seconds.values())])
    lines.append(["runs", *(str(len(spent)) for spent in seconds.values())])
    text = [*markdown_table(lines), ""]
    for table in measured(study.measurements, study.folder()).values():
        text += [f"**{table.title}.** {table.notes}", "", *markdown_table(table.texts()), ""]
    return "\n".join(text)


PAGES = {
    "README.md": section,
    "docs/critic-free-or-hybrid.md": comparison,
    "docs/text.md": text_tasks,
    "docs/from-trl.md": against_trl,
}
"""Pages with markers, and what stands between them."""

if __name__ == "__main__":
    for name, write in PAGES.items():
        page = Path(__file__).parents[1] / name
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKERS.sub(lambda _, write=write: write(), text), encoding="utf-8")
