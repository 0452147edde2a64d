"""The buffer of completions: ragged rows in, the same tokens out, whatever the minibatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.utils import set_random_seed

from grpo_rl.text.spaces import Unicode
from grpo_rl.token_buffer import TokenBuffer, tied_members

PROMPTS = [[90, 91], [92, 93, 94]]
TOKENS = [[11], [12, 13, 14], [15, 99, 98, 16], [17, 18]]
TRAINED = [[True], [True] * 3, [True, False, False, True], [True] * 2]
LENGTHS = [1, 3, 2, 2]


def filled(rewards: Any = (1.0, 0.0, 2.0, np.nan), **changes: Any) -> TokenBuffer:
    """Two prompts with two completions each; in the third an env said 99, 98. A token's log-probability is −its id."""
    buffer = TokenBuffer(Unicode(), Unicode(), "cpu")
    chosen = [[t for t, own in zip(ids, mask, strict=True) if own] for ids, mask in zip(TOKENS, TRAINED, strict=True)]
    values = [-np.array(ids, np.float32) for ids in chosen]
    settings: dict[str, Any] = {
        "prompts": PROMPTS,
        "prompt_of": [0, 0, 1, 1],
        "tokens": TOKENS,
        "trained": TRAINED,
        "log_probs": values,
        "entropies": [-v / 100 for v in values],
        "truncated": [False, True, False, False],
        "group": [7, 7, 8, 8],
        "rewards": np.array(rewards),
        "reward_matrix": np.array(rewards)[:, None],
        "turns": [[1], [3], [1, 1], [2]],
        "turn_rewards": [[0.0], [0.0], [0.5, 0.0], [0.0]],
    }
    buffer.fill(**settings | changes)
    buffer.advantages = buffer.tensor(buffer.actions).float() * buffer.tensor(buffer.mask)
    return buffer


def test_a_column_is_a_completion_and_a_step_one_of_its_own_tokens() -> None:
    buffer = filled()
    assert len(buffer) == 3 and buffer.lengths.tolist() == LENGTHS
    assert buffer.mask.T.tolist() == [[True, False, False], [True] * 3, [True, True, False], [True, True, False]]
    assert buffer.actions.T.tolist() == [[11, 0, 0], [12, 13, 14], [15, 16, 0], [17, 18, 0]]
    assert buffer.rewards.T.tolist() == [[1, 0, 0], [0, 0, 0], [0.5, 1.5, 0], [0, 0, 0]]
    assert buffer.scored.tolist() == [True, True, True, False]
    assert (buffer.log_probs == -buffer.actions).all()
    assert buffer.group[0].tolist() == [7, 7, 8, 8]
    assert not buffer.alive.any()


