"""One run: train an agent from a recipe, keep what is needed to look at it later, evaluate it on fresh episodes.

A run's folder holds model.zip, recipe.yaml (as it was resolved), progress.csv and TensorBoard events, curve.png,
evaluation.json, versions.json and, where a renderer works, episode.gif; from its first second, checkpoint.safetensors.
"""

import contextlib
import io
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch as th
import yaml
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

import grpo_rl
from grpo_rl.checkpoint import checkpoint_steps, load_checkpoint
from grpo_rl.errors import ConfigError
from grpo_rl.lab.build import CHECKPOINT, build_agent, build_env, env_maker, read_run, seen_by
from grpo_rl.lab.completions import COMPLETIONS
from grpo_rl.lab.film import film
from grpo_rl.lab.health import draw, examine, read_log
from grpo_rl.lab.logs import open_logs
from grpo_rl.lab.plots import plot_runs, read_progress
from grpo_rl.lab.training import RunStopped, Say, command, train
from grpo_rl.lab.wandb_log import log_to_wandb, require_wandb
from grpo_rl.mujoco_log import log_into
from grpo_rl.recipes import Recipe, check_name
from grpo_rl.text.vec_env import is_text


class Episodes(NamedTuple):
    """Returns and lengths (E,) of evaluation episodes."""

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]


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
        RunStopped: Ctrl-C, an error of the agent or its environment in training, or a full disk after it.
    """
    check_name(recipe.name, recipe.source)
    require_wandb(recipe)
    env = build_env(recipe)
    try:
        agent = build_agent(recipe, env)
        run = _new_folder(folder / f"{recipe.name}-{recipe.training.seed}-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            (run / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
            _write_versions(run, versions() | {"recipe": _settings(recipe)})
        except OSError as error:
            raise ConfigError(
                f"cannot write to {run}: {error.strerror or error}; nothing was trained: make room, or another --out"
            ) from None
        log_into(run)
        agent.set_logger(open_logs(run, say=say))
        log_to_wandb(agent, run, recipe, say)
        where, plan = recipe.environment.id or recipe.environment.class_, recipe.training
        say(f"{recipe.name}: {plan.steps:,} steps of {where}, seed {plan.seed}, into {run}")
        _train(agent, recipe, run, say)
    finally:
        env.close()
    _finish(agent, recipe, run, say)
    return run


def resume_run(run: Path, steps: int | None = None, say: Say = print) -> Path:
    """Goes on with a run that was stopped, from its checkpoint, as if it had never stopped.

    Args:
        run: Its folder.
        steps: In all, where they should be more than the recipe's; the folder's recipe.yaml is changed accordingly.
        say: Takes the lines for a person.

    Returns:
        The run's folder.

    Raises:
        ConfigError: No run, no checkpoint, or one that does not fit; or fewer steps than were made.
        RunStopped: As `train_run`.
    """
    recipe = read_run(run)
    done = checkpoint_steps(run / CHECKPOINT)
    if steps is not None and steps != recipe.training.steps:
        if steps <= done:
            raise ConfigError(f"--steps: {run} has made {done:,} steps, expected more than that in all, got {steps:,}")
        say(
            f"{steps:,} steps where {recipe.training.steps:,} were planned: schedules over progress change their course"
        )
        recipe.training.steps = steps
    plan = recipe.training
    if done >= plan.steps and _evaluated(run) >= plan.steps:
        say(
            f"{run} is finished: {done:,} steps of {plan.steps:,};"
            f" {command('resume', run)} --steps N trains on, up to N"
        )
        return run
    require_wandb(recipe)
    env = build_env(recipe)
    try:
        agent = build_agent(recipe, env)
        load_checkpoint(agent, run / CHECKPOINT, (lambda line: None) if done < plan.steps else say)
        if done < plan.steps:
            say(f"{recipe.name}: on from {done:,} of {plan.steps:,} steps, in {run}")
        else:
            say(f"{recipe.name}: all of {plan.steps:,} steps are made, what follows the last one comes now, in {run}")
        before = _versions_before(run)
        if steps is not None and isinstance(before.get("recipe"), dict):  # as was said above
            before["recipe"]["training.steps"] = steps
        if edited := _edited(before, recipe):
            say(f"recipe.yaml is not what the run began with: {edited}")
        if changed := _changed_versions(before):
            say(f"not bit for bit, perhaps: {changed}")
        if done < plan.steps:
            try:
                _write_whole(run / "recipe.yaml", recipe.to_yaml())
                if steps is not None and before:
                    _write_versions(run, before)
            except OSError as error:
                raise ConfigError(
                    f"cannot write to {run}: {error.strerror or error}; make room, then: {command('resume', run)}"
                ) from None
            log_into(run)
            agent.set_logger(open_logs(run, after=done, say=say))
            log_to_wandb(agent, run, recipe, say)
            _train(agent, recipe, run, say, again=True)
    finally:
        env.close()
    _finish(agent, recipe, run, say)
    return run


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
        with th.random.fork_rng(devices=[]), _numpy_seed(seed):  # language models sample by numpy's
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


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """NumPy's global generator begins at `seed`, and is afterwards as it was."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def evaluate_run(run: Path, agent: BaseAlgorithm, recipe: Recipe, say: Say = print) -> dict[str, Any]:
    """Evaluates with the mode and with sampled actions, on seeds that training has not seen; writes evaluation.json."""
    log_into(run)
    seed = 1_000_000 + recipe.training.seed
    result: dict[str, Any] = {"episodes": recipe.training.episodes, "seed": seed, "steps": agent.num_timesteps}
    for name, deterministic in (("mode", True), ("sampled", False)):
        episodes, see = recipe.training.episodes, seen_by(agent)
        played = evaluate(agent, env_maker(recipe.environment), episodes, deterministic, seed, see)
        mean, std = float(played.returns.mean()), float(played.returns.std())
        result[name] = {
            "mean": mean,
            "std": std,
            "returns": played.returns.tolist(),
            "lengths": played.lengths.tolist(),
        }
        digits = 3 if is_text(agent) else 1  # rewards of completions are mostly shares
        say(f"{len(played.returns)} episodes, {name} actions: {mean:.{digits}f} ± {std:.{digits}f}")
    _write_whole(run / "evaluation.json", json.dumps(result, indent=2))
    return result


