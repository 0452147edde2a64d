"""Learning curves as PNG files. Drawn without pyplot, so that neither a display nor a global state is needed."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Environment steps (K,) and scores: (K,) for one run, (seeds, K) for several."""
Range = tuple[float | None, float | None]
Panel = tuple[Sequence[float], Sequence[float], Range | None, Range]


def read_progress(run: Path) -> Curve:
    """Steps and mean episode return of training, from progress.csv, once an episode has finished.

    Of a language model the mean reward of the rollout's completions: `rollout/ep_rew_mean` is of the last 100 only, a
    handful of prompts.
    """
    with (run / "progress.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    of_completions = any(row.get("reward") for row in rows)
    columns = ("time/total_timesteps", "reward" if of_completions else "rollout/ep_rew_mean")
    pairs = [
        (float(row[columns[0]]), float(row[columns[1]])) for row in rows if row.get(columns[0]) and row.get(columns[1])
    ]
    pairs = [pair for pair in pairs if math.isfinite(pair[1])]
    steps, returns = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.float64), np.array(returns, dtype=np.float64)


def plot_runs(runs: Mapping[str, Curve], path: Path, marks: Mapping[str, Mapping[str, float]] | None = None) -> None:
    """Draws the training curves of runs.

    Args:
        runs: Label to (steps, mean episode return).
        path: Of the PNG.
        marks: Label to named scores of the finished agent, drawn as points at the end of its curve.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for i, (label, (steps, returns)) in enumerate(runs.items()):
        axes.plot(steps, returns, color=f"C{i}", label=label)
        for shape, (name, score) in zip("os^", (marks or {}).get(label, {}).items(), strict=False):
            end = steps[-1] if len(steps) else 0
            axes.plot(
                end, score, shape, color=f"C{i}", markeredgecolor="black", label=f"{label}: {name}", clip_on=False
            )
    axes.set(xlabel="environment steps (all members of all groups)", ylabel="return of an episode, training mean")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def plot_study(
    panels: Mapping[str, Mapping[str, Curve]],
    path: Path,
    ylabel: str,
    targets: Mapping[str, float] | None = None,
    xlabel: str = "environment steps",
) -> None:
    """Draws one panel a task with one curve an agent: the interquartile mean over seeds, in the band of all seeds.

    Args:
        panels: Task to agent to (steps (K,) or what `xlabel` says, scores (seeds, K)).
        path: Of the PNG.
        ylabel: What the scores are.
        targets: Task to a score that is drawn as a dashed line.
        xlabel: What the scores are drawn against.
    """
    figure = Figure(figsize=(5.2 * len(panels), 4), layout="constrained")
    for axes, (task, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for i, (agent, (steps, scores)) in enumerate(curves.items()):
            axes.plot(steps, _middle(scores), color=f"C{i}", label=f"{agent} ({len(scores)} seeds)")
            axes.fill_between(steps, scores.min(axis=0), scores.max(axis=0), color=f"C{i}", alpha=0.15, linewidth=0)
        if task in (targets or {}):
            axes.axhline(targets[task], color="black", linestyle="--", linewidth=0.8)  # type: ignore[index]
        axes.set(title=task, xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def plot_health(panels: Mapping[str, Panel], path: Path) -> None:
    """Draws one small panel a metric: its course, a band for the usual range, dashed lines where a warning begins.

    Args:
        panels: Metric to (steps (K,), values (K,), the usual range or None, the range to warn outside of).
        path: Of the PNG.
    """
    columns = 4
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, (steps, values, usual, warns)) in zip(grid, panels.items(), strict=False):
        axes.plot(steps, values, color="C0", linewidth=1)
        limits = axes.get_ylim()
        if usual is not None:
            axes.axhspan(*usual, color="C2", alpha=0.15, linewidth=0)
        for bound in warns:
            if bound is not None:
                axes.axhline(bound, color="C3", linestyle="--", linewidth=0.8)
        low, high = min(values), max(values)
        margin = 0.5 * max(high - low, 1e-3)
        if math.isfinite(margin):  # a range far away is not drawn at the cost of the course
            axes.set_ylim(min(low - margin, limits[0]), max(high + margin, limits[1]))
        axes.set_title(name, fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("environment steps", fontsize="small")
    figure.savefig(path, dpi=110)


def plot_profiles(profiles: Mapping[str, Curve], path: Path, xlabel: str) -> None:
    """Draws performance profiles: agent to (thresholds (K,), share of runs above them (K,))."""
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for agent, (thresholds, shares) in profiles.items():
        axes.plot(thresholds, shares, label=agent)
    axes.set(xlabel=xlabel, ylabel="share of runs above", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def _middle(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K,) interquartile mean over seeds at each step."""
    ordered = np.sort(scores, axis=0)
    cut = len(ordered) // 4
    return np.asarray(ordered[cut : len(ordered) - cut].mean(axis=0))
