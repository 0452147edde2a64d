"""Threads for work that lets go of Python's lock, such as MuJoCo's steps."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Thread
from typing import Any

_Tasks = SimpleQueue[Any]  # of (function, queue for its error or None); None ends a thread


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Threads:
    """Runs a function over items on some threads, the caller's among them; the others start when first needed.

    Args:
        n_threads: All threads together, at least 1.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._tasks: _Tasks = SimpleQueue()
        self._threads: list[Thread] = []
        self._process = 0  # where they were started: threads do not survive os.fork
        weakref.finalize(self, _stop, self._tasks, self._threads)

    def run(self, work: Callable[[int], None], items: Iterable[int]) -> None:
        """Calls `work` on each item, in any order; raises what it raised."""
        waiting = deque(items)

        def share() -> None:
            while True:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                work(item)

        helpers = min(self.n_threads, len(waiting)) - 1
        if helpers > 0 and self._process != os.getpid():
            self._start()
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for _ in range(helpers):
            self._tasks.put((share, done))
        errors: list[BaseException | None] = []
        try:
            share()
        finally:
            errors = [done.get() for _ in range(helpers)]
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        """Ends the threads; a later `run` starts new ones."""
        _stop(self._tasks, self._threads)
        self._process = 0

    def _start(self) -> None:
        self._threads.clear()
        for _ in range(self.n_threads - 1):
            thread = Thread(target=_serve, args=(self._tasks,), name="grpo_rl-step", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._process = os.getpid()


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        (work, done), error = task, None
        try:
            work()
        except BaseException as raised:
            error = raised
        done.put(error)
        del task, work, done, error  # or this thread would keep alive what it last worked for


def _stop(tasks: _Tasks, threads: list[Thread]) -> None:
    for _ in threads:
        tasks.put(None)
    threads.clear()
