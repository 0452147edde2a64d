"""One env in a curriculum: the wrapper that sets its difficulty before each reset."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import gymnasium as gym

from grpo_rl.curriculum.rules import AdaptiveDifficulty, Course, Outcome, Rule, full_difficulty, parse_difficulty
from grpo_rl.errors import ConfigError
from grpo_rl.registry import make


class Curriculum(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Sets the difficulty of an env before each reset and reports it as `info["difficulty"]`.

    It is set in one of three ways: an attribute of the env, or of one of its wrappers; an option of `reset`; a
    function. Without one of them named, the attribute `difficulty` is meant. Setting the same value twice must be the
    same as once: compute from stored nominal values, as envs/reach.py does.

    Args:
        env: One env, without a Curriculum in it.
        difficulty: What `parse_difficulty` takes. Its first and last value are tried at once, so that a difficulty that
            the env refuses is refused here, not in the middle of training.
        attribute: Name of the attribute to set; dots reach into it ("model.opt.timestep").
        option: Name under which `reset(options={…})` gets the difficulty.
        apply: function(env, difficulty), called with the env below this wrapper.

    Raises:
        ConfigError: More than one way is given; the env has no such attribute or refuses the value; the difficulty is
            none; there is a Curriculum in `env` already.
    """

    def __init__(
        self,
        env: gym.Env,
        difficulty: Any,
        *,
        attribute: str | None = None,
        option: str | None = None,
        apply: Callable[[gym.Env, float], None] | None = None,
    ) -> None:
        gym.utils.RecordConstructorArgs.__init__(
            self, difficulty=difficulty, attribute=attribute, option=option, apply=apply
        )
        super().__init__(env)
        given = [name for name, way in (("attribute", attribute), ("option", option), ("apply", apply)) if way]
        if len(given) > 1:
            raise ConfigError(f"give one of attribute, option and apply, not {' and '.join(given)}")
        if any(isinstance(layer, Curriculum) for layer in _layers(env)):
            raise ConfigError("this env has a Curriculum already: for two dials, set both in one apply=function")
        self._attribute = attribute if given else "difficulty"
        self._option, self._function = option, apply
        if self._attribute and _owner(env, self._attribute) is None:
            raise ConfigError(
                f'{type(env.unwrapped).__name__} has no attribute "{self._attribute}" to set the difficulty by: '
                "name the one that it has with attribute=…, an option of its reset with option=…, or give a function "
                "apply=function(env, difficulty)"
            )
        rule = parse_difficulty(difficulty)
        self._course = Course(rule)
        self._driven = False
        self._own_steps = 0
        self._outcomes: list[Outcome] = []
        self._difficulty, self._steps, self._return, self._whole = self._course.difficulty, 0, 0.0, True
        for value in (full_difficulty(rule), self._course.difficulty):
            self._set(value)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As Gymnasium's, at the difficulty that the rule has got to."""
        if not self._driven:
            self._course.observe(self.curriculum_outcomes())
            self._course.advance(self._own_steps)
        self._difficulty, self._steps, self._return, self._whole = self._course.difficulty, 0, 0.0, True
        if self._option:
            options = (options or {}) | {self._option: self._difficulty}
        self._set(self._difficulty)
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, info | {"difficulty": self._difficulty}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As Gymnasium's."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._own_steps += 1
        self._steps += 1
        self._return += float(reward)
        if (terminated or truncated) and self._whole:
            self._outcomes.append((self._difficulty, self._course.succeeded(info, self._return)))
            self._whole = False  # counted
        info["difficulty"] = self._difficulty
        return obs, reward, terminated, truncated, info

    def _set(self, difficulty: float) -> None:
        try:
            if self._function is not None:
                self._function(self.env, difficulty)
            elif self._attribute:
                setattr(_owner(self.env, self._attribute), self._attribute.rpartition(".")[2], difficulty)
        except Exception as error:
            way = f'attribute "{self._attribute}"' if self._attribute else "function"
            raise ConfigError(
                f"{type(self.unwrapped).__name__} refuses difficulty {difficulty:g} ({way}): "
                f"{type(error).__name__}: {error}"
            ) from error

    # --- what a driver asks, through VecEnv.env_method ----------------------------------------------------------------

    def curriculum_rule(self) -> Rule:
        """The rule, without the function `success`, which stays here: it may not pickle."""
        rule = self._course.rule
        return replace(rule, success=None) if isinstance(rule, AdaptiveDifficulty) else rule

    def curriculum_outcomes(self) -> list[Outcome]:
        """The episodes that have finished since the last call. Those begun by a fork in the middle are left out."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def drive_curriculum(self, difficulty: float) -> None:
        """From its next reset on the env has this difficulty, until the next call; the own rule rests."""
        self._driven = True
        self._course.difficulty = difficulty

    # --- forks --------------------------------------------------------------------------------------------------------

    def get_snapshot(self) -> tuple[Any, ...]:
        """The state of the episode and, without a driver, how far the own rule has got."""
        episode = self._difficulty, self._steps, self._return, self._whole
        if self._driven:
            return *episode, None
        course = self._course
        return *episode, (self._own_steps, course.difficulty, tuple(course.successes), tuple(self._outcomes))

    def set_snapshot(self, state: tuple[Any, ...]) -> None:
        """Continues an episode at its own difficulty, which the env gets even if its own snapshot says nothing of it.

        For a driver, an episode that is continued here in its middle is no outcome (see `AdaptiveDifficulty`).
        """
        difficulty, self._steps, self._return, self._whole, own = state
        if difficulty != self._difficulty:
            self._set(difficulty)
        self._difficulty = difficulty
        if self._driven:
            self._whole = self._whole and self._steps == 0
        elif own is not None:
            self._own_steps, self._course.difficulty, successes, outcomes = own
            self._course.successes.clear()
            self._course.successes.extend(successes)
            self._outcomes = list(outcomes)


def make_env(
    env: str | Callable[..., gym.Env],
    difficulty: Any,
    *,
    attribute: str | None = None,
    option: str | None = None,
    apply: Callable[[gym.Env, float], None] | None = None,
    **kwargs: Any,
) -> Curriculum:
    """One env in a `Curriculum`; for groups, `make_group_env(lambda: make_env(…), n_groups, group_size)`.

    Args:
        env: A registered id, or an env class or factory.
        difficulty, attribute, option, apply: As for `Curriculum`.
        kwargs: For `gymnasium.make`, the class or the factory.
    """
    if isinstance(env, gym.Env):
        raise ConfigError(f"expected an id, a class or a factory, got {env}: an env that is made is Curriculum(env, …)")
    made = make(env, **kwargs) if isinstance(env, str) else env(**kwargs)
    return Curriculum(made, difficulty, attribute=attribute, option=option, apply=apply)


def _layers(env: gym.Env) -> list[gym.Env]:
    """Wrappers from the outermost to the innermost, then the base env."""
    layers = [env]
    while isinstance(env, gym.Wrapper):
        env = env.env
        layers.append(env)
    return layers


def _owner(env: gym.Env, name: str) -> Any:
    """What holds the attribute `name` (with dots), looked for from the outermost wrapper inwards; None if nothing."""
    path, _, last = name.rpartition(".")
    for layer in _layers(env):
        try:
            owner = attrgetter(path)(layer) if path else layer
        except AttributeError:
            continue
        if hasattr(owner, last):
            return owner
    return None
