"""Threads: every item once, errors come through, none is left behind."""

import gc
import threading
import time

import pytest

from grpo_rl.groups.threads import Threads, usable_cores


def ours() -> int:
    return sum(thread.name == "grpo_rl-step" for thread in threading.enumerate())


def settle(expected: int) -> int:
    """The number of our threads, once those that were told to end had time for it."""
    deadline = time.monotonic() + 5
    while ours() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return ours()


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_items", [0, 1, 3, 40])
def test_every_item_is_worked_on_once(n_threads: int, n_items: int) -> None:
    threads, seen = Threads(n_threads), []
    for _ in range(3):
        threads.run(seen.append, range(n_items))
    threads.close()
    assert sorted(seen) == sorted(3 * list(range(n_items)))


@pytest.mark.parametrize("n_threads", [1, 3])
def test_an_error_comes_through_and_the_next_run_is_whole(n_threads: int) -> None:
    threads, seen = Threads(n_threads), []

    def work(item: int) -> None:
        if item == 2:
            raise ValueError("two")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="two"):
        threads.run(work, range(6))
    threads.run(seen.append, range(6))
    threads.close()
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]


def test_threads_end_when_closed_and_when_forgotten() -> None:
    before = settle(0)
    threads = Threads(3)
    assert ours() == before  # none before the first run
    threads.run(lambda item: None, range(8))
    assert ours() == before + 2
    threads.close()
    assert settle(before) == before
    threads.run(lambda item: None, range(8))  # starts new ones
    assert ours() == before + 2
    del threads
    gc.collect()
    assert settle(before) == before


def test_usable_cores() -> None:
    assert usable_cores() >= 1
