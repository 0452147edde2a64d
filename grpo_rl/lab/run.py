"""One run: train an agent from a recipe, keep what is needed to look at it later, evaluate it on fresh episodes.

A run's folder holds model.zip, recipe.yaml (as it was resolved), progress.csv and TensorBoard events, curve.png,
evaluation.json, versions.json and, where a renderer works, episode.gif; while it trains, its checkpoint latest.zip.
"""

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch as th
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import safe_mean

import grpo_rl
from grpo_rl.errors import ConfigError, GRPOError
from grpo_rl.lab.build import build_agent, build_env, load_agent, make_env
from grpo_rl.lab.film import film
from grpo_rl.lab.plots import plot_runs, read_progress
from grpo_rl.progress import ProgressBar
from grpo_rl.recipes import Recipe, load_recipe

CHECKPOINTS = 10
"""Checkpoints over a run."""

Say = Callable[[str], None]


class Episodes(NamedTuple):
    """Returns and lengths (E,) of evaluation episodes."""

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]


class RunStopped(GRPOError):
    """Training ended before its last step; the message, one line, says why and where the last checkpoint is."""


def train_run(recipe: Recipe, folder: Path = Path("runs"), say: Say = print) -> Path:
    """Trains a recipe and fills a new folder `<name>-<seed>-<time>` in `folder`.

    Args:
        recipe: What to train.
        folder: Made if needed.
        say: Takes the lines for a person.

    Returns:
        The run's folder.

    Raises:
        ConfigError: The recipe cannot be built.
        RunStopped: Ctrl-C, or an error of the agent or its environment in training.
    """
    env = build_env(recipe)
    try:
        agent = build_agent(recipe, env)
        run = _new_folder(folder / f"{recipe.name}-{recipe.training.seed}-{time.strftime('%Y%m%d-%H%M%S')}")
        (run / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        (run / "versions.json").write_text(json.dumps(versions(), indent=2), encoding="utf-8")
        agent.set_logger(configure(str(run), ["csv", "tensorboard"]))
        where, plan = recipe.environment.id or recipe.environment.class_, recipe.training
        say(f"{recipe.name}: {plan.steps:,} steps of {where}, seed {plan.seed}, into {run}")
        if hasattr(agent, "groups"):
            say(str(agent.groups))
        _learn(agent, recipe, run, say)
    finally:
        env.close()
    _save(agent, run / "model.zip")
    (run / "latest.zip").unlink(missing_ok=True)
    evaluation = evaluate_run(run, agent, recipe, say)
    curve(run, evaluation)
    reason = film(run, run / "episode.gif")
    say(f"no GIF: {reason}" if reason else f"a film of one episode: {run / 'episode.gif'}")
    say(f"look at it again: grpo-rl evaluate {run} | grpo-rl play {run} | tensorboard --logdir {folder}")
    return run


def open_run(path: Path) -> tuple[Recipe, BaseAlgorithm]:
    """The recipe and the agent of a run's folder: model.zip, or the last checkpoint of a run that did not finish.

    Raises:
        ConfigError: No such folder, or nothing that can be loaded in it.
    """
    if not (path / "recipe.yaml").is_file():
        near = f"; runs there: {', '.join(sorted(p.parent.name for p in path.parent.glob('*/recipe.yaml'))) or 'none'}"
        raise ConfigError(f"{path} is no run: expected a folder with a recipe.yaml, such as runs/hopper-0-…{near}")
    recipe = load_recipe(path / "recipe.yaml")
    for name in ("model.zip", "interrupted.zip", "latest.zip"):
        if (path / name).is_file():
            return recipe, load_agent(recipe, path / name)
    raise ConfigError(f"{path} holds no saved agent (model.zip, interrupted.zip or latest.zip)")


def evaluate(
    agent: BaseAlgorithm,
    make: Callable[[], gymnasium.Env],
    episodes: int,
    deterministic: bool,
    seed: int,
    normalize: Callable[[Any], Any] = lambda obs: obs,
) -> Episodes:
    """Plays one episode in each of `episodes` fresh environments, side by side, and leaves the agent as it was.

    Args:
        agent: Anything with SB3's `predict`.
        make: Makes one environment.
        episodes: E.
        deterministic: The mode of the policy, or sampled actions.
        seed: Of the sampled actions and, counting up, of the environments. Training's random numbers are not touched.
        normalize: Applied to observations (n, ...): a VecNormalize's `normalize_obs`, which moves no statistics.
    """
    envs = [make() for _ in range(episodes)]
    returns, lengths = np.zeros(episodes), np.zeros(episodes, dtype=np.int64)
    try:
        obs = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
        running = list(range(episodes))
        with th.random.fork_rng(devices=[]):
            th.manual_seed(seed)
            while running:
                actions, _ = agent.predict(normalize(_stack([obs[i] for i in running])), deterministic=deterministic)
                for i, action in zip(list(running), actions, strict=True):
                    obs[i], reward, terminated, truncated, _ = envs[i].step(action)
                    returns[i] += float(reward)
                    lengths[i] += 1
                    if terminated or truncated:
                        running.remove(i)
    finally:
        for env in envs:
            env.close()
    return Episodes(returns, lengths)


def evaluate_run(run: Path, agent: BaseAlgorithm, recipe: Recipe, say: Say = print) -> dict[str, Any]:
    """Evaluates with the mode and with sampled actions, on seeds that training has not seen; writes evaluation.json."""
    seed = 1_000_000 + recipe.training.seed
    result: dict[str, Any] = {"episodes": recipe.training.episodes, "seed": seed, "steps": agent.num_timesteps}
    for name, deterministic in (("mode", True), ("sampled", False)):
        played = evaluate(agent, lambda: make_env(recipe.environment), recipe.training.episodes, deterministic, seed)
        mean, std = float(played.returns.mean()), float(played.returns.std())
        result[name] = {
            "mean": mean,
            "std": std,
            "returns": played.returns.tolist(),
            "lengths": played.lengths.tolist(),
        }
        say(f"{len(played.returns)} episodes, {name} actions: {mean:.1f} ± {std:.1f}")
    (run / "evaluation.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    return result


def curve(run: Path, evaluation: dict[str, Any] | None = None) -> None:
    """Draws curve.png from progress.csv, with the final scores where they are known."""
    marks = {run.name: {name: evaluation[name]["mean"] for name in ("mode", "sampled")}} if evaluation else None
    plot_runs({run.name: read_progress(run)}, run / "curve.png", marks)


def versions() -> dict[str, Any]:
    """Python, the packages that matter, and the machine."""
    packages = {"grpo_rl": grpo_rl.__version__}
    for name in ("gymnasium", "mujoco", "numpy", "stable_baselines3", "torch"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": platform.python_version(),
        **packages,
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


class Checkpoints(BaseCallback):
    """Saves latest.zip ten times over a run, whole or not at all, and reports progress where there is no bar."""

    def __init__(self, run: Path, steps: int, say: Say | None) -> None:
        super().__init__()
        self.run, self.steps, self.say = run, steps, say
        self.next = self.every = max(steps // CHECKPOINTS, 1)

    def _on_rollout_end(self) -> None:
        # Between sampling and update: the policy that sampled this rollout is whole and finite.
        if self.num_timesteps < self.next:
            return
        self.next = (self.num_timesteps // self.every + 1) * self.every
        _save(self.model, self.run / "latest.zip")
        if self.say is not None:
            done = min(self.num_timesteps / self.steps, 1)
            score = safe_mean([episode["r"] for episode in self.model.ep_info_buffer or []])
            self.say(f"{done:4.0%}  {self.num_timesteps:>10,} steps  mean return {score:.1f}")

    def _on_step(self) -> bool:
        return True


def _learn(agent: BaseAlgorithm, recipe: Recipe, run: Path, say: Say) -> None:
    bar = sys.stderr.isatty()
    callbacks: list[BaseCallback] = [Checkpoints(run, recipe.training.steps, None if bar else say)]
    try:
        with _progress_bar(callbacks) if bar else _nothing():
            agent.learn(recipe.training.steps, callback=callbacks)
    except KeyboardInterrupt as stop:
        _save(agent, run / "interrupted.zip")
        _curve_if_any(run)
        raise RunStopped(
            f"interrupted after {agent.num_timesteps:,} steps; the agent is saved: grpo-rl evaluate {run}, "
            f'or {type(agent).__name__}.load("{run / "interrupted.zip"}")'
        ) from stop
    except Exception as error:
        (run / "error.log").write_text(traceback.format_exc(), encoding="utf-8")
        _curve_if_any(run)
        last = run / "latest.zip"
        kept = f"the last checkpoint is {last}" if last.is_file() else "there was no checkpoint yet"
        name = "" if isinstance(error, GRPOError) else f"{type(error).__name__}: "
        what = " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())
        raise RunStopped(f"{name}{what} (traceback in {run / 'error.log'}; {kept})") from error
    finally:
        agent.logger.close()


@contextmanager
def _progress_bar(callbacks: list[BaseCallback]) -> Iterator[None]:
    """A bar that is closed after an exception too: it hides the cursor."""
    bar = ProgressBar()
    callbacks.append(bar)
    try:
        yield
    finally:
        if hasattr(bar, "pbar"):
            bar.pbar.close()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _save(agent: BaseAlgorithm, path: Path) -> None:
    """Saves an agent so that `path` is always a whole file: the old one or the new one."""
    draft = path.with_name(f".{path.name}")
    agent.save(draft)
    draft.replace(path)


def _curve_if_any(run: Path) -> None:
    if (run / "progress.csv").is_file() and (run / "progress.csv").stat().st_size:
        curve(run)


def _new_folder(path: Path) -> Path:
    """Makes `path`, or `path-2`, `path-3` … if it is taken."""
    for i in range(1, 1000):
        candidate = path if i == 1 else path.with_name(f"{path.name}-{i}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot write to {candidate}: {error.strerror}") from None
        return candidate
    raise ConfigError(f"{path} and 998 folders of that name exist")


def _stack(observations: list[Any]) -> Any:
    """E observations as one batch: an array, or a dict of arrays."""
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)


def _cpu() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
