"""A study: tasks × agents × seeds, described by one YAML file and rerun by one command (`grpo-rl bench`).

    description: what is asked
    seeds: [0, 1, 2]
    evaluation: {every: 20_000, episodes: 20, last: 3}       # steps between; episodes per kind; how many make the score
                                                              # before: true adds one before training
    baseline: sb3-ppo                                         # optional: the agent that others are compared with
    targets: {Hopper-v5: {score: 2000, within: 200_000}}      # optional
    tasks: {Hopper-v5: {environment: …, training: {steps: 300_000}}}
    agents: {ours: {optimization: …}, sb3-ppo: {class: "stable_baselines3:PPO", …}}
    measurements: {memory: "speed.py:memory"}                 # optional: tables of its own, see measurements.py
    packages: [trl]                                           # optional: versions that machine.json records, too

Tasks and agents are parts of recipes: a run is trained from the task's part (on top of the recipe that its `recipe`
names, if any) merged with the agent's. Each run has a process and a thread of its own; finished runs are kept in
runs.csv and are not repeated unless their settings change. Measurements come last, alone, and are kept alike.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch as th
import yaml
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl.errors import ConfigError, did_you_mean
from grpo_rl.lab import measurements
from grpo_rl.lab.build import build_agent, build_env, drivers, env_maker
from grpo_rl.lab.measurements import measured, settings
from grpo_rl.lab.records import Row, Run, read_rows, write_rows
from grpo_rl.lab.run import evaluate, versions
from grpo_rl.recipes import (
    PACKAGE,
    Recipe,
    anchor,
    check,
    check_name,
    find,
    label,
    make_recipe,
    merge,
    read_recipe,
    read_yaml,
    shipped,
)


@dataclass
class Evaluation:
    """The protocol.

    Attributes:
        every: Steps between evaluations, or, below 1, their share of a task's steps; divides the steps of every task.
        episodes: On fresh environments: so many with the mode of the policy, and so many with sampled actions.
        last: How many evaluations at the end of a run make its score.
        before: Whether the untrained agent is evaluated too, as step 0. It is never part of a score.
    """

    every: float
    episodes: int = 20
    last: int = 3
    before: bool = False

    def interval(self, steps: int) -> float:
        """Steps between evaluations, for a task of so many."""
        return self.every if self.every >= 1 else self.every * steps


@dataclass
class Study:
    """A checked study; attributes as in the YAML file."""

    path: Path
    seeds: list[int]
    evaluation: Evaluation
    tasks: dict[str, dict[str, Any]]
    agents: dict[str, dict[str, Any]]
    description: str = ""
    baseline: str | None = None
    targets: dict[str, dict[str, float]] = field(default_factory=dict)
    measurements: dict[str, str] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.stem

    def runs(self) -> list[Run]:
        """All runs, seed by seed, so that a study that is stopped half-way holds every agent."""
        return [Run(task, agent, seed) for seed in self.seeds for task in self.tasks for agent in self.agents]

    def recipe(self, run: Run) -> Recipe:
        """The recipe of a run."""
        task = dict(self.tasks[run.task])
        base = read_recipe(task.pop("recipe")) if "recipe" in task else {}
        data = merge(base, task, self.agents[run.agent], {"training": {"seed": run.seed}})
        source = f"{label(self.path)} ({run.task}, {run.agent})"
        return make_recipe(data | {"name": f"{run.task}-{run.agent}"}, source, self.path.parent)

    def settings(self, run: Run) -> str:
        """Digest of what a run's numbers depend on, the seed and the order of keys apart."""
        written = self.recipe(run._replace(seed=0)).to_yaml().replace(str(shipped()), "")
        recipe = json.dumps(yaml.safe_load(written), sort_keys=True)
        protocol = (self.evaluation.every, self.evaluation.episodes, *(["before"] if self.evaluation.before else []))
        return hashlib.sha256(f"{recipe} {protocol}".encode()).hexdigest()[:8]

    def missing(self, rows: Sequence[Row], folder: Path) -> list[str]:
        """What `bench` has still to do: runs without rows, and measurements without a table in `folder`."""
        done, tables = {row.run for row in rows}, measured(self.measurements, folder)
        return [str(run) for run in self.runs() if run not in done] + [m for m in self.measurements if m not in tables]

    def folder(self) -> Path:
        """Where results go: results/<name>/ next to the file, in the current folder for a study that was installed."""
        parent = Path() if self.path.is_relative_to(PACKAGE) else self.path.parent
        return parent / "results" / self.name


