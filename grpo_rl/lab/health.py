"""The doctor's look at a run: what its log says, judged by the rules of `HealthMonitor`."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_rl.defaults import settled_scale
from grpo_rl.errors import ConfigError
from grpo_rl.grpo import GRPO
from grpo_rl.health import CRITIC_FREE, OPTIONS, Metric, Range, shown_range
from grpo_rl.lab.build import read_run, setting, talks
from grpo_rl.lab.plots import Panel, plot_health
from grpo_rl.monitor import Diagnosis
from grpo_rl.recipes import Recipe, algorithm_class, parameters


def read_log(run: Path) -> list[dict[str, float]]:
    """The rows of a run's progress.csv, without empty cells; none where there is no log yet."""
    if not (run / "progress.csv").is_file():
        return []
    with (run / "progress.csv").open(encoding="utf-8", newline="") as file:
        return [
            {key: number for key, text in row.items() if (number := _number(text)) is not None}
            for row in csv.DictReader(file)
        ]


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def settings_of_recipe(recipe: Recipe) -> dict[str, Any]:
    """The arguments of a recipe's agent that cures are chosen by, as `monitor.settings_of` gives them."""
    algorithm = algorithm_class(recipe)
    settings = {name: setting(recipe, name) for name in OPTIONS if name in parameters(algorithm)}
    if issubclass(algorithm, GRPO):
        names = ("advantage_scale", "normalize_advantage", "loss_type", "baseline", "baseline_discount")
        settings["advantage_scale"] = settled_scale(
            text=talks(recipe), **{name: setting(recipe, name) for name in names}
        )
        settings["normalize_reward"] |= recipe.environment.normalize
        if recipe.model["policy"] == "CausalLMPolicy":
            del settings["normalize_reward"]
    return settings


def examine(run: Path) -> Diagnosis:
    """The diagnosis of a run's whole log.

    Raises:
        ConfigError: no run, or nothing logged.
    """
    recipe, rows = read_run(run), read_log(run)
    if not rows:
        raise ConfigError(f"{run}: its progress.csv is missing or empty, expected a row for each rollout")
    diagnosis = Diagnosis(settings_of_recipe(recipe))
    for row in rows:
        diagnosis.add(row)
    return diagnosis


def report(run: Path, say: Callable[[str], None] = print) -> int:
    """Says how a run was, draws health.png into its folder and returns the exit status: 0 healthy, 1 with findings.

    Raises:
        ConfigError: as `examine`.
    """
    diagnosis = examine(run)
    table: list[tuple[str, ...]] = [("metric", "last", "warns outside", "outside", "usual", "outside")]
    table += [row for metric in diagnosis.metrics if (row := _row(metric, diagnosis))]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    seen = {name for values in diagnosis.values for name in values}
    if not any(metric.name in seen for metric in diagnosis.metrics if metric.key.startswith("health/adv")):
        say("the log has no health/ figures, so that groups and rewards are not judged: HealthMonitor was not there")
    healthy = _say_findings(run, diagnosis, say)
    draw(run, diagnosis)
    say(f"drawn: {run / 'health.png'}")
    return 0 if healthy else 1


def _say_findings(run: Path, diagnosis: Diagnosis, say: Callable[[str], None]) -> bool:
    for finding in diagnosis.findings:
        lasted = f"until {finding.until:,}" if finding.over else "to the end"
        say(f"{finding.message} [from {finding.since:,} steps {lasted}]")
    stopped = (run / "error.log").is_file() and not (run / "model.zip").is_file()
    if stopped:
        lines = (run / "error.log").read_text(encoding="utf-8").strip().splitlines()
        say(f"stopped by an error: {lines[-1] if lines else 'unknown'} (all of it: {run / 'error.log'})")
    if not diagnosis.findings and not stopped:
        say(f"healthy: {len(diagnosis.steps)} rollouts, {diagnosis.steps[-1]:,} steps, no finding")
    return not diagnosis.findings and not stopped


def _row(metric: Metric, diagnosis: Diagnosis) -> tuple[str, ...] | None:
    values = [row[metric.name] for row in diagnosis.values if metric.name in row]
    if not values:
        return None
    warns = _judged_by(metric, diagnosis)
    return (
        metric.name,
        f"{values[-1]:.3g}",
        shown_range(warns) if warns != (None, None) else "",
        _outside(values, warns),
        shown_range(metric.usual) if metric.usual else "",
        _outside(values, metric.usual or (None, None)),
    )


def _judged_by(metric: Metric, diagnosis: Diagnosis) -> Range:
    """The range that a warning of this run would be about: figures of groups do not count beside values of states."""
    of_groups = {metric.below, metric.above} & set(CRITIC_FREE)
    settings = diagnosis.settings
    values = settings.get("value_head") or settings.get("baseline") == "regression"
    return (None, None) if of_groups and values else metric.warns


def _outside(values: list[float], bounds: Range) -> str:
    """The share of values out of a range, "" where it has no bounds."""
    low, high = bounds
    if low is None and high is None:
        return ""
    out = [not ((low is None or value >= low) and (high is None or value <= high)) for value in values]
    return f"{sum(out) / len(out):.0%}"


def draw(run: Path, diagnosis: Diagnosis) -> None:
    """Draws health.png into the run's folder: each figure over env steps, with its ranges."""
    panels: dict[str, Panel] = {}
    for metric in diagnosis.metrics:
        held = [i for i, values in enumerate(diagnosis.values) if metric.name in values]
        course = [diagnosis.values[i][metric.name] for i in held]
        if held:
            panels[metric.name] = (
                [diagnosis.steps[i] for i in held],
                course,
                metric.usual,
                _judged_by(metric, diagnosis),
            )
    plot_health(panels, run / "health.png")
