"""The file of a checkpoint: arrays and a JSON text in safetensors, with a digest of both; whole or not there."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from grpo_rl.errors import ConfigError

FORMAT = "grpo_rl checkpoint 1"


def write_file(path: Path, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file that is whole or not there: a draft beside it, flushed to the disk, takes its name."""
    metadata = {"format": FORMAT, "digest": _digest(text, arrays), "state": text}
    blob = safetensors.numpy.save(dict(arrays), metadata)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_file(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The JSON text and the arrays of a file.

    Raises:
        ConfigError: No such file, no checkpoint, or not as it was written.
    """
    if not path.is_file():
        raise ConfigError(f"no checkpoint {path}")
    try:
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, TypeError, ValueError, AttributeError, KeyError) as error:
        what = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} is no checkpoint of grpo_rl, or it is damaged: {what}") from None
    if metadata.get("format") != FORMAT:
        raise ConfigError(f'{path} is no checkpoint that this version of grpo_rl reads: expected "{FORMAT}"')
    if metadata.get("digest") != _digest(metadata.get("state", ""), arrays):
        raise ConfigError(f"{path} is damaged: what it holds is not what was written")
    return metadata["state"], arrays


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def part(text: str, name: str, path: Path) -> dict[str, Any]:
    """One part of the tree, of those that are plain JSON."""
    try:
        part = json.loads(text)[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        part = None
    if not isinstance(part, dict):
        raise ConfigError(f"{path} is no checkpoint of a model")
    return part
