"""Recorders, for simulators whose state cannot be read: what a fork needs is noted while the env runs.

- Box2D worlds cannot be copied. `Recorder` notes the start of the episode and its actions, and a fork plays them again.
- ALE does not tell which action is stuck in it (`repeat_action_probability`). `TrackedALE` follows the emulator's own
  random generator, so that it knows.

Both hang on one instance of an env, hold for that instance alone and do not change its type.
"""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import numpy as np

from grpo_rl.errors import ForkError
from grpo_rl.forks.copying import ATOMS

# ---------------------------------------------------------------------------------------------------------- Box2D


def plain_attributes(env: Any, left_out: frozenset[str]) -> dict[str, Any]:
    """The numbers, strings and arrays among an env's attributes, copied: its settings, and what it counts."""
    found = {}
    for name, value in vars(env).items():
        if name in left_out:
            continue
        if type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value))):
            found[name] = value
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            found[name] = value.copy()
    return found


class Recorder:
    """Notes, from the next reset of an env on, all that its course depends on: `start`, `actions` and `draws`.

    A reset gets a new Box2D world, as that of LunarLander has by itself. CarRacing and BipedalWalker keep theirs, and
    what an earlier episode left there makes BipedalWalker start differently after the same seed.

    Attributes:
        start: The env's settings and generator before the last reset, and its arguments; None before the first one.
        actions: Those of all steps since.
        draws: {number of the step: state of the generator before it}, where others drew numbers between two steps.
    """

    def __init__(self, env: Any, left_out: frozenset[str]) -> None:
        self.env = env
        self.left_out = left_out
        self.start: dict[str, Any] | None = None
        self.actions: list[Any] = []
        self.draws: dict[int, dict[str, Any]] = {}
        self._after: dict[str, Any] = {}
        self._silent = False  # inside a reset, which may step: CarRacing's does
        self._step, self._reset = env.step, env.reset
        env.step, env.reset, env._recorder = self.step, self.reset, self

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        start = {
            "settings": plain_attributes(self.env, self.left_out),
            "rng": self._rng_state(),
            "arguments": copy.deepcopy({"seed": seed, "options": options}),
        }
        self.start, self.actions, self.draws = None, [], {}
        self._new_world()
        self._silent = True
        try:
            result = self._reset(seed=seed, options=options)
        finally:
            self._silent = False
        self.start, self._after = start, self._rng_state()
        return result

    def step(self, action: Any) -> Any:
        if self._silent or self.start is None:
            return self._step(action)
        state = self._rng_state()
        if state != self._after:
            self.draws[len(self.actions)] = state
        self.actions.append(copy.copy(action))
        result = self._step(action)
        self._after = self._rng_state()
        return result

    def play(self, start: dict[str, Any], actions: list[Any], draws: dict[int, dict[str, Any]]) -> None:
        """Brings the env to where a recorded course ended, by its reset and its actions, without drawing a frame."""
        self._new_world()
        vars(self.env).update(copy.deepcopy(start["settings"]))
        self._set_rng(start["rng"])
        mode, self.env.render_mode = self.env.render_mode, None
        self.env._render = lambda *_: None  # CarRacing draws its observations, which takes 99 % of a step
        try:
            self.reset(**start["arguments"])
            for number, action in enumerate(actions):
                if number in draws:
                    self._set_rng(draws[number])
                self._step(action)
        finally:
            del self.env._render
            self.env.render_mode = mode
        self.actions, self.draws, self._after = list(actions), dict(draws), self._rng_state()

    def _new_world(self) -> None:
        world = getattr(self.env, "world", None)
        if world is not None:
            self.env._destroy()
            self.env.world = type(world)(gravity=world.gravity)

    def _rng_state(self) -> dict[str, Any]:
        return self.env.np_random.bit_generator.state

    def _set_rng(self, state: dict[str, Any]) -> None:
        self.env._np_random = np.random.Generator(getattr(np.random, state["bit_generator"])())
        self.env._np_random.bit_generator.state = state


# ------------------------------------------------------------------------------------------------------------- ALE

# In ALE's serialised state: the text of a std::mt19937, 624 words and a position. That of the env comes last.
_MT19937 = re.compile(rb"(?:\d+ ){624}\d+")
_NOOP = (0, 1.0)


