"""Attributes that go on by themselves: threads, processes, sockets, files that are written. No copy can hold them."""

from __future__ import annotations

import io
import multiprocessing.connection
import multiprocessing.process
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

_DEPTH = 4
_FLAT = (str, bytes, int, float, complex, np.ndarray, np.generic, type, types.ModuleType, types.FunctionType, gym.Env)
_IDLE = ("concurrent.futures.", "multiprocessing.pool", "logging")  # workers that wait for work, and logs of a process


def live(values: dict[str, Any]) -> str:
    """The first of these attributes that goes on by itself, in words, such as "worker, a running Thread"; "" if none.

    Looks into containers and into the attributes of plain objects, a few levels deep.
    """
    for name, value in values.items():
        if what := next(_found(value, _DEPTH, set()), ""):
            return f"{name}, {what}"
    return ""


def _found(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    if value is None or isinstance(value, _FLAT) or id(value) in seen:
        return
    seen.add(id(value))
    if what := _goes_on(value):
        yield f"{what} {type(value).__name__}"
    elif depth and not type(value).__module__.startswith(_IDLE):
        if isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = list(value)
        else:
            parts = list(getattr(value, "__dict__", {}).values())
        for part in parts:
            yield from _found(part, depth - 1, seen)


def _goes_on(value: Any) -> str:
    """What `value` does by itself, in words; "" if it does nothing."""
    if isinstance(value, threading.Thread):
        return "a running" if value.is_alive() else ""
    if isinstance(value, multiprocessing.process.BaseProcess):
        return "a running" if _alive(value) else ""
    if isinstance(value, subprocess.Popen):
        return "a running" if value.poll() is None else ""
    if isinstance(value, socket.socket):
        return "an open" if value.fileno() >= 0 else ""
    if isinstance(value, multiprocessing.connection.Connection):
        return "an open" if not value.closed else ""
    if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
        shared = value in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        return "a file that is open for writing:" if not value.closed and value.writable() and not shared else ""
    return ""


def _alive(process: multiprocessing.process.BaseProcess) -> bool:
    try:
        return process.is_alive()
    except (AssertionError, ValueError):  # not this process's child, or closed
        return False