def load_study(name: str | Path) -> Study:
    """The study of that name (in experiments/) or path, with the recipes of all its runs checked.

    Raises:
        ConfigError: Anything unknown, of a wrong type or missing.
    """
    path = find(name, "experiments")
    data, source = read_yaml(path), label(path)
    valid = {key: hint for key, hint in typing.get_type_hints(Study).items() if key != "path"}
    evaluation = data.get("evaluation")
    if not isinstance(evaluation, Mapping) or "every" not in evaluation:
        raise ConfigError(f"{source}, evaluation: expected a mapping with `every`, steps between evaluations")
    for key in ("tasks", "agents", "seeds"):
        if not data.get(key):
            raise ConfigError(f"{source}: {key} are missing")
    data["measurements"] = anchor(data.get("measurements") or {}, path.parent)
    checked = check("study", data, valid | {"evaluation": dict}, lambda *_: source)
    hints = typing.get_type_hints(Evaluation)
    checked["evaluation"] = Evaluation(**check("evaluation", evaluation, hints, lambda *_: source))
    study = Study(path=path, **checked)
    named = {
        "baseline": ([study.baseline] if study.baseline else [], study.agents),
        "targets": (study.targets, study.tasks),
    }
    for key, (given, known) in named.items():
        for item in given:
            if item not in known:
                raise ConfigError(f'{source}, {key}: unknown "{item}": {did_you_mean(str(item), known)}')
    for name, where in study.measurements.items():
        if check_name(name, f"{source}, measurements") == "machine":
            raise ConfigError(f"{source}, measurements: machine.json is taken; give another name")
        settings(where)  # loads it
    for run in study.runs()[: len(study.tasks) * len(study.agents)]:  # the first seed's
        steps = study.recipe(run).training.steps
        every = study.evaluation.every
        if every <= 0 or round(steps / study.evaluation.interval(steps), 6) % 1:
            raise ConfigError(f"{source}, {run.task}: {steps:,} steps are no multiple of evaluation.every, {every:g}")
    return study