def curve(run: Path, evaluation: dict[str, Any] | None = None) -> None:
    """Draws curve.png from progress.csv, with the final scores where they are known."""
    marks = {run.name: {name: evaluation[name]["mean"] for name in ("mode", "sampled")}} if evaluation else None
    plot_runs({run.name: read_progress(run)}, run / "curve.png", marks)


LANGUAGE = ("transformers", "tokenizers", "peft")
"""Packages that a run of a language model depends on, too."""


def versions(*more: str) -> dict[str, Any]:
    """Python, the packages that matter, those of `LANGUAGE` that this process has imported, `more`, and the machine."""
    packages = {"grpo_rl": grpo_rl.__version__}
    imported = [name for name in LANGUAGE if name in sys.modules]
    for name in dict.fromkeys(("gymnasium", "mujoco", "numpy", "stable_baselines3", "torch", *imported, *more)):
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


def _train(agent: OnPolicyAlgorithm, recipe: Recipe, run: Path, say: Say, again: bool = False) -> None:
    if hasattr(agent, "groups"):
        say(str(agent.groups))
    try:
        train(agent, recipe.training.steps, run, say, again)
    except RunStopped:
        with contextlib.suppress(OSError):  # a full disk must not hide why it stopped
            _curve_if_any(run)
        raise


def _finish(agent: OnPolicyAlgorithm, recipe: Recipe, run: Path, say: Say) -> None:
    """What comes after the last step: the model, its evaluation, pictures; RunStopped where they cannot be written."""
    model = io.BytesIO()  # torch has errors of its own for a disk that is full
    agent.save(model)
    try:
        _write_whole(run / "model.zip", model.getvalue())
        evaluation = evaluate_run(run, agent, recipe, say)
        if read_log(run):
            curve(run, evaluation)
            draw(run, examine(run))
    except OSError as error:
        what = error.strerror or " ".join(str(error).split())
        raise RunStopped(
            f"trained {agent.num_timesteps:,} steps, but {error.filename or run} cannot be written: {what};"
            f" {_after_room(agent, run)}"
        ) from error
    if is_text(agent):
        say(f"completions to read: {run / COMPLETIONS}")
    else:
        reason = film(run, run / "episode.gif", trust=True)  # the agent's file is this program's own
        say(f"no GIF: {reason}" if reason else f"a film of one episode: {run / 'episode.gif'}")
    logs = shlex.quote(str(run.parent))
    say(f"look at it again: {command('evaluate', run)} | {command('play', run)} | tensorboard --logdir {logs}")


def _after_room(agent: OnPolicyAlgorithm, run: Path) -> str:
    """What to do where the disk was full after the last step."""
    try:
        done = checkpoint_steps(run / CHECKPOINT)
    except ConfigError:
        return "there is no checkpoint of it: make room and train again"
    how = "finishes it" if done >= agent.num_timesteps else f"goes on from its checkpoint of {done:,} steps"
    return f"make room, then {command('resume', run)} {how}"


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's settings by their names on the command line, such as optimization.learning_rate."""
    waiting, found = list(yaml.safe_load(recipe.to_yaml()).items()), {}
    for name, value in waiting:
        if isinstance(value, dict) and value:
            waiting += [(f"{name}.{key}", item) for key, item in value.items()]
        else:
            found[name] = value
    return found


def _edited(before: dict[str, Any], recipe: Recipe) -> str:
    """Which settings are not those that the run began with, in words."""
    then = before.get("recipe")
    if not isinstance(then, dict):  # a run of an older version
        return ""
    now = json.loads(json.dumps(_settings(recipe), default=str))
    names = [name for name in {**then, **now} if then.get(name, ...) != now.get(name, ...)]
    names = [name for name in names if name not in ("name", "description")]

    def text(settings: dict[str, Any], name: str) -> str:
        return f"{settings[name]!s:.60}" if name in settings else "not there"

    return ", ".join(f"{name} was {text(then, name)}, is {text(now, name)}" for name in names)


def _versions_before(run: Path) -> dict[str, Any]:
    """What versions.json says: the versions, and under "recipe" the settings, with which the run began."""
    try:
        found = json.loads((run / "versions.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_versions(run: Path, content: dict[str, Any]) -> None:
    _write_whole(run / "versions.json", json.dumps(content, indent=2, default=str))


def _changed_versions(before: dict[str, Any]) -> str:
    """What numbers depend on and is not as it was when the run began, in words.

    What an older grpo_rl has not written down is not compared.
    """
    here = versions()
    names = [name for name in here if name != "cores" and before.get(name, here[name]) != here[name]]
    return ", ".join(f"{name} was {before[name]}, is {here[name]}" for name in names)


def _evaluated(run: Path) -> int:
    """The steps of the agent whose evaluation is there."""
    try:
        return int(json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is whole or, after an OSError, as it was."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


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
    """E observations as one batch: an array, a dict of arrays, or a list of texts."""
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    if isinstance(observations[0], str):
        return observations  # an array of them would forget their ids
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
