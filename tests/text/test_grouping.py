"""Grouping strategies: each tested for what it promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.errors import ConfigError
from grpo_rl.text.grouping import ByAbility, ByColumn, ByLength, ByPrompt, Members, parse_grouping, z_scores
from grpo_rl.text.tasks import Prompt


def members(rows, group_size=1, lengths=None, rewards=None, **columns):
    """`group_size` conversations for each dataset row in `rows`."""
    prompts = [Prompt((1,), "x", "x", row, {k: v[i] for k, v in columns.items()}) for i, row in enumerate(rows)]
    n = len(rows) * group_size
    return Members(
        [prompts[i // group_size] for i in range(n)],
        np.arange(n) // group_size,
        np.array(lengths if lengths is not None else [1] * n),
        np.array(rewards if rewards is not None else [0.0] * n),
    )


def test_a_prompt_that_comes_twice_is_two_groups():
    assert ByPrompt().groups(members([5, 7, 5], group_size=2)).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_column_gathers_prompts_of_one_user_and_splits_others():
    grouping = parse_grouping("column:user")
    assert grouping.groups(members([0, 1, 2, 3], 2, user=["ann", "bob", "ann", None])).tolist() == [
        0,
        0,
        1,
        1,
        0,
        0,
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"item": [1]}, 'row 4 has no column "user"; it has item'),
        ({}, "no columns beside the prompt"),
        ({"user": [[1]]}, r"row 4, column 'user': expected a number or a text to group by, got \[1\]"),
    ],
)
def test_a_column_that_cannot_be_compared_is_named(columns, message):
    with pytest.raises(ConfigError, match=message):
        ByColumn("user").groups(members([4], **columns))


def test_lengths_in_percentile_bands_by_hand():
    """1 … 8 in 4 bands: the quartiles are 2.75, 4.5 and 6.25."""
    grouping = ByLength(bands=4)
    lengths = [8, 1, 3, 5, 2, 7, 4, 6]
    assert grouping.groups(members(range(8), lengths=lengths)).tolist() == [3, 0, 1, 2, 0, 3, 1, 2]
    assert grouping.edges.tolist() == [2.75, 4.5, 6.25]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(2, 6))
def test_bands_of_length_do_not_overlap(lengths, bands):
    groups = ByLength(bands).groups(members(range(len(lengths)), lengths=lengths))
    assert ((groups >= 0) & (groups < bands)).all()
    for low in range(bands - 1):
        below, above = np.array(lengths)[groups == low], np.array(lengths)[groups > low]
        if below.size and above.size:
            assert below.max() < above.min()


def test_different_lengths_share_the_bands_evenly():
    lengths = np.random.default_rng(0).permutation(100)
    groups = ByLength(bands=5).groups(members(range(100), lengths=lengths))
    assert np.bincount(groups).tolist() == [20] * 5


def test_bands_move_with_the_lengths_every_so_many_rollouts():
    grouping, short, long = ByLength(bands=2, every=2, memory=4), [1, 2, 3, 4], [11, 12, 13, 14]
    assert grouping.groups(members(range(4), lengths=short)).tolist() == [0, 0, 1, 1]
    assert grouping.groups(members(range(4), lengths=long)).tolist() == [1, 1, 1, 1], "not yet"
    assert grouping.groups(members(range(4), lengths=long)).tolist() == [0, 0, 1, 1]


def test_z_scores_by_hand():
    """0, 0, 6: mean 2, population std √8; (6 - 2)/√8 = √2."""
    np.testing.assert_allclose(z_scores([0, 0, 6]), [-2 / 8**0.5, -2 / 8**0.5, 2**0.5])
    assert z_scores([3, 3, 3]).tolist() == [0, 0, 0]
    assert z_scores([]).tolist() == []


def test_an_outlier_is_clipped():
    scores = [0.0] * 99 + [1.0]
    assert z_scores(scores).max() == 2.0, "unclipped it is √99 = 9.95"


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.floats(0.1, 10), st.floats(-50, 50))
def test_z_scores_do_not_depend_on_the_scale(scores, factor, shift):
    spread = np.ptp(scores)
    if spread == 0 or spread > 1e-3:  # less is lost in rounding
        np.testing.assert_allclose(z_scores(np.array(scores) * factor + shift), z_scores(scores), atol=1e-6)


def test_ability_is_what_was_earned_before():
    """Scores 0, 0.5, 1: z = -1.22, 0, 1.22; in 4 bands of width 1 over -2 … 2 that is 0, 2, 3."""
    grouping = ByAbility(bands=4, decay=0.0)
    first = members([7, 8, 9], 2, rewards=[0, 0, 0, 1, 1, 1])
    assert grouping.groups(first).tolist() == [2] * 6, "nothing is known: all are average"
    assert grouping.scores == {7: 0.0, 8: 0.5, 9: 1.0}
    assert grouping.groups(members([9, 8, 7, 55])).tolist() == [3, 2, 0, 2], "a row that is new is average"


def test_ability_of_a_user_moves_slowly_and_skips_what_has_no_reward():
    """0.9 · 1 + 0.1 · 0 = 0.9."""
    grouping = ByAbility(column="user", decay=0.9)
    grouping.groups(members([0, 1], rewards=[1.0, 1.0], user=["ann", "ann"]))
    grouping.groups(members([2, 3], rewards=[0.0, np.nan], user=["ann", "bob"]))
    assert grouping.scores == {"ann": 0.9}


def test_bands_of_ability_are_taken_anew_every_so_many_rollouts():
    grouping = ByAbility(bands=2, every=2, decay=0.0)
    low_high, high_low = members([1, 2], rewards=[0.0, 1.0]), members([1, 2], rewards=[1.0, 0.0])
    assert grouping.groups(low_high).tolist() == [1, 1]
    assert grouping.groups(low_high).tolist() == [1, 1], "not yet"
    assert grouping.groups(high_low).tolist() == [0, 1]
    grouping.groups(high_low)
    assert grouping.groups(high_low).tolist() == [1, 0], "members changed places, and groups with them"


@pytest.mark.parametrize("make", [ByPrompt, ByLength, ByAbility, lambda: ByColumn("user")])
def test_a_resumed_strategy_goes_on_as_the_old_one(make):
    rng = np.random.default_rng(0)

    def rollout():
        rows = rng.integers(0, 5, 8)
        return members(rows, lengths=rng.integers(1, 9, 8), rewards=rng.random(8), user=rows)

    grouping, other = make(), make()
    for _ in range(3):
        grouping.groups(rollout())
    other.set_state(grouping.state())
    for _ in range(3):
        seen = rollout()
        assert grouping.groups(seen).tolist() == other.groups(seen).tolist()


def test_names():
    assert [type(parse_grouping(name)) for name in ("prompt", "length", "ability")] == [ByPrompt, ByLength, ByAbility]
    own = ByLength(3)
    assert parse_grouping(own) is own
    for wrong in ("lenght", "column:", 3):
        with pytest.raises(ConfigError, match=r"grouping=.* is unknown.*valid: prompt, length, ability, column:NAME"):
            parse_grouping(wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByLength(bands=1), "bands: expected at least 2, got 1"),
        (lambda: ByLength(every=0), "every: expected at least 1"),
        (lambda: ByAbility(bands=1), "bands"),
        (lambda: ByAbility(decay=1.0), "decay: expected 0 … 1"),
    ],
)
def test_numbers_out_of_range(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