def _rng_span(state: bytes) -> tuple[int, int]:
    found = list(_MT19937.finditer(state))
    if len(found) != 2:
        raise ForkError("the state of this version of ALE is not understood: it does not hold two generators")
    return found[-1].span()


def _generator(state: bytes) -> np.random.MT19937:
    """The emulator's generator for sticky actions, in numpy: it gives the same 32-bit numbers."""
    first, last = _rng_span(state)
    words = np.array(state[first:last].split(), dtype=np.uint64)
    generator = np.random.MT19937()
    generator.state = {
        "bit_generator": "MT19937",
        "state": {"key": words[:624].astype(np.uint32), "pos": int(words[624])},
    }
    return generator


def with_generator(state: bytes, generator: np.random.MT19937) -> bytes:
    """ALE's serialised state with another generator for sticky actions; the lengths that it holds are set right."""
    first, last = _rng_span(state)
    inner = generator.state["state"]
    text = b" ".join(str(int(word)).encode() for word in (*inner["key"], inner["pos"]))
    length = int.from_bytes(state[24:28], "little") + len(text) - (last - first)
    head = state[:24] + length.to_bytes(4, "little") + state[28 : first - 4]
    return head + len(text).to_bytes(4, "little") + text + state[last:]


@functools.cache
def _obedient() -> np.random.MT19937:
    """A generator whose first number is close to 1: the next action is taken, whatever the probability to repeat."""
    seed = next(seed for seed in range(10**6) if np.random.RandomState(seed).bytes(4)[-1] == 255)
    generator = np.random.MT19937()
    generator._legacy_seeding(seed)
    return generator


class TrackedALE:
    """Stands for an `ALEInterface` and knows which action is stuck in it.

    For each frame ALE draws two numbers, one per player, and takes the new action if the first is at least
    `repeat_action_probability`, else it repeats the one before. A reset starts with NOOP.
    """

    def __init__(self, ale: Any) -> None:
        self._ale = ale
        self._sticky = ale.getFloat("repeat_action_probability")
        self._shadow: np.random.MT19937 | None = None  # the emulator's generator, while nothing else moves it
        self.stuck: tuple[int, float] | None = None  # action and strength; None: not known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied or unpickled there is no `_ale` yet
            raise AttributeError(name)
        return getattr(self._ale, name)

    def loadROM(self, *args: Any) -> None:
        self._ale.loadROM(*args)
        self._sticky = self._ale.getFloat("repeat_action_probability")
        self._shadow, self.stuck = None, _NOOP

    def reset_game(self) -> None:
        self._ale.reset_game()
        self._shadow, self.stuck = None, _NOOP

    def act(self, action: Any, strength: float = 1.0) -> int:
        if self._sticky:
            if self._shadow is None:
                self._shadow = _generator(self.read())
            first, _ = self._shadow.random_raw(2)
            if first >= self._sticky * 2.0**32:
                self.stuck = (int(getattr(action, "value", action)), float(strength))
        return self._ale.act(action, strength)

    def read(self) -> bytes:
        """The emulator's state, its generators included."""
        return self._ale.cloneState(include_rng=True).serialize()

    def known(self, state: bytes) -> tuple[int, float]:
        """The action that is stuck in the emulator, whose state is `state`.

        Raises:
            ForkError: It is not known: tracking began amid an episode, or somebody moved the emulator by other means.
        """
        if not self._sticky:
            return _NOOP
        in_step = self._shadow is None or _same_numbers(self._shadow, _generator(state))
        if self.stuck is None or not in_step:
            raise ForkError(
                "the action that is stuck in the emulator is not known amid this episode: fork from its next reset on"
            )
        return self.stuck

    def write(self, state: bytes, stuck: tuple[int, float]) -> None:
        """Puts the emulator into `state`, with `stuck` as the action that it repeats."""
        from ale_py import Action, ALEState

        if self._sticky and self.stuck != stuck:
            self._ale.restoreState(ALEState(with_generator(state, _obedient())))
            self._ale.act(Action(stuck[0]), stuck[1])
        self._ale.restoreState(ALEState(state))
        self._shadow, self.stuck = None, stuck


def _same_numbers(a: np.random.MT19937, b: np.random.MT19937) -> bool:
    left, right = a.state["state"], b.state["state"]
    return left["pos"] == right["pos"] and np.array_equal(left["key"], right["key"])