def test_a_batch_holds_every_token_once_beside_its_own_numbers() -> None:
    buffer = filled()
    (batch,) = buffer.get()
    assert sorted(batch.actions.tolist()) == [11, 12, 13, 14, 15, 16, 17, 18]
    th.testing.assert_close(batch.old_log_prob, -batch.actions.float())
    th.testing.assert_close(batch.advantages, batch.actions.float())
    obs: Any = batch.observations
    th.testing.assert_close(obs["tokens"][obs["trained"]], batch.actions)
    for row, of in enumerate(obs["prompt_of"]):
        n = [ids[0] for ids in TOKENS].index(obs["tokens"][row, 0].item())
        assert obs["prompts"][of][obs["prompt_mask"][of]].tolist() == PROMPTS[n // 2]
        assert obs["tokens"][row, : len(TOKENS[n])].tolist() == TOKENS[n]
        assert (batch.segment == row).sum() == LENGTHS[n]


@pytest.mark.parametrize("size", [1, 2, 3, 4, None])
def test_parts_are_the_minibatch_in_pieces(size: int | None) -> None:
    buffer = filled()
    (batch,) = buffer.get()
    parts = list(buffer.parts(batch, size))
    assert len(parts) == -(-4 // (size or 4))
    for name in ("actions", "old_log_prob", "advantages", "weight", "even"):
        th.testing.assert_close(th.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    for part in parts:
        obs: Any = part.observations
        th.testing.assert_close(obs["tokens"][obs["trained"]], part.actions)
        assert part.segment is not None and part.segment[0] == 0
        assert obs["prompt_mask"].any(dim=0).all(), "no column of padding alone"
        assert obs["trained"].any(dim=0)[-1]


def test_minibatches_hold_whole_completions_each_once() -> None:
    set_random_seed(0)
    batches = list(filled().get(2))
    assert [len(batch.observations["tokens"]) for batch in batches] == [2, 2]  # type: ignore[call-overload]
    assert sorted(t for batch in batches for t in batch.actions.tolist()) == [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize(
    ("aggregation", "total"), [("mean", 1.0), ("row_mean", 1.0), ("rollout_mean", 1.0), ("constant", 8 / (4 * 10))]
)
def test_weights_of_a_rollout_sum_to_its_mean(aggregation: Any, total: float) -> None:
    """8 tokens, 4 rows, at most 10 tokens each: constant divides by 40."""
    buffer = filled()
    buffer.aggregation, buffer.max_length = aggregation, 10
    (batch,) = buffer.get()
    assert batch.weight.sum().item() == pytest.approx(total)


def test_minibatches_of_the_rollouts_mean_average_to_it() -> None:
    buffer = filled()
    buffer.aggregation = "rollout_mean"
    sums = [batch.weight.sum().item() for batch in buffer.get(2)]
    assert np.mean(sums) == pytest.approx(1.0)


def test_choosing_completions() -> None:
    """Rewards (1, 1 | 2, 3): the first group ties. Masked, it weighs 0 and counts; dropped, it does neither."""
    rewards = (1.0, 1.0, 2.0, 3.0)
    kept = filled(rewards)
    kept.choose("keep", False, 0.0)
    assert len(next(kept.get()).actions) == 8
    masked = filled(rewards)
    masked.aggregation = "mean"
    masked.choose("mask", False, 0.0)
    (batch,) = masked.get()
    assert batch.weight.sum().item() == pytest.approx(4 / 8)
    assert batch.even is not None and batch.even.sum().item() == pytest.approx(4 / 8)
    assert (batch.weight[batch.actions < 15] == 0).all()
    dropped = filled(rewards)
    dropped.aggregation = "mean"
    dropped.choose("drop", False, 0.0)
    (batch,) = dropped.get()
    assert sorted(batch.actions.tolist()) == [15, 16, 17, 18] and batch.weight.sum().item() == pytest.approx(1)
    cut = filled(rewards)
    cut.choose("keep", True, 0.0)
    assert sorted(next(cut.get()).actions.tolist()) == [11, 15, 16, 17, 18]


def test_tokens_of_low_entropy_teach_nothing() -> None:
    """Entropies are id/100: below the median of 11 … 18 are 11 … 14."""
    buffer = filled()
    buffer.choose("keep", False, 0.5)
    (batch,) = buffer.get()
    assert batch.actions[batch.advantages == 0].tolist() == sorted([11, 12, 13, 14], key=batch.actions.tolist().index)


def test_when_nothing_is_left_there_is_no_batch() -> None:
    buffer = filled((1.0, 1.0, 1.0, 1.0))
    buffer.choose("drop", False, 0.0)
    assert list(buffer.get()) == []


def test_per_token_puts_values_where_their_tokens_are() -> None:
    for size in (None, 1, 3):
        values = filled().per_token(lambda rows, actions: actions, size)
        assert values.T.tolist() == [[11, 0, 0], [12, 13, 14], [15, 16, 0], [17, 18, 0]]


def test_ties_are_among_the_scored_members() -> None:
    group, rewards = np.array([5, 5, 5, 9, 9, 3]), np.array([1.0, 1, np.nan, 1, 2, 7])
    assert tied_members(group, rewards, np.isfinite(rewards)).tolist() == [True] * 3 + [False] * 2 + [True]


def test_a_completion_without_tokens_takes_no_part() -> None:
    tokens, trained = [[], *TOKENS[1:]], [[], *TRAINED[1:]]
    none = np.zeros(0, np.float32)
    log_probs = [none, *(np.zeros(n, np.float32) for n in LENGTHS[1:])]
    buffer = filled(tokens=tokens, trained=trained, log_probs=log_probs, entropies=log_probs)
    assert len(next(buffer.get()).actions) == 7
    assert buffer.outcomes(buffer.tensor(buffer.rewards), by_turn=False)[4].tolist() == [[False, True, True, False]]


def test_outcomes_by_turn_by_hand() -> None:
    """The third conversation has two turns of a token each: 0.5 after the first, 1.5 after the second."""
    buffer = filled()
    assert buffer.turn.T.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert buffer.outcome.tolist() == [1, 0, 2, 0]
    to_go = buffer.tensor(buffer.rewards).flip(0).cumsum(0).flip(0)
    returns, lengths, group, age, mask = buffer.outcomes(to_go, by_turn=True)
    assert mask.tolist() == [[True, True, True, False], [False, False, True, False]]
    assert returns[mask].tolist() == [1, 0, 2, 1.5] and lengths[mask].tolist() == [1, 3, 2, 1]
    assert group.tolist() == [[7, 7, 8, 8]] * 2 and age.tolist() == [[0] * 4, [1] * 4]
    values = th.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]])
    assert buffer.spread(values).T.tolist() == [[1, 0, 0], [2, 2, 2], [3, 30, 0], [4, 4, 0]]
    assert buffer.spread(values[:1]).T.tolist() == [[1, 0, 0], [2, 2, 2], [3, 3, 0], [4, 4, 0]]
