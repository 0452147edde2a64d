"""The probe: forks an env on fresh instances and compares what follows, bit for bit."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl import registry
from grpo_rl.errors import ForkError
from grpo_rl.forks.families import rule_of
from grpo_rl.forks.live import live
from grpo_rl.forks.snapshot import (
    Support,
    capture,
    chain_name,
    distrust,
    fork_support,
    kinds,
    layers_of,
    own_snapshots,
    prepare,
    transfer,
    transfer_lasting,
    trust,
    unproven,
)
from grpo_rl.mujoco_log import quiet_build

_PERIOD, _LIMIT = 25, 40  # steps between forks and in an episode of the probe: neither divides the other


@dataclass(frozen=True)
class ForkReport:
    """What `probe_fork` found; as text, one line.

    Args:
        env: The env's id, or the names of its chain.
        exact: It can be forked by its type, and every compared step was bit-equal.
        how: As in `Support`.
        reason: As in `Support`, or what differed first.
        steps: Steps compared.
        cost_us: Median time of a `transfer` in µs.
        grows: A fork plays the episode again: that time is for the short episodes of the probe.
    """

    env: str
    exact: bool
    how: str
    reason: str
    steps: int = 0
    cost_us: float = float("nan")
    grows: bool = False

    def __str__(self) -> str:
        if not self.exact:
            return f"{self.env}: no exact forks: {self.reason}"
        cost = f"{self.cost_us:.0f} µs per fork" + ", more the older the episode" * self.grows
        return f"{self.env}: exact forks by {self.how}, {self.steps} steps bit-equal, {cost}"


def require_exact(env: gym.Env, build: Callable[[], gym.Env] | None = None) -> Support:
    """Raises ForkError, with the reason, unless `env` can be forked exactly.

    Known classes are trusted by their type. Others, and snapshots that an env brings itself, are probed on two fresh
    instances, never on `env` itself, and trusted in this process once they pass.

    Args:
        env: The env that is to be forked.
        build: Builds another one like it; without it the env's spec does. Where neither can, an env with snapshots of
            its own is taken at its word, and any other unknown one is refused.
    """
    support = fork_support(env)
    build = build or _rebuild(env)
    if support.probe and build is not None:
        report = probe_fork(build)
        if not report.exact:
            own, others = own_snapshots(env), unproven(env) - own_snapshots(env)
            names = " and ".join(sorted(cls.__name__ for cls in own))
            what = (
                f"get_snapshot and set_snapshot of {names} do not give an exact copy" if own and not others else _CANNOT
            )
            raise ForkError(f"{what}: {report.reason}", report.reason)
        support = replace(fork_support(env), probe=False)
    if not support.exact:
        raise ForkError(f"{_CANNOT}: {support.reason}", support.reason)
    return support


_CANNOT = "this env cannot be forked exactly"


def probe_fork(
    env: str | gym.Env | Callable[..., gym.Env], steps: int = 200, seed: int = 0, **env_kwargs: Any
) -> ForkReport:
    """Forks an env every 25 steps, across ends of episodes, and compares what follows bit for bit.

    Works on two fresh instances, never on the caller's own (it may be a real robot). Their time limits are cut to 40.
    Classes that pass are trusted in this process from then on: `capture` and `transfer` take them.

    Args:
        env: A registered id, a class or factory, or an env whose `spec` says how to build another one.
        steps: Random steps to compare.
        seed: Seeds resets and actions.
        env_kwargs: For `gym.make`, the class or the factory.

    Raises:
        ConfigError: An unknown id, or one whose env cannot be made.
    """
    if isinstance(env, gym.Env):
        support, build = fork_support(env), _rebuild(env, env_kwargs)
        if build is None or not (support.exact or support.probe):
            lacks = "it has no spec to build another one to probe from: pass its factory instead"
            reasons = ([] if support.exact else [support.reason]) + ([] if build else [lacks])
            return ForkReport(_name(env), False, "", "; ".join(reasons))
    else:
        build = functools.partial(registry.make, env) if isinstance(env, str) else env
        build = functools.partial(build, **env_kwargs)
    with quiet_build():
        original, copied = build(), build()
    trusted, exact = trust(unproven(original)), False
    try:
        support = fork_support(original)
        if not support.exact:
            return ForkReport(_name(original), False, "", support.reason)
        difference, cost_us = _compare(original, copied, steps, seed)
        difference = _goes_on(original) or difference
        exact = not difference
        return ForkReport(
            _name(original), exact, support.how, difference or support.reason, steps, cost_us, support.grows
        )
    except Exception as error:
        error.add_note("grpo_rl: raised by a fresh env while its forks were probed, by steps with sampled actions")
        raise
    finally:
        if not exact:
            distrust(trusted)
        original.close()
        copied.close()


def _name(env: gym.Env) -> str:
    spec = env.unwrapped.spec
    return chain_name(kinds(env)) if spec is None else spec.id


def _rebuild(env: gym.Env, env_kwargs: dict[str, Any] | None = None) -> Callable[[], gym.Env] | None:
    """Builds another env like this one from its spec; None where that would be another one, or there is no spec."""
    while isinstance(env, gym.Wrapper) and type(env).__module__.startswith("stable_baselines3."):
        env = env.env  # Monitor does not record how it was built
    try:
        spec = env.spec
        if spec is None or any(wrapper.kwargs is None for wrapper in spec.additional_wrappers):
            return None
    except (AttributeError, ValueError, TypeError):  # a wrapper that does not say how it was made
        return None
    return functools.partial(gym.make, spec, **(env_kwargs or {}))


def _compare(original: gym.Env, copied: gym.Env, steps: int, seed: int) -> tuple[str, float]:
    """Steps both with a fork every `_PERIOD` steps: the first difference in words, or "", and the median cost in µs."""
    rng, costs, space = np.random.default_rng(seed), [], copy.deepcopy(original.action_space)
    space.seed(seed)
    for env in (original, copied):
        prepare(env)
        for layer in layers_of(env):
            if isinstance(layer, gym.wrappers.TimeLimit):
                layer._max_episode_steps = min(layer._max_episode_steps, _LIMIT)

    def play(env: gym.Env, length: int) -> None:
        env.reset(seed=int(rng.integers(2**31)))
        for _ in range(length):
            if any(env.step(space.sample())[2:4]):
                env.reset(seed=int(rng.integers(2**31)))

    play(original, _PERIOD)
    for step in range(steps):
        age, action = step % _PERIOD, space.sample()
        if age == 0:
            play(copied, 3)
        try:
            if age == 0:
                start = time.perf_counter()
                transfer(original, copied)
                costs.append(1e6 * (time.perf_counter() - start))
                transfer_lasting(original, copied)  # or running statistics would make them differ
            right = copied.step(action)
        except Exception as error:
            failed = "the fork" if age == 0 else f"step {age + 1} after a fork"
            return f"{failed} raised {type(error).__name__}: {error}", float("nan")
        left = original.step(action)
        for what, a, b in zip(("observation", "reward", "terminated", "truncated"), left, right, strict=False):
            if not _same(a, b):
                where, a, b = _first_difference(what, a, b)
                found = f"{where} {age} steps after a fork: expected {a}, got {b}{_likely(original)}"
                return found, float(np.median(costs))
        if left[2] or left[3]:
            again = int(rng.integers(2**31))
            original.reset(seed=again)
            copied.reset(seed=again)
    return "", float(np.median(costs))


def _goes_on(env: gym.Env) -> str:
    """What an unproven layer holds that no copy can have, whatever the probe found, as a reason; "" if nothing."""
    for layer in layers_of(env):
        if type(layer) in unproven(env) - own_snapshots(env):
            own = rule_of(type(layer)).own
            if what := live({name: value for name, value in vars(layer).items() if name not in own}):
                return (
                    f"{type(layer).__name__} holds {what}, which goes on beside the env and cannot be copied: give it"
                    " get_snapshot() and set_snapshot(state), or use grouping='seed'"
                )
    return ""


def _likely(env: gym.Env) -> str:
    """The likely reason for a difference: what is not copied, and of which class, or else what no attribute holds."""
    snapshot = capture(env)
    kept = [
        f"{name} of {kind.__name__}"
        for kind, layer in zip(snapshot.kinds, snapshot.layers, strict=True)
        for name in sorted(layer.kept)
    ]
    if kept:
        return f" (not copied: {', '.join(kept)})"
    omitted = "does get_snapshot leave something out, or " if own_snapshots(env) else ""
    return f" ({omitted}does it draw from np.random, random or torch, or read a clock or a file?)"


def _first_difference(name: str, a: Any, b: Any) -> tuple[str, str, str]:
    """Where two values differ first, and both parts as short text."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        key = next(key for key in a if not _same(a[key], b[key]))
        return _first_difference(f"{name}[{key!r}]", a[key], b[key])
    left, right = np.asarray(a), np.asarray(b)
    if left.shape == right.shape and left.dtype == right.dtype and left.size > 10:
        index = np.unravel_index(np.flatnonzero(left.ravel() != right.ravel())[0], left.shape)
        at = ", ".join(map(str, index))
        return f"{name}[{at}]", str(left[index]), str(right[index])
    return name, str(a)[:200], str(b)[:200]


def _same(a: Any, b: Any) -> bool:
    """Bit-equal observations or scalars, part by part; NaN equals NaN."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    left, right = np.asarray(a), np.asarray(b)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
