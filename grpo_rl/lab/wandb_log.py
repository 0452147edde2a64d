"""Weights & Biases, for `training.wandb: project` of a recipe: everything that a run logs, in a W&B run of its own.

W&B's own callback for SB3 reads the TensorBoard files of a process that it has patched; here a writer of SB3's logger
hands over the numbers, so that nothing is patched and a run that is resumed goes on under its old id.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import KVWriter

from grpo_rl.errors import ConfigError, warn
from grpo_rl.lab.logs import WhileItCan
from grpo_rl.recipes import Recipe

STEP = "global_step"
"""The axis of W&B's plots: environment steps. It is the name that W&B's callback for SB3 gives it."""


def require_wandb(recipe: Recipe) -> None:
    """Refuses a recipe that asks for W&B where the package is missing, before anything is made."""
    if recipe.training.wandb is not None:
        _package()


def log_to_wandb(agent: BaseAlgorithm, run: Path, recipe: Recipe, say: Callable[[str], None] = warn) -> None:
    """Adds W&B to the agent's logger where the recipe asks for it; `agent.logger.close()` ends its run.

    `say` takes a sentence when W&B can write no more: on a full disk, or when its own process has died.
    """
    project = recipe.training.wandb
    if project is not None:
        config = yaml.safe_load(recipe.to_yaml())
        agent.logger.output_formats.append(
            WhileItCan("Weights & Biases' log", lambda: WandbWriter(run, project, config), say)
        )


class WandbWriter(KVWriter):
    """Writes the logger's numbers to W&B.

    Args:
        run: The run's folder. W&B keeps its files in `wandb/` there, and gives its run the folder's name. If the folder
            has been logged before, the same W&B run goes on.
        project: Of W&B.
        config: What W&B shows as the run's configuration.

    Raises:
        ConfigError: The package is missing, or W&B does not start: no login, for instance.
        OSError: Here or later, the disk is full, or W&B's process, which writes its files, is not there any more.
    """

    def __init__(self, run: Path, project: str, config: dict[str, Any]) -> None:
        wandb = _package()
        before = next((run / "wandb").glob("*run-*/run-*.wandb"), None)
        resumed = {} if before is None else {"id": before.stem.removeprefix("run-"), "resume": "allow"}
        try:
            self._run = wandb.init(
                project=project,
                name=run.name,
                dir=run,
                config=config,
                allow_val_change=True,
                reinit="create_new",
                settings=wandb.Settings(console="off"),
                **resumed,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases does not start: {' '.join(str(error).split())}"
                " (`wandb login` once, or WANDB_MODE=offline and `wandb sync` later)"
            ) from error
        self._run.define_metric("*", step_metric=STEP)

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        numbers = {
            key: float(value)
            for key, value in key_values.items()
            if isinstance(value, int | float | np.number) and "wandb" not in (key_excluded.get(key) or ())
        }
        with _failing_as_files_do():
            self._run.log(numbers | {STEP: step})

    def close(self) -> None:
        """Ends the W&B run: as failed when an exception is on its way."""
        failed = sys.exc_info()[0] is not None
        with _failing_as_files_do():
            self._run.finish(exit_code=int(failed))


@contextlib.contextmanager
def _failing_as_files_do() -> Iterator[None]:
    """Whatever W&B raises, as an OSError, with which a log ends: errors of its own have no common root."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from error


def _package() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(f"training.wandb needs the package wandb: pip install 'grpo_rl[wandb]' ({error})") from None