def bench(study: Study, folder: Path, jobs: int = 1, say: Callable[[str], None] = print) -> list[Row]:
    """Runs what is missing, keeping each run in runs.csv as it finishes, then measures. Returns all rows of the study.

    Args:
        study: Which runs and measurements.
        folder: Of runs.csv, machine.json and a <name>.json of each measurement; made if needed.
        jobs: Runs at the same time, one process with one thread each. Measurements have no company.
        say: Takes the lines for a person.
    """
    rows = finished(study, folder, say)
    done = {row.run for row in rows}
    missing = [run for run in study.runs() if run not in done]
    total = len(done) + len(missing)
    say(f"{study.name}: {len(done)} of {total} runs are there, {jobs} at a time")
    if study.missing(rows, folder):
        folder.mkdir(parents=True, exist_ok=True)
        machine = versions(*study.packages)
        (folder / "machine.json").write_text(json.dumps(machine, indent=2), encoding="utf-8")
    processes: dict[Run, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while missing or processes:
                while missing and len(processes) < jobs:
                    run = missing.pop(0)
                    arguments = [study.path, *run, _out(scratch, run.slug)]
                    processes[run] = _start(__name__, arguments, Path(scratch, f"{run.slug}.log"))
                time.sleep(0.1)
                for run in [run for run, process in processes.items() if process.poll() is not None]:
                    if not _succeeded(processes.pop(run), Path(scratch, f"{run.slug}.log"), str(run), folder, say):
                        continue
                    found = [Row(*row) for row in json.loads(_out(scratch, run.slug).read_text(encoding="utf-8"))]
                    rows = sorted(rows + found)
                    write_rows(folder / "runs.csv", rows)
                    done.add(run)
                    last = found[-1]
                    scores = f"mode {last.mode_mean:.1f}, sampled {last.sampled_mean:.1f}"
                    say(f"{len(done)}/{total}  {run}: {scores}, {last.wall_s:.0f} s")
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait()
    _measure(study, folder, say)
    return rows


def _measure(study: Study, folder: Path, say: Callable[[str], None]) -> None:
    """Makes the tables that are missing, one after another."""
    there = measured(study.measurements, folder)
    for name in [name for name in study.measurements if name not in there]:
        began, log = time.perf_counter(), folder / f"{name}.log"
        process = _start(measurements.__name__, [name, study.measurements[name], folder / f"{name}.json"], log)
        try:
            process.wait()
        finally:
            process.terminate()
        if _succeeded(process, log, name, folder, say):
            say(f"measured {name}, {time.perf_counter() - began:.0f} s")
        log.unlink()


def finished(study: Study, folder: Path, say: Callable[[str], None] = print) -> list[Row]:
    """The rows in runs.csv that belong to the study with its present settings."""
    settings = {run: study.settings(run) for run in study.runs()}
    stored = read_rows(folder / "runs.csv")
    rows = [row for row in stored if settings.get(row.run) == row.settings]
    if stale := {row.run for row in stored} - {row.run for row in rows}:
        say(f"{len(stale)} finished runs had other settings, or are no part of the study any more: left out")
    return rows


def run_once(study: Study, run: Run) -> list[Row]:
    """Trains one run in this process, with one thread; its evaluations as rows."""
    recipe = study.recipe(run)
    recipe.resources.threads = 1
    env = build_env(recipe)
    agent = build_agent(recipe, env)
    evaluations = _Evaluations(recipe, study.evaluation)
    agent.learn(recipe.training.steps, callback=[evaluations, *drivers(agent)])
    env.close()
    return [Row(run.task, run.agent, run.seed, study.settings(run), *numbers) for numbers in evaluations.numbers]


class _Evaluations(BaseCallback):
    """Evaluates every so many steps and takes the time of everything else."""

    def __init__(self, recipe: Recipe, protocol: Evaluation) -> None:
        super().__init__()
        self.recipe, self.protocol = recipe, protocol
        self.numbers: list[tuple[int, float, float, float, float]] = []

    def _on_training_start(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        if self.protocol.before:
            self._evaluate(0)

    def _on_step(self) -> bool:
        # Whole groups may run past the last step of the task: nothing is due there.
        due = len(self.numbers) + (0 if self.protocol.before else 1)
        step = round(due * self.protocol.interval(self.recipe.training.steps))
        if step <= min(self.num_timesteps, self.recipe.training.steps):
            self._evaluate(step)
        return True

    def _evaluate(self, step: int) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        episodes, normalizer = self.protocol.episodes, self.model.get_vec_normalize_env()
        seed = 1_000_000 + (1000 * self.recipe.training.seed + len(self.numbers)) * episodes
        means = [
            evaluate(
                self.model,
                env_maker(self.recipe.environment),
                episodes,
                deterministic,
                seed,
                **({"normalize": normalizer.normalize_obs} if normalizer else {}),
            ).returns.mean()
            for deterministic in (True, False)
        ]
        self.numbers.append((step, float(means[0]), float(means[1]), wall - self.wall, cpu - self.cpu))
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


def _out(scratch: str, slug: str) -> Path:
    """Where a run's process leaves its rows."""
    return Path(scratch, f"{slug}.json")


def _start(module: str, arguments: Sequence[object], log: Path) -> "subprocess.Popen[bytes]":
    """A process of one thread that runs a module of ours."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=os.environ | one_thread,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def _succeeded(
    process: "subprocess.Popen[bytes]", log: Path, what: str, folder: Path, say: Callable[[str], None]
) -> bool:
    """Whether a finished process did; if not, its log is kept in `folder` and its last line said."""
    if process.returncode == 0:
        return True
    kept = folder / f"{log.stem}.failed.log"
    kept.write_bytes(log.read_bytes())
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    say(f"failed  {what}: {lines[-1] if lines else f'status {process.returncode}'} (all of it: {kept})")
    return False


if __name__ == "__main__":
    th.set_num_threads(1)
    path, task, agent, seed, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run_once(load_study(path), Run(task, agent, int(seed)))), encoding="utf-8")
