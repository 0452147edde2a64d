"""Errors are caught by one root or by their standard parent, and survive the trip out of a worker process."""

import inspect
import pickle

import pytest

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError, ForkError, GRPOError, NonFiniteError, did_you_mean, nearest


@pytest.mark.parametrize(
    ("error", "parent"),
    [
        (ConfigError("x"), ValueError),
        (ForkError("x"), RuntimeError),
        (NonFiniteError("x"), FloatingPointError),
    ],
)
def test_one_root_and_a_standard_parent(error: GRPOError, parent: type[Exception]) -> None:
    assert isinstance(error, GRPOError)
    assert isinstance(error, parent)


def test_fork_error_carries_its_reason_through_pickling() -> None:
    error = pickle.loads(pickle.dumps(ForkError("Foo-v0 cannot be forked: bring get_snapshot", reason="no snapshot")))
    assert (str(error), error.reason) == ("Foo-v0 cannot be forked: bring get_snapshot", "no snapshot")
    assert ForkError("no snapshot").reason == "no snapshot"


def test_non_finite_errors_name_env_and_step_once() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("reward is nan", column=3, step=17)))
    assert str(error) == "env 3, step 17: reward is nan"
    assert (error.column, error.step) == (3, 17)
    assert str(NonFiniteError("loss is nan", step=0)) == "step 0: loss is nan"
    assert str(NonFiniteError("loss is nan")) == "loss is nan"


def test_did_you_mean_gives_the_nearest_name_and_all_valid_ones() -> None:
    assert did_you_mean("weigthed", ["mean", "weighted"]) == 'did you mean "weighted"? valid: mean, weighted'
    assert did_you_mean("zzz", ["mean", "weighted"]) == "valid: mean, weighted"


def test_of_many_names_eight_are_shown() -> None:
    names = [f"name-{i}" for i in range(9)]
    assert nearest("name-33", names).startswith("nearest: name-3")
    assert nearest("zzz", names) == f"valid: {', '.join(names[:8])}, …"
    assert nearest("zzz", names[:8]) == f"valid: {', '.join(names[:8])}"


def test_a_warning_shows_the_users_line_however_deep_it_came_from() -> None:
    with pytest.warns(UserWarning, match="small for group_size") as caught:
        GRPO("MlpPolicy", "CartPole-v1", n_steps=4, batch_size=4, group_size=2)
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
