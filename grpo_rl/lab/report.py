"""What a study found: report.md and its plots, written from runs.csv and the tables of its measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from grpo_rl.lab.measurements import measured
from grpo_rl.lab.plots import Curve, plot_profiles, plot_study
from grpo_rl.lab.records import Row, read_rows
from grpo_rl.lab.statistics import bootstrap, iqm, performance_profile, probability_of_improvement, ratio_of_iqms
from grpo_rl.recipes import Training, find, names, read_recipe, read_yaml, shipped

if TYPE_CHECKING:
    from grpo_rl.lab.study import Study

KINDS = ("mode", "sampled")


def write_report(study: Study, rows: Sequence[Row], folder: Path) -> Path:
    """Writes report.md, curves-mode.png, curves-sampled.png, curves-seconds.png and, with a baseline, profile.png.

    Returns:
        The report's path.
    """
    targets = {task: target["score"] for task, target in study.targets.items()}
    for kind in KINDS:
        panels = _panels(study, rows, kind)
        plot_study(panels, folder / f"curves-{kind}.png", f"return, {kind} actions", targets)
    panels = _panels(study, rows, "sampled", _seconds)
    plot_study(panels, folder / "curves-seconds.png", "return, sampled actions", targets, "CPU seconds of training")
    last, episodes = study.evaluation.last, study.evaluation.episodes
    every = f"{study.evaluation.every:,.0f} steps"
    if study.evaluation.every < 1:
        every = f"{study.evaluation.every:.0%} of a run"
    if study.evaluation.before:
        every += ", and before training,"
    lines = [
        f"# {study.name}",
        "",
        study.description,
        "",
        f"Evaluated every {every} on fresh environments: {episodes} episodes with the mode of "
        f"the policy, {episodes} with sampled actions. A run's score is its last {last} evaluations; a cell is the "
        "interquartile mean over seeds and these, with the 95 % interval of a bootstrap over seeds. Steps of forked "
        "members are counted. Seconds are of training on one core, evaluations not counted.",
        "",
        f"Rerun: `grpo-rl bench {study.name}`; numbers: [runs.csv](runs.csv).",
        "",
    ]
    for task in study.tasks:
        lines += _task(study, rows, task)
    if study.baseline and (profiles := _profiles(study, rows)):
        plot_profiles(
            profiles, folder / "profile.png", f"score, in IQMs of {study.baseline} on the task (sampled actions)"
        )
        lines += ["## All tasks", "", "![performance profiles](profile.png)", ""]
    for name, table in measured(study.measurements, folder).items():
        lines += [f"## {table.title}", "", *markdown_table(table.texts()), "", table.notes, ""]
        lines += [f"Numbers: [{name}.json]({name}.json).", ""]
    plots = {"mode": "curves-mode", "sampled": "curves-sampled", "sampled, against CPU seconds": "curves-seconds"}
    lines += [line for label, plot in plots.items() for line in (f"![{label}]({plot}.png)", "")] + _machine(folder)
    report = folder / "report.md"
    report.write_text("\n".join(lines), encoding="utf-8")
    return report


def scores(rows: Sequence[Row], task: str, agent: str, kind: str, last: int) -> NDArray[np.float64]:
    """(seeds, last) scores of an agent's runs on a task; what it did before training (step 0) is none."""
    return _curve([row for row in rows if row.step > 0], task, agent, kind)[1][:, -last:]


def before(rows: Sequence[Row], task: str, agent: str, kind: str) -> NDArray[np.float64]:
    """(seeds, 1) scores of an agent before it was trained."""
    return _curve([row for row in rows if row.step == 0], task, agent, kind)[1]


def _panels(
    study: Study, rows: Sequence[Row], kind: str, course: Callable[..., Curve] | None = None
) -> dict[str, dict[str, Curve]]:
    """Task to agent to `course(rows, task, agent, kind)`, by default scores against steps."""
    course = course or _curve
    return {
        task: {agent: course(rows, task, agent, kind) for agent in study.agents if _runs(rows, task, agent)}
        for task in study.tasks
    }


def _task(study: Study, rows: Sequence[Row], task: str) -> list[str]:
    """The section of one task."""
    return [f"## {task}", "", *markdown_table(_scores_table(study, rows, task)), "", *_target(study, rows, task)]


def results(study: Study, rows: Sequence[Row]) -> list[str]:
    """A study in short, for a README: Markdown lines with one table over all tasks, and what became of its targets."""
    tables = {task: _scores_table(study, rows, task) for task in study.tasks}
    head = next(iter(tables.values()))[0]
    body = [[task, *row] for task, table in tables.items() for row in table[1:]]
    targets = [
        line.replace("- ", f"- {task}, ", 1) for task in study.tasks for line in _target(study, rows, task) if line
    ]
    return [study.description, "", *markdown_table([["task", *head], *body]), "", *targets]


