"""From a model to a state tree and back: what a run depends on, settings and code apart."""

import contextlib
import copy
import inspect
import random
import re
import types
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from grpo_rl.checkpoint.file import part, read_file
from grpo_rl.codec import NoCodec, decode, encode
from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.groups.forker import Forker

# What a model is built with, beside the arguments of its constructor, or what holds for one call of learn only.
_BUILT = frozenset(
    "policy_class observation_space action_space n_envs lr_schedule verbose start_time action_noise policy_kwargs"
    " _num_timesteps_at_start _stats_window_size _auto_n_steps groups _sampler".split()
)
_PARTS: dict[str, type] = dict.fromkeys("settings attributes parameters noise random log left_out".split(), dict)
_PARTS |= dict.fromkeys("normalizer curriculum sampler replay env".split(), object) | {"resets": bool, "reason": str}
"""What a checkpoint's tree has, and of which types."""
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def read_model(model: OnPolicyAlgorithm) -> dict[str, Any]:
    """The state tree of a model, between two iterations."""
    sampler, curriculum, replay = (getattr(model, name, None) for name in ("_sampler", "curriculum", "replay"))
    attributes = {name: value for name, value in _attributes(model).items() if not isinstance(value, _CODE)}
    tree: dict[str, Any] = {
        "settings": _settings(model),
        "attributes": attributes,
        "parameters": model.get_parameters(),
        "noise": _noise(model),
        "random": _read_random(model),
        "log": _read_log(model),
        "normalizer": _read_normalizer(model),
        "curriculum": None if curriculum is None else curriculum.state(),
        "sampler": None if sampler is None else sampler.state(),
        "replay": None if replay is None else replay.state(),
        "env": None,
        "resets": sampler is not None and sampler.plan.resets,
        "reason": "",
        "left_out": _without_form(attributes),
    }
    if tree["resets"] or model._last_obs is None:
        return tree
    try:
        tree["env"] = _forker(model).state()
    except ForkError as error:
        tree["reason"], tree["sampler"] = error.reason, None
    return tree


def write_model(model: OnPolicyAlgorithm, tree: dict[str, Any], path: Path) -> None:
    """Puts the model into the state of a tree; ConfigError where that does not fit it."""
    try:
        if tree["normalizer"] is not None:
            vars(model._vec_normalize_env).update(copy.deepcopy(tree["normalizer"]))
        model.set_parameters(tree["parameters"], exact_match=True, device=model.device)
        _write_attributes(model, tree["attributes"])
        for name, value in tree["noise"].items():
            setattr(model.policy.action_dist, name, value.to(model.device))
        _write_log(model, tree["log"])
        if tree["curriculum"] is not None:
            model.curriculum.set_state(tree["curriculum"])  # type: ignore[attr-defined]
        if tree.get("replay") is not None:
            model.replay.set_state(tree["replay"], model.rollout_buffer)  # type: ignore[attr-defined]
        if tree["env"] is not None:
            _forker(model).set_state(tree["env"])
        if not is_exact(tree) or model._last_obs is None:
            _reset_seeded(model)
        elif getattr(model, "_sampler", None) is not None:
            model._sampler.set_state(tree["sampler"])  # type: ignore[attr-defined]
        write_random(tree["random"])
    except ConfigError as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{path} does not fit this {type(model).__name__}: {what}") from error
    except Exception as error:  # whatever a tree with the right digest and the wrong things in it may cause
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{path} does not fit this {type(model).__name__}, was it built as then? {what}") from error


def _read_checkpoint(model: OnPolicyAlgorithm, path: Path) -> dict[str, Any]:
    """The tree of a file, checked against `model`, whose env names the classes that it may hold."""
    text, arrays = read_file(path)
    for name, here in _settings(model).items():
        if (there := part(text, "settings", path).get(name)) != here:
            was, now = _brief(there), _brief(here)
            others = " with other bounds" if was == now else ""
            raise ConfigError(
                f"{path}: the checkpoint's {name} is {was}, here it is {now}{others}: build the model as it was"
            )
    live = None
    if model.env is not None:
        if model._last_obs is None:
            model._last_obs = model.env.reset()  # type: ignore[assignment]
        with contextlib.suppress(ForkError):  # then the checkpoint holds no state of it, or that of another env
            live = _forker(model).state()
    try:
        tree = decode(text, arrays, live)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    for name, kind in _PARTS.items():
        if not isinstance(tree.get(name, _PARTS), kind):
            raise ConfigError(f"{path} is no checkpoint of a model: its {name} is a {type(tree.get(name)).__name__}")
    return tree


