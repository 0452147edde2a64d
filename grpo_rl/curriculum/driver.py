"""Many envs in one curriculum: the rule is kept in the main process and moves between rollouts."""

from collections.abc import Mapping
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from grpo_rl.curriculum.rules import Course
from grpo_rl.curriculum.wrapper import Curriculum
from grpo_rl.errors import ConfigError


class CurriculumDriver:
    """One rule for all columns of a vectorised env; their wrappers apply it at their next reset.

    Made by `CurriculumDriver.of(venv)`. Works through VecEnv's own methods, so in worker processes and under
    VecNormalize too.
    """

    def __init__(self, venv: VecEnv) -> None:
        rules = venv.env_method("curriculum_rule")
        if any(rule != rules[0] for rule in rules):
            raise ConfigError(f"all columns must follow one rule, found {rules[0]} and others: make them alike")
        self._venv = venv
        self._course = Course(rules[0])
        self._push()

    @classmethod
    def of(cls, venv: VecEnv) -> "CurriculumDriver | None":
        """The driver for the curriculum in `venv`, at the start of its rule; None if there is none.

        Raises:
            ConfigError: Only some columns have a Curriculum, or they have different ones.
        """
        try:
            wrapped = venv.env_is_wrapped(Curriculum)
        except (AttributeError, NotImplementedError):  # a VecEnv of another making
            return None
        if any(wrapped) and not all(wrapped):
            raise ConfigError(f"{sum(wrapped)} of {len(wrapped)} columns have a Curriculum: wrap all of them, or none")
        return cls(venv) if any(wrapped) else None

    def before_rollout(self, num_timesteps: int) -> None:
        """Moves the rule, by env steps so far or by the episodes that have finished, and tells all columns."""
        self._collect()
        self._course.advance(num_timesteps)
        self._push()

    def metrics(self) -> dict[str, float]:
        """For the logger: the difficulty that fresh episodes get and, once known, the success rate (see `Course`)."""
        rate = self._course.success_rate
        known = {} if rate is None else {"curriculum/success_rate": rate}
        return {"curriculum/difficulty": self._course.difficulty} | known

    def state(self) -> dict[str, Any]:
        """How far the rule has got, finished episodes included, for JSON."""
        self._collect()
        return self._course.state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave; columns take its difficulty at their next reset."""
        self._venv.env_method("curriculum_outcomes")
        self._course.set_state(state)
        self._push()

    def _collect(self) -> None:
        for outcomes in self._venv.env_method("curriculum_outcomes"):
            self._course.observe(outcomes)

    def _push(self) -> None:
        self._venv.env_method("drive_curriculum", self._course.difficulty)


class CurriculumCallback(BaseCallback):
    """Drives the curriculum of SB3's own algorithms, such as PPO: one rule, by steps over all envs, and its log.

    The state is kept as `model.curriculum_state`, which SB3 saves with the model. GRPO needs no callback.

    Raises:
        ConfigError: At the start of training: no env has a Curriculum, or the algorithm drives it itself.
    """

    driver: CurriculumDriver

    def _on_training_start(self) -> None:
        if getattr(self.model, "curriculum", None) is not None:
            raise ConfigError(f"{type(self.model).__name__} drives the curriculum itself: leave the callback out")
        driver = CurriculumDriver.of(self.training_env)
        if driver is None:
            raise ConfigError("no env of this model has a Curriculum: wrap them, as in make_env(…, difficulty=…)")
        self.driver = driver
        state = getattr(self.model, "curriculum_state", None)
        if state is not None:
            driver.set_state(state)

    def _on_rollout_start(self) -> None:
        self.driver.before_rollout(self.num_timesteps)

    def _on_rollout_end(self) -> None:
        self.model.curriculum_state = self.driver.state()  # type: ignore[attr-defined]
        for name, value in self.driver.metrics().items():
            self.logger.record(name, value)

    def _on_step(self) -> bool:
        return True
