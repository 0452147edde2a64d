"""YAML of settings: numbers, round trips, limits. Hostile texts are in test_fuzz.py."""

import datetime
import math
import time
from typing import Any

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.plain_yaml import MAX_DEPTH, MAX_VALUES, dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E6", 1e6),
        ("1_000", 1000),
        ("-.5e+1", -5.0),
        (".inf", math.inf),
        ("'3e-4'", "3e-4"),
        ("e4", "e4"),
        ("", None),
        ("2026-01-31", datetime.date(2026, 1, 31)),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
        ("{a: &x {b: 1}, c: {<<: *x, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_what_a_text_says(text: str, value: Any) -> None:
    assert parse_yaml(text, "x") == value


@pytest.mark.parametrize(
    "value", ["3e-4", "1.5", "1_0e+3", "yes", "null", "a: b", "ü\n", 3e-4, 1e300, [1, {"b": None}]]
)
def test_what_is_dumped_is_read_back(value: Any) -> None:
    assert parse_yaml(dump_yaml({"b": value, "a": 1}), "x") == {"b": value, "a": 1}
    assert list(parse_yaml(dump_yaml({"b": value, "a": 1}), "x")) == ["b", "a"]


def test_limits_count_what_aliases_stand_for() -> None:
    """[x, …] with n items is n + 1 values; `MAX_DEPTH` lists within another hold nothing."""
    assert len(parse_yaml(f"[{'1, ' * (MAX_VALUES - 1)}]", "x")) == MAX_VALUES - 1
    with pytest.raises(ConfigError, match="x: its aliases"):
        parse_yaml(f"[{'1, ' * MAX_VALUES}]", "x")
    with pytest.raises(ConfigError, match="x: its aliases"):  # 2 + 101 + 101·101 values
        parse_yaml(f"[&a [{'1, ' * 100}], [{'*a, ' * 100}]]", "x")
    parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "x")
    with pytest.raises(ConfigError, match="x: nested deeper"):
        parse_yaml("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "x")
    half = MAX_DEPTH // 2 + 1
    with pytest.raises(ConfigError, match="x: nested deeper"):  # by an alias at the bottom of another
        parse_yaml(f"[&a {'[' * half}{']' * half}, {'[' * half}*a{']' * half}]", "x")


def test_depth_is_noticed_at_once() -> None:
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="nested deeper"):
        parse_yaml("[" * 90_000, "x")
    assert time.perf_counter() - start < 2  # PyYAML alone: minutes
