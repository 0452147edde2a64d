"""Schedules: values by hand, both clocks, and the round trips through pickle, dict and SB3."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.utils import FloatSchedule

from grpo_rl.errors import ConfigError
from grpo_rl.schedules import ConstantSchedule, LinearSchedule, PiecewiseSchedule, Schedule, parse_schedule

ALL = [
    ConstantSchedule(0.2),
    LinearSchedule(3e-4, 0.0),
    LinearSchedule(0.0, 1.0, steps=1e6),
    PiecewiseSchedule([(0.0, 1.0), (0.5, 0.1)]),
    PiecewiseSchedule([(0.25, 0.0), (1.0, 8.0)], steps=400),
]


def test_linear_over_progress() -> None:
    schedule = LinearSchedule(4.0, 2.0)
    # progress_remaining 1 → start; 0.75 → a quarter of the way: 4 + 0.25·(2 − 4) = 3.5; 0 → end
    assert [schedule(p) for p in (1.0, 0.75, 0.0)] == [4.0, 3.5, 2.0]


def test_linear_over_env_steps_is_constant_after_them() -> None:
    schedule = LinearSchedule(0.0, 10.0, steps=1e6)
    assert [schedule.at(n) for n in (0, 250_000, 1_000_000, 3_000_000)] == [0.0, 2.5, 10.0, 10.0]


def test_piecewise_is_straight_between_points_and_constant_outside() -> None:
    schedule = PiecewiseSchedule([(0.25, 0.0), (0.5, 8.0), (0.75, 4.0)])
    # at fraction 0.375, half of the first piece: 4; at 0.625, half of the second: 8 + ½·(4 − 8) = 6
    fractions = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
    assert [schedule(1 - f) for f in fractions] == [0.0, 0.0, 4.0, 8.0, 6.0, 4.0, 4.0]
    assert PiecewiseSchedule([(0.25, 0.0), (1.0, 8.0)], steps=400).at(250) == 4.0  # 250/400 is half of 0.25 … 1


def test_constant_follows_either_clock() -> None:
    assert ConstantSchedule(0.2)(0.5) == ConstantSchedule(0.2).at(12345) == 0.2


def test_the_wrong_clock_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runs over env steps: ask \.at"):
        LinearSchedule(0, 1, steps=10)(0.5)
    with pytest.raises(ConfigError, match=r"runs over progress: call it"):
        LinearSchedule(0, 1).at(5)


@given(start=st.floats(-1e6, 1e6), end=st.floats(-1e6, 1e6), progress=st.floats(0, 1))
def test_linear_stays_between_its_ends(start: float, end: float, progress: float) -> None:
    value = LinearSchedule(start, end)(progress)
    slack = 1e-9 * (abs(start) + abs(end))
    assert min(start, end) - slack <= value <= max(start, end) + slack


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_round_trips(schedule: Schedule) -> None:
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert eval(repr(schedule)) == schedule
    settings = json.loads(json.dumps(schedule.to_dict()))
    assert type(schedule).from_dict(settings) == schedule
    assert parse_schedule(settings) == schedule
    assert hash(schedule) == hash(pickle.loads(pickle.dumps(schedule)))


def test_pickles_hold_no_code() -> None:
    assert b"__code__" not in pickle.dumps(FloatSchedule(LinearSchedule(1, 0)))
    assert FloatSchedule(LinearSchedule(1, 0))(0.25) == 0.25


def test_schedules_are_values() -> None:
    assert LinearSchedule(1, 0) == LinearSchedule(1.0, 0.0) != LinearSchedule(1, 0, steps=10)
    with pytest.raises(AttributeError):
        LinearSchedule(1, 0).start = 2.0


def test_parse_schedule() -> None:
    def own(progress_remaining: float) -> float:
        return progress_remaining

    assert parse_schedule(3) == parse_schedule(np.float32(3)) == parse_schedule("3.0") == ConstantSchedule(3.0)
    assert parse_schedule("3e-4") == ConstantSchedule(3e-4)  # YAML reads 3e-4 as a string
    assert parse_schedule("lin_3e-4") == LinearSchedule(3e-4, 0.0)
    assert parse_schedule({"start": 1, "end": 0, "steps": 100}) == LinearSchedule(1, 0, steps=100)
    assert parse_schedule(own) is own
    assert parse_schedule(ALL[1]) is ALL[1]


@pytest.mark.parametrize("wrong", [None, True, "linear", "lin_", [1, 2], {1}])
def test_parse_schedule_says_what_it_accepts(wrong: object) -> None:
    with pytest.raises(ConfigError, match="lin_3e-4"):
        parse_schedule(wrong)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r'unknown key "strat".*did you mean "start"'):
        parse_schedule({"strat": 1, "end": 0})
    with pytest.raises(ConfigError, match=r"LinearSchedule takes start, end, steps; got \{'start': 1\}"):
        parse_schedule({"start": 1})
    with pytest.raises(ConfigError, match="start must be a finite number"):
        LinearSchedule(float("nan"), 0)
    with pytest.raises(ConfigError, match="steps must be a positive number"):
        LinearSchedule(1, 0, steps=0)
    with pytest.raises(ConfigError, match="pairs"):
        PiecewiseSchedule([1, 2])
    for points in ([], [(0.5, 1), (0.5, 2)], [(0.5, 1), (0, 2)], [(0, 1), (1000, 2)]):
        with pytest.raises(ConfigError, match="must rise within"):
            PiecewiseSchedule(points)
