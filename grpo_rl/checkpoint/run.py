"""Checkpoints in use: save, load, go on, and the callback that writes them in training."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback

from grpo_rl.checkpoint.file import part, read_file, write_file
from grpo_rl.checkpoint.state import is_exact, load, read_model, write_model, write_random
from grpo_rl.codec import NoCodec, encode
from grpo_rl.errors import ConfigError, warn

Model = TypeVar("Model", bound=OnPolicyAlgorithm)


def save_checkpoint(model: OnPolicyAlgorithm, path: str | Path) -> None:
    """Writes `path`: the old file stays until the new one is complete and on the disk.

    Call it between iterations: outside `learn`, or in a callback's `_on_rollout_start` (`CheckpointEvery` does).
    From elsewhere the file is as sound, but the rollout that was begun is lost, and nothing goes on bit for bit.

    Raises:
        OSError: It cannot be written, for instance because the disk is full. The old file is as it was.
    """
    tree = read_model(model)
    try:
        text, arrays = encode(tree)
    except NoCodec as error:
        reason = (
            f"{error}, which a checkpoint cannot hold: keep numbers, text, arrays and generators instead, or give the"
            " env get_snapshot() and set_snapshot(state) with these"
        )
        tree |= {"env": None, "sampler": None, "reason": reason}
        text, arrays = encode(tree)
    write_file(Path(path), text, arrays)


def load_checkpoint(model: OnPolicyAlgorithm, path: str | Path, say: Callable[[str], None] = warn) -> None:
    """Puts `model`, built as it was, into the state of a checkpoint; `resume` does this and goes on.

    Args:
        model: GRPO, a subclass, or another on-policy algorithm of SB3, with an env built as it was.
        path: A file of `save_checkpoint`.
        say: Takes a sentence for each thing that does not go on bit for bit, and why.

    Raises:
        ConfigError: No checkpoint, a damaged one, or one of another model; the model may be half loaded then.
    """
    load(model, Path(path), say)


def resume(
    model: Model,
    path: str | Path,
    total_timesteps: int | None = None,
    callback: MaybeCallback = None,
    say: Callable[[str], None] = warn,
    **learn: Any,
) -> Model:
    """Loads a checkpoint and trains on, as if `learn(total_timesteps)` had never stopped.

    Args:
        model: As for `load_checkpoint`.
        path: A file of `save_checkpoint`.
        total_timesteps: Env steps in all, those before the checkpoint included. None: as many as `learn` was asked for.
            Schedules over progress take their course over this number.
        callback: As for `learn`; its own state is not in the checkpoint.
        say: As for `load_checkpoint`.
        learn: Other arguments of `learn`.

    Returns:
        The model.

    Raises:
        ConfigError: As for `load_checkpoint`.
    """
    go_on = GoOn(load(model, Path(path), say), Path(path))
    given = callback if isinstance(callback, list) else [] if callback is None else [callback]
    total = model._total_timesteps if total_timesteps is None else int(total_timesteps)
    return model.learn(max(total - model.num_timesteps, 0), [go_on, *given], reset_num_timesteps=False, **learn)


def checkpoint_steps(path: str | Path) -> int:
    """The env steps that a checkpoint's model had made; ConfigError as for `load_checkpoint`."""
    steps = part(read_file(Path(path))[0], "attributes", Path(path)).get("num_timesteps")
    if not isinstance(steps, int):
        raise ConfigError(f"{path} is no checkpoint of a model")
    return steps


class CheckpointEvery(BaseCallback):
    """Writes a checkpoint before the first rollout, then every so many steps or seconds, and at the end of training.

    A full disk does not stop the training: it is said, and the last good checkpoint stays. Where another callback ends
    the training in the middle of a rollout, that one stays too, for nothing would go on bit for bit from there; only
    where there is none yet, one is written.

    Args:
        path: Of the file.
        steps: Env steps between two checkpoints, or None.
        seconds: Seconds between two checkpoints, or None. What comes first counts.
        say: Takes a sentence when a checkpoint could not be written.

    Attributes:
        saved_steps: `num_timesteps` of the last good checkpoint, or None.
        saved_time: `time.monotonic()` of the last good checkpoint.
    """

    model: OnPolicyAlgorithm

    def __init__(
        self,
        path: str | Path,
        steps: int | None = None,
        seconds: float | None = 60.0,
        say: Callable[[str], None] = warn,
    ) -> None:
        super().__init__()
        self.path, self.steps, self.seconds, self.say = Path(path), steps, seconds, say
        self.saved_steps: int | None = None
        self.saved_time = 0.0
        self._tried: tuple[float, float] = -math.inf, -math.inf
        self._midway = False  # a rollout has begun and is not finished

    def save(self) -> bool:
        """Writes the checkpoint now; whether that worked."""
        steps, now = self._tried = self.model.num_timesteps, time.monotonic()
        try:
            save_checkpoint(self.model, self.path)
        except OSError as error:
            kept = "there is none yet" if self.saved_steps is None else f"that of {self.saved_steps:,} steps stays"
            self.say(f"no checkpoint at {steps:,} steps: {error.strerror or error}; {kept}")
            return False
        self.saved_steps, self.saved_time = steps, now
        return True

    def due(self) -> bool:
        """Whether the next checkpoint is to be written."""
        steps, seconds = self._tried
        if steps == -math.inf:
            return True
        return (self.steps is not None and self.model.num_timesteps >= steps + self.steps) or (
            self.seconds is not None and time.monotonic() >= seconds + self.seconds
        )

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        self._midway = False
        super().on_training_start(locals_, globals_)

    def on_rollout_start(self) -> None:
        super().on_rollout_start()
        self._midway = True

    def on_rollout_end(self) -> None:
        super().on_rollout_end()
        self._midway = False

    def _on_rollout_start(self) -> None:
        if self.due():
            self.save()

    def _on_training_end(self) -> None:
        if self.saved_steps != self.model.num_timesteps and not (self._midway and self.saved_steps is not None):
            self.save()

    def _on_step(self) -> bool:
        return True


class GoOn(BaseCallback):
    """Loads a checkpoint again at the very moment at which it was taken, the start of a rollout.

    So it does not matter what random numbers `learn` and other callbacks have drawn on their way there.
    """

    model: OnPolicyAlgorithm

    def __init__(self, tree: dict[str, Any], path: Path) -> None:
        super().__init__()
        self._tree: dict[str, Any] | None = tree
        self._path = path

    def _on_rollout_start(self) -> None:
        if self._tree is not None and is_exact(self._tree):
            write_model(self.model, self._tree, self._path)
        elif self._tree is not None:
            write_random(self._tree["random"])
        self._tree = None

    def _on_step(self) -> bool:
        return True
