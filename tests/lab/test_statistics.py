"""Every expected number is worked out by hand next to its assertion."""

import numpy as np
import pytest

from grpo_rl.lab.statistics import bootstrap, iqm, performance_profile, probability_of_improvement, ratio_of_iqms


def scores(*tasks):
    return [np.array(task, dtype=float) for task in tasks]


def test_iqm_cuts_a_quarter_at_either_end():
    # 8 values, two cut at either end: (3 + 4 + 5 + 6) / 4; the outlier 1000 does not count.
    assert iqm(scores([8, 1, 2, 3, 4, 5, 6, 1000])) == 4.5


def test_iqm_rounds_the_cut_down():
    # 5 values, 5 // 4 = 1 cut at either end: (2 + 3 + 4) / 3. 3 values: nothing cut.
    assert iqm(scores([1, 2, 3, 4, 50])) == 3.0
    assert iqm(scores([0, 0, 9])) == 3.0


def test_iqm_pools_tasks_and_evaluations():
    # Two tasks and a run with two evaluations pool to 1 … 8: (3 + 4 + 5 + 6) / 4.
    assert iqm(scores([[1, 2], [3, 4]], [5, 6, 7, 8])) == 4.5


def test_ratio_of_iqms():
    # 6 / 3
    assert ratio_of_iqms(scores([6, 6, 6]), scores([3, 3, 3])) == 2.0


def test_probability_of_improvement_counts_pairs_and_halves_ties():
    # Pairs of (1, 3) against (1, 2): 1>1 tie ½, 1>2 no, 3>1 yes, 3>2 yes: 2.5 / 4.
    assert probability_of_improvement(scores([1, 3]), scores([1, 2])) == 0.625
    # A second task that is always won: (0.625 + 1) / 2.
    assert probability_of_improvement(scores([1, 3], [9, 9]), scores([1, 2], [0, 0])) == 0.8125


def test_performance_profile_is_a_share_of_runs_averaged_over_tasks():
    # Above 0: 1 and 1; above 2: ½ and 1; above 4: 0 and ½. Averages: 1, .75, .25.
    assert performance_profile(scores([1, 3], [3, 5]), [0, 2, 4]).tolist() == [1.0, 0.75, 0.25]


def test_bootstrap_of_two_values_has_its_exact_quantiles():
    # Two runs 0 and 1: a resample's mean is 0, ½ or 1 with chances ¼, ½, ¼.
    # The middle 40 % lies at ½, the middle 95 % spans 0 … 1.
    assert bootstrap(iqm, scores([0, 1]), confidence=0.4) == (0.5, 0.5, 0.5)
    assert bootstrap(iqm, scores([0, 1])) == (0.5, 0.0, 1.0)


def test_bootstrap_is_stratified():
    # One run per task: resampling within a task changes nothing, though the tasks differ widely.
    assert bootstrap(iqm, scores([1], [100])) == (50.5, 50.5, 50.5)


def test_bootstrap_keeps_the_evaluations_of_a_run_together():
    # Both runs average 5: any resample of whole runs is 5, while a resample of single values would spread.
    assert bootstrap(iqm, scores([[0, 10], [10, 0]])) == (5.0, 5.0, 5.0)


def test_bootstrap_resamples_each_group_on_its_own():
    low = bootstrap(ratio_of_iqms, scores([1, 2]), scores([1, 2])).low
    # The worst draws are (1, 1) over (2, 2), chance 1/16 > 2.5 %.
    assert low == 0.5


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = [
        interval.low <= 0 <= interval.high
        for interval in (bootstrap(iqm, [rng.normal(size=20)], resamples=300, seed=i) for i in range(100))
    ]
    # Nominal 95 of 100; the percentile bootstrap is a little narrow at n = 20, and 100 trials deviate by about 2.5.
    assert np.mean(hits) > 0.84


def test_tasks_must_match():
    with pytest.raises(ValueError, match="zip"):
        probability_of_improvement(scores([1]), scores([1], [2]))