def load(model: OnPolicyAlgorithm, path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """What `load_checkpoint` does; returns the tree."""
    tree = _read_checkpoint(model, path)
    write_model(model, tree, path)
    for name, reason in tree["left_out"].items():
        say(f"{name} of {type(model).__name__} is not in the checkpoint ({reason}): set it again")
    if not is_exact(tree):
        say(f"the run goes on from a seeded reset, not bit for bit: {tree['reason']}")
    return tree


def is_exact(tree: dict[str, Any]) -> bool:
    """Whether the state of the env is there, or not needed: the next rollout starts with a reset anyway."""
    return tree["env"] is not None or tree["resets"] or tree["attributes"].get("_last_obs") is None


def _settings(model: OnPolicyAlgorithm) -> dict[str, Any]:
    """What must be alike for a checkpoint to make sense, as text and numbers."""
    groups = getattr(model, "groups", None)
    return {
        "class": type(model).__qualname__,
        "policy": type(model.policy).__qualname__,
        "observation space": str(model.observation_space),
        "action space": str(model.action_space),
        "number of envs": model.n_envs,
        "group size": getattr(model, "group_size", None),
        "kind of groups": None if groups is None else f"{groups.kind}, by {groups.means}",
        "rollouts that train": None if getattr(model, "replay", None) is None else model.reuse,  # type: ignore[attr-defined]
        "VecNormalize": model._vec_normalize_env is not None,
        "curriculum": getattr(model, "curriculum", None) is not None,
        "vocabulary of the tokenizer": getattr(model.policy, "vocabulary", None),
    }


def _brief(setting: Any) -> str:
    """A setting in one short line: of a space its class, shape and dtype, without the arrays of its bounds."""
    text = re.sub(r"Box\(.*?, (\([\d, ]*\)), (\w+)\)", r"Box(\1, \2)", str(setting), flags=re.DOTALL)
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def _attributes(model: OnPolicyAlgorithm) -> dict[str, Any]:
    """What changes in training: all that SB3's `save` keeps of an object but the arguments of its constructor."""
    apart = {
        *model._excluded_save_params(),
        *_BUILT,
        *(name.split(".")[0] for name in model._get_torch_save_params()[0]),
    }
    for cls in type(model).__mro__:
        if "__init__" in vars(cls):
            apart |= inspect.signature(vars(cls)["__init__"]).parameters.keys()
    return {name: value for name, value in vars(model).items() if name not in apart}


def _write_attributes(model: OnPolicyAlgorithm, attributes: dict[str, Any]) -> None:
    here = _attributes(model)
    for name, value in attributes.items():
        if name not in here:
            raise ConfigError(f"the checkpoint holds {str(name)[:80]}, which {type(model).__name__} does not have")
        _check_alike(name, here[name], value)
        setattr(model, name, copy.deepcopy(value))
    starts = model._last_episode_starts
    if starts is not None and getattr(starts, "shape", None) != (model.n_envs,):
        raise ConfigError(
            f"the checkpoint's _last_episode_starts: expected ({model.n_envs},) booleans, got {starts!r:.80}"
        )
    for name in ("ep_info_buffer", "ep_success_buffer"):
        if not isinstance(getattr(model, name), deque | None):
            raise ConfigError(f"the checkpoint's {name}: expected a deque, got {getattr(model, name)!r:.80}")


def _check_alike(name: str, here: Any, value: Any) -> None:
    """Raises ConfigError where an attribute is of another kind than that of the model, as far as this one tells."""
    if isinstance(here, dict) and isinstance(value, dict) and name == "_last_obs":
        for key, array in here.items():
            _check_alike(name, array, value.get(key))
    elif isinstance(here, np.ndarray) and value is not None:
        expected, got = (here.shape, here.dtype), (getattr(value, "shape", None), getattr(value, "dtype", None))
        if expected != got:
            raise ConfigError(f"the checkpoint's {name}: expected an array {expected}, got {value!r:.80}")
    elif isinstance(here, bool | int | float | str | list | dict) and type(value) is not type(here):
        raise ConfigError(f"the checkpoint's {name}: expected {type(here).__name__}, got {type(value).__name__}")


def _without_form(attributes: dict[str, Any]) -> dict[str, str]:
    """Takes out the attributes that cannot be written: their names, and why."""
    left_out = {}
    for name, value in list(attributes.items()):
        try:
            encode(value)
        except NoCodec as error:
            left_out[name] = str(error)
            del attributes[name]
    return left_out


def _noise(model: OnPolicyAlgorithm) -> dict[str, th.Tensor]:
    """The exploration noise of gSDE, drawn before a rollout begins."""
    names = ("exploration_mat", "exploration_matrices")
    found = {name: getattr(getattr(model.policy, "action_dist", None), name, None) for name in names}
    return {name: value.detach() for name, value in found.items() if value is not None}


def _read_normalizer(model: OnPolicyAlgorithm) -> dict[str, Any] | None:
    normalizer = model._vec_normalize_env
    names = ("obs_rms", "ret_rms", "returns")
    return (
        None if normalizer is None else {name: getattr(normalizer, name) for name in names if hasattr(normalizer, name)}
    )


def _read_log(model: OnPolicyAlgorithm) -> dict[str, Any]:
    """What was recorded and waits for the next row of the log."""
    logger = getattr(model, "_logger", None)
    if logger is None:
        return {}
    waiting = {
        key: value for key, value in logger.name_to_value.items() if isinstance(value, int | float | str | np.number)
    }
    return {key: (value, logger.name_to_count[key], logger.name_to_excluded.get(key)) for key, value in waiting.items()}


def _write_log(model: OnPolicyAlgorithm, log: dict[str, Any]) -> None:
    logger = getattr(model, "_logger", None)
    if logger is None:
        return
    for key, (value, count, excluded) in log.items():
        logger.name_to_value[key], logger.name_to_count[key] = value, count
        if excluded is not None:
            logger.name_to_excluded[key] = excluded


def _read_random(model: OnPolicyAlgorithm) -> dict[str, Any]:
    cuda = th.cuda.is_available() and th.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": th.get_rng_state(),
        "cuda": th.cuda.get_rng_state_all() if cuda else [],
    }


