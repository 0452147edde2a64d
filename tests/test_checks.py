"""What GRPO warns about at construction; what it refuses is in test_grpo.py and test_sb3_contract.py."""

import inspect
import warnings

import pytest

from grpo_rl import GRPO
from grpo_rl.checks import HYBRID_ONLY


def build(**settings) -> list[str]:
    """The warnings of a construction on 8 envs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GRPO("MlpPolicy", "CartPole-v1", **settings)
    return [str(warning.message) for warning in caught]


def test_defaults_say_nothing():
    assert build() == []
    assert build(value_head=True) == []


@pytest.mark.parametrize(
    "settings", [{"vf_coef": 0.6}, {"gae_lambda": 0.9}, {"clip_range_vf": 0.2}, {"group_weight": lambda left: left}]
)
def test_what_only_a_value_head_reads_is_said_without_one(settings):
    assert build(**settings) == [
        f"without a value head nothing reads {next(iter(settings))}: add value_head=True, or leave it out"
    ]
    assert build(value_head=True, **settings) == []


def test_two_of_them_are_one_warning():
    assert build(gae_lambda=0.9, vf_coef=1) == [
        "without a value head nothing reads vf_coef, gae_lambda: add value_head=True, or leave it out"
    ]


def test_the_defaults_that_are_compared_with_are_the_signatures():
    parameters = inspect.signature(GRPO.__init__).parameters
    assert {name: parameters[name].default for name in HYBRID_ONLY} == HYBRID_ONLY


def test_a_minibatch_that_is_no_factor_and_one_that_is_larger_than_the_rollout():
    """32 steps in each of 8 envs are 256 rows: 100 leaves 56 of them over, 300 is more than all."""
    (remainder,) = build(n_steps=32, batch_size=100)
    assert "truncated mini-batch of size 56 join the others" in remainder
    (larger,) = build(n_steps=32, batch_size=300)
    assert larger.startswith("batch_size=300 is more than the `n_steps * n_envs = 256` steps of a rollout")
    assert "one mini-batch of all its rows" in larger
    assert build(n_steps=32, batch_size=256) == []
