"""What MuJoCo says: left alone, it prints each message and appends it to MUJOCO_LOG.TXT in the current folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_rl.errors import warn

HARMLESS = ("'settotalmass' is deprecated",)
"""In messages about how a model's XML is written (HalfCheetah-v5's of Gymnasium): nothing that a user could change."""


@contextmanager
def quiet_build() -> Iterator[None]:
    """While models are compiled inside: leaves out what is HARMLESS, and turns every other message into a warning."""
    try:
        import mujoco  # type: ignore[import-untyped]
    except ImportError:
        yield
        return
    said: list[str] = []
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(said.append)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
        for message in said:
            if not any(known in message for known in HARMLESS):
                warn(f"MuJoCo: {message}", RuntimeWarning)


def log_into(folder: Path) -> None:
    """From now on MuJoCo's messages are kept in `folder`/MUJOCO_LOG.TXT; they are printed as before.

    Without effect where MuJoCo is too old to have that setting.
    """
    try:
        from mujoco import MjLogConfig
    except ImportError:
        return
    config = MjLogConfig.get()
    config.logfile = str((folder / "MUJOCO_LOG.TXT").absolute())
    config.set()
