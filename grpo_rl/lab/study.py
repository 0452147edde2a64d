"""A study: tasks × agents × seeds, described by one YAML file and rerun by one command (`grpo-rl bench`).

    description: what is asked
    seeds: [0, 1, 2]
    evaluation: {every: 20_000, episodes: 20, last: 3}       # steps between; episodes per kind; how many make the score
    baseline: sb3-ppo                                         # optional: the agent that others are compared with
    targets: {Hopper-v5: {score: 2000, within: 200_000}}      # optional
    tasks: {Hopper-v5: {environment: …, training: {steps: 300_000}}}
    agents: {ours: {optimization: …}, sb3-ppo: {class: "stable_baselines3:PPO", …}}

Tasks and agents are parts of recipes: a run is trained from the task's part (on top of the recipe that its `recipe`
names, if any) merged with the agent's. Each run has a process and a thread of its own; finished runs are kept in
runs.csv and are not repeated unless their settings change.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch as th
import yaml
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl.errors import ConfigError, did_you_mean
from grpo_rl.lab.build import build_agent, build_env, drivers, env_maker
from grpo_rl.lab.records import Row, Run, read_rows, write_rows
from grpo_rl.lab.run import evaluate, versions
from grpo_rl.recipes import PACKAGE, Recipe, check, find, label, make_recipe, merge, read_recipe, read_yaml, shipped


@dataclass
class Evaluation:
    """The protocol.

    Attributes:
        every: Steps between evaluations, or, below 1, their share of a task's steps; divides the steps of every task.
        episodes: On fresh environments: so many with the mode of the policy, and so many with sampled actions.
        last: How many evaluations at the end of a run make its score.
    """

    every: float
    episodes: int = 20
    last: int = 3

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
        protocol = (self.evaluation.every, self.evaluation.episodes)
        return hashlib.sha256(f"{recipe} {protocol}".encode()).hexdigest()[:8]

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
    for run in study.runs()[: len(study.tasks) * len(study.agents)]:  # the first seed's
        steps = study.recipe(run).training.steps
        every = study.evaluation.every
        if every <= 0 or round(steps / study.evaluation.interval(steps), 6) % 1:
            raise ConfigError(f"{source}, {run.task}: {steps:,} steps are no multiple of evaluation.every, {every:g}")
    return study


def bench(study: Study, folder: Path, jobs: int = 1, say: Callable[[str], None] = print) -> list[Row]:
    """Runs what is missing, keeping each run in runs.csv as it finishes. Returns all rows of the study.

    Args:
        study: Which runs.
        folder: Of runs.csv and machine.json; made if needed.
        jobs: Runs at the same time, one process with one thread each.
        say: Takes the lines for a person.
    """
    rows = finished(study, folder, say)
    done = {row.run for row in rows}
    missing = [run for run in study.runs() if run not in done]
    total = len(done) + len(missing)
    say(f"{study.name}: {len(done)} of {total} runs are there, {jobs} at a time")
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "machine.json").write_text(json.dumps(versions(), indent=2), encoding="utf-8")
    processes: dict[Run, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while missing or processes:
                while missing and len(processes) < jobs:
                    run = missing.pop(0)
                    processes[run] = _start(study, run, Path(scratch))
                time.sleep(0.1)
                for run in [run for run, process in processes.items() if process.poll() is not None]:
                    found = _collect(processes.pop(run), run, Path(scratch), folder, say)
                    if not found:
                        continue
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
    return rows


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

    def _on_step(self) -> bool:
        # Whole groups may run past the last step of the task: nothing is due there.
        step = round((len(self.numbers) + 1) * self.protocol.interval(self.recipe.training.steps))
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


def _start(study: Study, run: Run, scratch: Path) -> "subprocess.Popen[bytes]":
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with (scratch / f"{run.slug}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(study.path), *map(str, run), str(scratch / f"{run.slug}.json")],
            env=os.environ | one_thread,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _collect(
    process: "subprocess.Popen[bytes]", run: Run, scratch: Path, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """The rows of a finished process; none, and its log kept, if it failed."""
    log = scratch / f"{run.slug}.log"
    if process.returncode == 0:
        return [Row(*row) for row in json.loads((scratch / f"{run.slug}.json").read_text(encoding="utf-8"))]
    kept = folder / f"{run.slug}.failed.log"
    kept.write_bytes(log.read_bytes())
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    say(f"failed  {run}: {lines[-1] if lines else f'status {process.returncode}'} (all of it: {kept})")
    return []


if __name__ == "__main__":
    th.set_num_threads(1)
    path, task, agent, seed, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run_once(load_study(path), Run(task, agent, int(seed)))), encoding="utf-8")