def _scores_table(study: Study, rows: Sequence[Row], task: str) -> list[list[str]]:
    """One row an agent, under a head: seeds, steps, scores, and how they compare with the baseline's."""
    last, baseline = study.evaluation.last, study.baseline
    compared = baseline is not None and bool(_runs(rows, task, baseline))
    untrained = study.evaluation.before
    head = ["agent", "seeds", "steps", *(f"{kind}: before" for kind in KINDS if untrained)]
    head += [f"{kind}: IQM" for kind in KINDS]
    head += [f"{kind} / {baseline}" for kind in KINDS] + [f"P(sampled > {baseline})"] if compared else []
    table = [[*head, "CPU s a run"]]
    for agent in study.agents:
        runs = _runs(rows, task, agent)
        if not runs:
            table.append([agent, "0"] + ["–"] * (len(table[0]) - 2))
            continue
        ours = {kind: [scores(rows, task, agent, kind, last)] for kind in KINDS}
        cells = [agent, str(len(runs)), f"{runs[0][-1].step:,}"]
        cells += [f"{iqm([before(rows, task, agent, kind)]):.4g}" for kind in KINDS if untrained]
        cells += [str(bootstrap(iqm, ours[kind])) for kind in KINDS]
        if compared and agent == baseline:
            cells += ["1", "1", "–"]
        elif compared:
            theirs = {kind: [scores(rows, task, str(baseline), kind, last)] for kind in KINDS}
            cells += [str(bootstrap(ratio_of_iqms, ours[kind], theirs[kind])) for kind in KINDS]
            cells += [f"{probability_of_improvement(ours['sampled'], theirs['sampled']):.2f}"]
        table.append([*cells, f"{np.mean([run[-1].cpu_s for run in runs]):.0f}"])
    return table


def _target(study: Study, rows: Sequence[Row], task: str) -> list[str]:
    """In how many runs, and when, the mode reached the task's target, and whether it was there at the end."""
    if task not in study.targets:
        return []
    score, within = study.targets[task]["score"], study.targets[task].get("within")
    limit = f" within {within:,.0f} steps" if within else ""
    lines = []
    for agent in study.agents:
        runs = _runs(rows, task, agent)
        first = [next((row.step for row in run if row.mode_mean >= score), None) for run in runs]
        reached = [step is not None and (within is None or step <= within) for step in first]
        held = [run[-1].mode_mean >= score for run in runs]
        both = sum(a and b for a, b in zip(reached, held, strict=True))
        when = ", ".join("never" if step is None else f"{step:,}" for step in first)
        lines.append(
            f"- {agent}: mode ≥ {score:g}{limit} in {sum(reached)} of {len(runs)} runs, and at the last evaluation in "
            f"{both} of these. First reached at {when or '–'}."
        )
    return [*lines, ""]


def _profiles(study: Study, rows: Sequence[Row]) -> dict[str, Curve]:
    """Profiles of agents that have runs on every task, in units of the baseline's IQM."""
    last, thresholds = study.evaluation.last, np.linspace(0, 2, 101)
    whole = [agent for agent in study.agents if all(_runs(rows, task, agent) for task in study.tasks)]
    if study.baseline not in whole:
        return {}
    units = {task: iqm([scores(rows, task, study.baseline, "sampled", last)]) for task in study.tasks}
    if min(units.values()) <= 0:
        return {}  # a ratio to a negative score says nothing
    return {
        agent: (
            thresholds,
            performance_profile(
                [scores(rows, task, agent, "sampled", last) / units[task] for task in study.tasks], thresholds
            ),
        )
        for agent in whole
    }


def _machine(folder: Path) -> list[str]:
    """Where the runs were made."""
    path = folder / "machine.json"
    if not path.is_file():
        return []
    known = json.loads(path.read_text(encoding="utf-8"))
    return ["Made with " + ", ".join(f"{name} {value}" for name, value in known.items()) + ".", ""]


def recipe_table() -> list[list[str]]:
    """One row a recipe, under a head: what it is, and the scores that the study `recipes` measured, if it was run.

    A score is the interquartile mean over seeds and the last three evaluations.
    """
    rows = read_rows(shipped() / "experiments" / "results" / "recipes" / "runs.csv")
    table = [["recipe", "environment", "steps", *KINDS, "seeds", "what"]]
    for name in names():
        data = read_recipe(name)
        named = data.get("environment", {})
        environment = read_yaml(find(named, "envs")) if isinstance(named, str) else named
        where = str(environment.get("id") or Path(environment.get("class", "")).name)
        runs = [run for agent in sorted({row.agent for row in rows}) for run in _runs(rows, name, agent)]
        measured = [f"{iqm([scores(rows, name, runs[0][0].agent, kind, 3)]):.0f}" if runs else "–" for kind in KINDS]
        steps = f"{int(data.get('training', {}).get('steps', Training.steps)):,}"
        table.append([name, where, steps, *measured, str(len(runs) or "–"), str(data.get("description", ""))])
    return table


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, its first row the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _runs(rows: Sequence[Row], task: str, agent: str) -> list[list[Row]]:
    """The rows of each run of an agent on a task, by seed and step."""
    mine = sorted(row for row in rows if (row.task, row.agent) == (task, agent))
    seeds = sorted({row.seed for row in mine})
    return [sorted((row for row in mine if row.seed == seed), key=lambda row: row.step) for seed in seeds]


def _curve(rows: Sequence[Row], task: str, agent: str, kind: str) -> Curve:
    """Steps (K,) and scores (seeds, K)."""
    runs = _runs(rows, task, agent)
    values = np.array([[getattr(row, f"{kind}_mean") for row in run] for run in runs], dtype=np.float64)
    return np.array([row.step for row in runs[0]], dtype=np.float64), values


def _seconds(rows: Sequence[Row], task: str, agent: str, kind: str) -> Curve:
    """CPU seconds of training at each evaluation (K,), mean over seeds, and scores (seeds, K)."""
    spent = np.array([[row.cpu_s for row in run] for run in _runs(rows, task, agent)], dtype=np.float64)
    return spent.mean(axis=0), _curve(rows, task, agent, kind)[1]
