"""The rollout buffer: what goes in comes out once, in the right rows, weighted to a mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from probe_envs import box

from grpo_rl.buffers import GroupBuffer

T, N = 4, 3
DISCRETE = spaces.Discrete(5)


def filled(
    observation_space: spaces.Space = DISCRETE, action_space: spaces.Space = DISCRETE, **arrays: Any
) -> GroupBuffer:
    """T steps of N columns; entry (t, n) of every array holds 10·t + n, so that each row names its place."""
    buffer = GroupBuffer(observation_space, action_space, "cpu")
    place = 10 * np.arange(T)[:, None] + np.arange(N)
    for t in range(T):
        step: dict[str, Any] = {
            "observations": place[t],
            "actions": place[t],
            "rewards": place[t].astype(np.float32),
            "log_probs": place[t].astype(np.float32),
            "values": None,
            "group": place[t],
            "age": place[t],
            "mask": np.ones(N, bool),
            "discounted": place[t].astype(np.float64),
        }
        buffer.add(**step | {name: array[t] for name, array in arrays.items()})
    return buffer


def advantages_by_place(buffer: GroupBuffer) -> GroupBuffer:
    buffer.finish()
    buffer.advantages = th.as_tensor(10.0 * np.arange(T)[:, None] + np.arange(N))
    return buffer


def test_arrays_are_stacked_by_step_and_column() -> None:
    buffer = filled()
    assert len(buffer) == T
    buffer.finish()
    for name in ("observations", "actions", "rewards", "log_probs", "group", "age", "discounted"):
        np.testing.assert_array_equal(getattr(buffer, name), 10 * np.arange(T)[:, None] + np.arange(N))
    assert buffer.values is None
    assert not buffer.ends.any()
    assert not buffer.alive.any()


def test_end_marks_the_last_step_and_keeps_what_comes_after_a_cut() -> None:
    buffer = filled()
    buffer.end(0, terminated=True, next_obs=100)
    buffer.end(2, terminated=False, next_obs=102)
    buffer.finish()
    assert buffer.ends.tolist() == [[False] * 3] * 3 + [[True, False, True]]
    assert buffer.alive.tolist() == [[False] * 3] * 3 + [[False, False, True]]
    assert buffer.tail_obs == [(3, 2, 102)]


def test_frozen_and_dropped_rows_neither_count_nor_carry_a_tail() -> None:
    mask = np.ones((T, N), bool)
    mask[3, 1] = False  # frozen
    buffer = filled(mask=mask)
    buffer.end(1, terminated=False, next_obs=1)  # a frozen column has no segment to end
    buffer.end(0, terminated=False, next_obs=0)
    buffer.drop(0, first=2)
    buffer.end(2, terminated=False, next_obs=2)
    advantages_by_place(buffer)
    assert buffer.mask.tolist() == [[True] * 3, [True] * 3, [False, True, True], [False, False, True]]
    assert buffer.tail_obs == [(3, 2, 2)]
    assert buffer.ends[~buffer.mask].all()  # no segment begins in a row that does not count
    rows = sorted(row for batch in buffer.get(4) for row in batch.advantages.tolist())
    assert rows == [0, 1, 2, 10, 11, 12, 21, 22, 32]


@pytest.mark.parametrize("batch_size", [1, 5, 12, 100, None])
def test_minibatches_hold_every_row_once_and_weigh_to_one(batch_size: int | None) -> None:
    """12 rows by 5: the 2 that are left over join the others, 6 and 6; every tensor of a row names the same place."""
    buffer = advantages_by_place(filled())
    batches = list(buffer.get(batch_size))
    sizes = {1: [1] * 12, 5: [6, 6], 12: [12], 100: [12], None: [12]}
    assert [len(batch.weight) for batch in batches] == sizes[batch_size]
    seen = []
    for batch in batches:
        assert batch.weight.tolist() == pytest.approx([1 / len(batch.weight)] * len(batch.weight))
        assert th.equal(batch.advantages.long(), batch.actions)
        assert th.equal(batch.observations, batch.actions)  # type: ignore[arg-type]
        assert th.equal(batch.old_log_prob.long(), batch.actions)
        assert batch.returns is batch.old_values is batch.ref_log_prob is None
        seen += batch.actions.tolist()
    assert sorted(seen) == [10 * t + n for t in range(T) for n in range(N)]


def test_the_order_is_new_each_time_and_follows_numpys_seed() -> None:
    buffer = advantages_by_place(filled())

    def order() -> list[int]:
        return [row for batch in buffer.get(5) for row in batch.actions.tolist()]

    np.random.seed(0)
    first, second = order(), order()
    np.random.seed(0)
    assert order() == first != second


def test_optional_columns_come_along() -> None:
    mask = np.ones((T, N), bool)
    mask[1, 1] = False
    buffer = advantages_by_place(filled(mask=mask, values=np.arange(12.0, dtype=np.float32).reshape(T, N)))
    buffer.returns = buffer.advantages.clone()  # type: ignore[union-attr]
    buffer.old_values = buffer.advantages.clone()  # type: ignore[union-attr]
    buffer.ref_log_prob = buffer.advantages[th.as_tensor(mask)]  # type: ignore[index]
    (batch,) = buffer.get()
    for column in (batch.returns, batch.old_values, batch.ref_log_prob):
        assert th.equal(column, batch.advantages)  # type: ignore[arg-type]
    assert len(batch.weight) == 11
    np.testing.assert_array_equal(buffer.values, np.arange(12.0).reshape(T, N))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("space", "array", "dtype"),
    [
        (box(2), np.zeros((T, N, 2), np.float64), th.float32),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.zeros((T, N, 2, 2), np.uint8), th.uint8),
        (spaces.Discrete(3), np.zeros((T, N), np.int64), th.int64),
    ],
)
def test_observations_keep_their_kind(space: spaces.Space, array: np.ndarray, dtype: th.dtype) -> None:
    (batch,) = advantages_by_place(filled(space, observations=array)).get()
    assert batch.observations.dtype is dtype  # type: ignore[union-attr]
    assert batch.observations.shape == (12, *array.shape[2:])  # type: ignore[union-attr]


def test_dict_observations() -> None:
    space = spaces.Dict({"a": box(), "b": spaces.Discrete(100)})
    place = 10 * np.arange(T)[:, None] + np.arange(N)
    observations = [{"a": row.astype(np.float32), "b": row} for row in place]
    for batch in advantages_by_place(filled(space, observations=observations)).get(5):
        assert isinstance(batch.observations, dict)
        assert th.equal(batch.observations["a"], batch.advantages.float())
        assert th.equal(batch.observations["b"], batch.actions)


def test_discrete_actions_are_whole_numbers_whatever_the_policy_gave() -> None:
    (batch,) = advantages_by_place(filled(actions=np.zeros((T, N), np.float32))).get()
    assert batch.actions.dtype is th.int64
    actions = spaces.Box(-1, 1, (2,), np.float32)
    (batch,) = advantages_by_place(filled(action_space=actions, actions=np.ones((T, N, 2), np.float32))).get()
    assert batch.actions.dtype is th.float32
    assert batch.actions.shape == (12, 2)


def test_reset_forgets_everything() -> None:
    buffer = advantages_by_place(filled())
    buffer.end(0, terminated=False, next_obs=0)
    list(buffer.get(5))
    buffer.reset()
    assert len(buffer) == 0
    assert buffer.tail_obs == []
    assert buffer.advantages is None
    with pytest.raises(AssertionError, match="advantages"):
        next(buffer.get(5))
    buffer.add(
        observations=np.array([7]),
        actions=np.array([3]),
        rewards=np.array([1.0], np.float32),
        log_probs=np.array([0.0], np.float32),
        values=None,
        group=np.array([0]),
        age=np.array([0]),
        mask=np.array([True]),
        discounted=np.array([0.0]),
    )
    buffer.finish()
    buffer.advantages = th.ones(1, 1)
    (batch,) = buffer.get(5)
    assert batch.actions.tolist() == [3]  # not the packed rows of the rollout before
