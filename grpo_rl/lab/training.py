"""Training of a run, and all the ways in which it stops: checkpoints, ctrl-C, an error; what a person is told then."""

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import safe_mean

from grpo_rl.checkpoint import CheckpointEvery, resume
from grpo_rl.errors import GRPOError, NonFiniteError
from grpo_rl.lab.build import CHECKPOINT, drivers
from grpo_rl.lab.completions import CompletionTable
from grpo_rl.lab.health import read_log
from grpo_rl.monitor import HealthMonitor
from grpo_rl.progress import ProgressBar
from grpo_rl.text.vec_env import is_text

Say = Callable[[str], None]

PARTS = 10
"""Checkpoints, and lines about progress, over a run; checkpoints also come every minute."""


class RunStopped(GRPOError):
    """Training ended before its last step; the message, one line, says why and how to go on."""


class _Asked(Exception):
    """Raised between two iterations, once a stop was asked for."""


class Stop:
    """Ctrl-C and SIGTERM: the first one asks for a stop after the iteration, the second one stops at once.

    Attributes:
        asked: Whether the first one has come.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals over, where that is possible: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        os.write(2, b"\nstopping after this iteration, with a checkpoint; once more stops at once\n")


class Checkpoints(CheckpointEvery):
    """Ten checkpoints over a run and one each minute; stops where it was asked to; reports where there is no bar.

    Args:
        run: The run's folder.
        steps: Of the run.
        say: Takes the lines about progress, or None.
        stop: Whether to stop.
        warn: Takes a sentence when a checkpoint could not be written.
    """

    def __init__(self, run: Path, steps: int, say: Say | None, stop: Stop, warn: Say) -> None:
        self._every = max(steps // PARTS, 1)
        super().__init__(run / CHECKPOINT, steps=self._every, say=warn)
        self._total, self._report, self._stop = steps, say, stop
        self._next: int | None = None

    def _on_rollout_start(self) -> None:
        if self._next is None:
            self._next = (self.model.num_timesteps // self._every + 1) * self._every
        if self._stop.asked:
            if self.saved_steps != self.model.num_timesteps:
                self.save()
            raise _Asked
        super()._on_rollout_start()

    def _on_rollout_end(self) -> None:
        if self._report is None or self._next is None or self.num_timesteps < self._next:
            return
        self._next = (self.num_timesteps // self._every + 1) * self._every
        done = min(self.num_timesteps / self._total, 1)
        self._report(f"{done:4.0%}  {self.num_timesteps:>10,} steps  {self._earned()}")

    def _earned(self) -> str:
        """The mean return of the last episodes, or the mean reward of the rollout's completions."""
        if is_text(self.model):
            return f"mean reward {self.logger.name_to_value['reward']:.3f}"
        returns = [episode["r"] for episode in self.model.ep_info_buffer or []]
        return f"mean return {safe_mean(returns):.1f}" if returns else "mean return –"  # no episode has ended yet


def train(agent: OnPolicyAlgorithm, steps: int, run: Path, say: Say, again: bool = False) -> None:
    """Trains `agent` up to `steps` in all: from the start, or on from the run's checkpoint.

    Raises:
        ConfigError: The checkpoint cannot be loaded.
        RunStopped: A stop was asked for, or the agent or its environment raised an error.
    """
    bar, stop = sys.stderr.isatty(), Stop()
    checkpoints = Checkpoints(run, steps, None if bar else say, stop, say)
    monitor = HealthMonitor(say=say, history=read_log(run) if again else ())
    callbacks: list[BaseCallback] = [checkpoints, monitor, *drivers(agent)]
    if is_text(agent):
        callbacks.append(CompletionTable(run, max(steps // PARTS, 1)))
    try:
        with stop.listening(), _progress_bar(callbacks) if bar else _nothing():
            if again:
                resume(agent, run / CHECKPOINT, steps, callbacks, say)
            else:
                agent.learn(steps, callback=callbacks)
            if stop.asked:
                raise _Asked
        agent.dump_logs()  # of the last update, which no rollout follows
    except _Asked:
        said = f"stopped after {agent.num_timesteps:,} of {steps:,} steps; {_kept(checkpoints, run)}"
        raise RunStopped(said) from KeyboardInterrupt()
    except KeyboardInterrupt as interrupt:
        raise RunStopped(
            f"stopped at once, after {agent.num_timesteps:,} steps; {_kept(checkpoints, run)}"
        ) from interrupt
    except Exception as error:
        if checkpoints.saved_steps is None and isinstance(error, GRPOError) and again:
            raise  # it was not loaded: nothing has been trained
        where = _keep_traceback(run)
        name = "" if isinstance(error, GRPOError) else f"{type(error).__name__}: "
        what = " ".join("; ".join([str(error), *getattr(error, "__notes__", [])]).split())
        raise RunStopped(f"{name}{what} ({where}; {_kept(checkpoints, run, _remedy(error, run))})") from error
    finally:
        agent.logger.close()


def _kept(checkpoints: CheckpointEvery, run: Path, first: str = "") -> str:
    """What is left after a stop, and how to go on, after what is to be done first."""
    if checkpoints.saved_steps is None:
        return "there is no checkpoint of it yet"
    how = f"{first}go on: {command('resume', run)}"
    if checkpoints.saved_steps == checkpoints.model.num_timesteps:
        return how
    age = time.monotonic() - checkpoints.saved_time
    return f"the last checkpoint is of {checkpoints.saved_steps:,} steps, {age:.0f} s old; {how}"


def _remedy(error: Exception, run: Path) -> str:
    """What comes before going on after an error: a checkpoint goes on bit for bit, into the same error again."""
    if not isinstance(error, NonFiniteError):
        return "once that is mended, "
    settings = shlex.quote(str(run / "recipe.yaml"))
    return f"as it is, it would come here again: first change in {settings} what is advised above, or the env, then "


def command(name: str, run: Path) -> str:
    """`grpo-rl NAME RUN` as a shell takes it."""
    return f"grpo-rl {name} {shlex.quote(str(run))}"


def _keep_traceback(run: Path) -> str:
    """Writes error.log; says where the traceback is. A full disk must not hide the error."""
    text = traceback.format_exc()
    try:
        (run / "error.log").write_text(text, encoding="utf-8")
    except OSError as error:
        print(text, end="", file=sys.stderr)
        return f"traceback above: error.log cannot be written, {error.strerror or error}"
    return f"traceback in {run / 'error.log'}"


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
