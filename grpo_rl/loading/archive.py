"""What an SB3 zip would execute, and whether it can be read at all, before SB3 loads it.

SB3 keeps weights as tensors, which torch reads with `weights_only=True`, but every attribute that is no JSON as a
pickle, and a pickle is a program. `inspect_zip` says what those programs would do beyond making what agents are made
of; `open_zip` refuses a file that would do more, unless the user trusts it.
"""

import base64
import io
import json
import pathlib
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch as th
from stable_baselines3.common.save_util import open_path

from grpo_rl.errors import ConfigError, GRPOError, UntrustedError
from grpo_rl.loading.limits import Bounded
from grpo_rl.loading.parts import permitted
from grpo_rl.loading.pickles import UnreadableError, trace

MAX_BYTES = 8 << 30
"""Of all entries of a zip, unpacked."""
MAX_RATIO = 100
"""Of unpacked to packed bytes: SB3 does not compress, and an agent that somebody packed again does not shrink so."""

_FUNCTION = "runs a function or a class whose code is in the file"

ZipPath = str | pathlib.Path | io.BufferedIOBase


class Contents(NamedTuple):
    """What a zip holds.

    Attributes:
        data: Attribute name → its JSON, SB3's `data`.
        executes: Attribute name → what its pickle would do beyond making ordinary parts of an agent, in words; only
            attributes for which there is something.
    """

    data: dict[str, Any]
    executes: dict[str, list[str]]


def inspect_zip(path: ZipPath, without: Collection[str] = ()) -> Contents:
    """Reads an agent's zip without executing anything.

    Args:
        path: As in SB3's `load`; a file object stays open, where it was.
        without: Attributes that are not looked at: their values come from elsewhere.

    Raises:
        ConfigError: No zip of an agent, or it is damaged, or it unpacks to too much.
        FileNotFoundError: There is no such file.
    """
    with _opened(path) as file:
        return _inspect(file, _name(path), without)