def write_random(states: dict[str, Any]) -> None:
    """Sets the generators of Python, numpy and torch."""
    random.setstate(states["python"])
    if not 0 <= states["numpy"][2] <= 624:
        raise ConfigError("the checkpoint's random state has no place in it: NumPy would read beyond it")
    np.random.set_state(states["numpy"])
    th.set_rng_state(states["torch"])
    if len(states["cuda"]) == th.cuda.device_count() > 0:
        th.cuda.set_rng_state_all(states["cuda"])


def _reset_seeded(model: OnPolicyAlgorithm) -> None:
    """A fresh start of every env, another one than the run's first; `learn` resets, as it finds no observation."""
    assert model.env is not None
    seed = model.seed
    if model.num_timesteps:
        seed = int(np.random.SeedSequence([model.seed or 0, model.num_timesteps]).generate_state(1)[0]) // 2
    model.env.seed(seed)
    model._last_obs = None


_forkers: weakref.WeakKeyDictionary[VecEnv, Forker | ForkError] = weakref.WeakKeyDictionary()


def _forker(model: OnPolicyAlgorithm) -> Forker:
    """What reads and writes the state of the model's env: that of its groups, or one of its own, made once.

    Raises:
        ForkError: The state cannot be read.
    """
    groups, env = getattr(model, "groups", None), model.env
    assert env is not None
    if groups is not None and groups.forker is not None:
        return groups.forker
    if env not in _forkers:
        before = np.random.get_state()
        try:
            _forkers[env] = Forker(env)
        except ForkError as error:
            _forkers[env] = error
        finally:
            np.random.set_state(before)
    found = _forkers[env]
    if isinstance(found, ForkError):
        raise found
    return found