@contextmanager
def open_zip(
    path: ZipPath, custom_objects: dict[str, Any] | None = None, trust: bool = False
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The open file of an agent's zip, checked, and SB3's `data` in it; errors of a damaged file get a message.

    Args:
        path: As in SB3's `load`.
        custom_objects: Replace attributes, whose entries are then never read.
        trust: Whether the file may execute code.

    Raises:
        UntrustedError: It would execute code, and `trust` is False.
        ConfigError: As `inspect_zip`, or SB3 failed to load it, or it describes networks far larger than its weights.
    """
    if custom_objects is not None and not isinstance(custom_objects, dict):
        raise ConfigError("custom_objects argument must be a dict or None")
    name = _name(path)
    with _opened(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.(_weights_only_unpickler|serialization)")
        contents = _inspect(file, name, [*(custom_objects or {})] if not trust else None)
        if contents.executes:
            raise UntrustedError(_refusal(name, contents.executes), contents.executes)
        try:
            with Bounded(name, _weights(file)):
                yield file, contents.data
        except GRPOError:
            raise
        except Exception as error:
            raise ConfigError(f"{name}: {_why(file, error)}") from error


def foreign_arguments(data: dict[str, Any], name: str, value_head: bool) -> dict[str, Any]:
    """Arguments with which GRPO loads `data` of another on-policy algorithm; none for its own.

    Raises:
        ConfigError: Saved by another algorithm, which GRPO cannot go on from like this.
    """
    if "group_size" in data or "value_head" in data:
        return {}
    if "rollout_buffer_class" not in data:
        raise ConfigError(f"{name} was not saved by GRPO: load it with the class that saved it")
    if not value_head:
        raise ConfigError(
            f"{name} was saved by SB3's PPO or one of its kind, whose policy has a critic: load it with that class, or"
            " go on from it with GRPO's hybrid: GRPO.load(…, value_head=True)"
        )
    return {"rollout_buffer_class": None, "rollout_buffer_kwargs": None}


def _name(path: ZipPath) -> str:
    return str(path if isinstance(path, str | pathlib.Path) else getattr(path, "name", "the file"))


@contextmanager
def _opened(path: ZipPath) -> Iterator[Any]:
    """The file, found as SB3 finds it; one that was open already is left open, where it was."""
    file: Any = open_path(path, "r", verbose=0, suffix="zip")
    if isinstance(path, str | pathlib.Path):
        with file:
            yield file
    elif not file.seekable():
        raise ConfigError(f"{_name(path)}: a stream that cannot go back; give a file or io.BytesIO(stream.read())")
    else:
        start = file.tell()
        try:
            yield file
        finally:
            if not file.closed:
                file.seek(start)


def _inspect(file: Any, name: str, without: Collection[str] | None) -> Contents:
    """`without` None: the pickles are trusted."""
    start = file.tell()
    try:
        with zipfile.ZipFile(file) as archive:
            _check_entries(archive, file, name)
            damaged = archive.testzip()
            if damaged is not None:
                raise ConfigError(f'{name} is damaged: its entry "{damaged}" is not what was written')
            text = archive.read("data").decode()
    except ConfigError:
        raise
    except Exception as error:  # zipfile raises a dozen kinds for a damaged archive
        what = "" if isinstance(error, zipfile.BadZipFile) else f" ({_line(error)})"
        raise ConfigError(f"{name} is no zip-file, or a damaged one{what}: expected an agent's save()") from error
    finally:
        file.seek(start)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{name} is damaged: its entry "data" is no JSON: {_line(error)}') from error
    if not isinstance(data, dict):
        raise ConfigError(f'{name} is damaged: its entry "data" should be a JSON object, got {type(data).__name__}')
    executes = {}
    for key, value in data.items():
        if without is not None and key not in without:
            found = _executes(key, value, name)
            if found:
                executes[key] = found
    return Contents(data, executes)


def _weights(file: Any) -> int:
    """Bytes of the policy's weights, unpacked."""
    start = file.tell()
    with zipfile.ZipFile(file) as archive:
        stored = sum(info.file_size for info in archive.infolist() if info.filename == "policy.pth")
    file.seek(start)
    return stored


def _check_entries(archive: zipfile.ZipFile, file: Any, name: str) -> None:
    infos = archive.infolist()
    names = [info.filename for info in infos]
    if "data" not in names:
        raise ConfigError(f'{name} holds no agent: a zip without the entry "data"')
    if len(set(names)) < len(names):
        raise ConfigError(f"{name}: two entries have one name, which no agent's save() gives; not loaded")
    for entry in names:
        if not re.fullmatch(r"[\w.]+", entry) or ".." in entry:
            raise ConfigError(f"{name}: {entry!r} is no name that an agent's save() gives to an entry; not loaded")
    packed, unpacked = file.seek(0, io.SEEK_END), sum(info.file_size for info in infos)
    if unpacked > MAX_BYTES or unpacked > MAX_RATIO * packed:
        raise ConfigError(
            f"{name}: {packed:,} bytes would unpack to {unpacked:,}; an agent's save() never does, and more than"
            f" {MAX_BYTES:,} or {MAX_RATIO} times as much is not loaded"
        )


def _why(file: Any, error: Exception) -> str:
    """The reason for which SB3 could not load the file, which passed the checks."""
    if isinstance(error, MemoryError):
        return "loading it takes more memory than there is"
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        for entry in archive.namelist():
            if entry.endswith(".pth"):
                try:
                    th.load(io.BytesIO(archive.read(entry)), map_location="cpu", weights_only=True)
                except Exception as found:
                    inner = re.search(
                        r"(?:Trying to load|WeightsUnpickler error:) (.{1,120})", str(found)
                    )  # the rest is bad advice
                    what = inner[1].strip() if inner else type(found).__name__
                    return f'its entry "{entry}" holds something else than tensors, and is not loaded ({what})'
    if isinstance(error, ValueError):  # what SB3 says of other spaces or other policy_kwargs
        return " ".join(str(error).split())
    return f"it cannot be loaded as it is: {_line(error)}"


def _line(error: Exception) -> str:
    """An error as one short line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def _refusal(name: str, executes: dict[str, list[str]]) -> str:
    parts = [f'entry "{key}" {"; ".join(found[:2])}' for key, found in list(executes.items())[:4]]
    more = len(executes) - len(parts)
    keys = ", ".join(f'"{key}": …' for key in list(executes)[:4])
    what = "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
    return (
        f"{name} was not loaded, for it would execute code: {what}. If you know where it comes from:"
        " load(path, trust=True); or replace what you do not need, which is then not read:"
        f" load(path, custom_objects={{{keys}}})."
        + (" A schedule by grpo_rl.LinearSchedule is saved by value, without code." if _FUNCTION in what else "")
    )


def _executes(key: str, value: Any, name: str) -> list[str]:
    """What the entry `key` would do that is not permitted, each once."""
    if key == "env":  # SB3 leaves it out; GRPO would make it
        return [f"makes the environment {value!r:.80}"]
    if not isinstance(value, dict) or ":serialized:" not in value:
        return []
    try:
        steps = trace(base64.b64decode(value[":serialized:"].encode()))
    except (UnreadableError, ValueError, AttributeError) as error:
        raise ConfigError(
            f'{name} is damaged: its entry "{key}" cannot be read ({_line(error)});'
            f' replace it: load(path, custom_objects={{"{key}": …}})'
        ) from error
    refused = [step for step in steps if not permitted(step)]
    called = {(step.module, step.name) for step in refused if step.action == "calls"}
    named = [step for step in refused if step.action == "calls" or (step.module, step.name) not in called]
    return list(dict.fromkeys(_FUNCTION if step.module.startswith("cloudpickle") else str(step) for step in named))
