"""`TurnVecEnv`: conversations side by side, alike at the start, and one that breaks loses only itself."""

import numpy as np
import pytest
from talking_envs import Echo, Fragile, Indifferent, Unseeded
from tokenizers_of_all_kinds import chars

from grpo_rl.errors import ConfigError
from grpo_rl.text import TurnVecEnv
from grpo_rl.text.vec_env import Reply

A, B, HI = (3,), (4,), (10, 11)


def turns(env=Echo, **settings):
    return TurnVecEnv(env, chars(), 4, **{"seed": 0, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_turns": 0}, "max_turns=0: expected a whole number, 1 or more"),
        ({"max_turns": 2.5}, "max_turns=2.5: expected a whole number"),
        ({"n_envs": 0}, "n_envs=0: expected a whole number, 1 or more"),
        ({"seed": "x"}, "seed='x': expected a whole number, 0 or more"),
        ({"stop_string": "."}, 'no argument "stop_string": did you mean "stop_strings"'),
        ({"env": Echo()}, "expected a class, a function that makes a new env, or an id"),
        ({"env": lambda: None}, "expected a gymnasium.Env, got None"),
        ({"env": "Nope-v0"}, 'knows no "Nope-v0"'),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_said_at_once(settings, words):
    with pytest.raises(ConfigError, match=words):
        turns(**settings)


def test_turns_by_hand():
    env = turns(lambda: Echo(turns=2))
    prompts = env.start(n_groups=2, group_size=2)
    assert [prompt.columns["user"] for prompt in prompts] == [prompt.text for prompt in prompts]
    assert env.reply([0, 1, 2, 3], [HI, A, (*A, 1), HI]) == [
        Reply(HI, "hi", 2.0, False),
        Reply(A, "a", 1.0, False),
        Reply(A, "a", 1.0, False),
        Reply(HI, "hi", 2.0, False),
    ]
    assert env.reply([1, 0], [HI, A]) == [Reply((), None, 2.0, True), Reply((), None, 1.0, True)]
    env.reply([2, 3], [A, A])
    assert env.score().tolist() == [[3], [3], [2], [3]]
    assert env.group_ids(env.score(), [1] * 4).tolist() == [0, 0, 1, 1]
    assert env.reward_names == ("env",)


def test_members_of_a_group_start_alike():
    env = turns()
    firsts = [prompt.text for prompt in env.start(20, 3)]
    assert len(set(firsts)) > 3
    assert len({prompt.row for prompt in env.prompts}) == 20
    with pytest.raises(ConfigError, match=r"members of a group must start alike.*self.np_random"):
        turns(Unseeded).start(1, 2)


@pytest.mark.parametrize(("kind", "what"), [(Fragile, "OSError.*connection lost"), (Indifferent, "the reward nan")])
def test_an_env_that_breaks_loses_only_its_conversation(kind, what):
    env = turns(lambda: kind(turns=2))
    env.start(1, 3)
    env.reply([0], [A])
    with pytest.warns(UserWarning, match=rf"conversation 1, turn \d: .*{what}.*counts as None"):
        replies = env.reply([1, 2], [B, A])
    assert replies == [Reply((), None, 0.0, True), Reply(A, "a", 1.0, False)]
    env.reply([0, 2], [A, A])
    np.testing.assert_array_equal(env.score(), [[2], [np.nan], [2]])
    env.start(1, 3)
    assert env.reply([1], [A])[0].reward == 1.0, "built anew"


def test_an_env_that_has_never_worked_is_an_error():
    env = turns(Fragile)
    env.start(1, 2)
    with pytest.raises(ConfigError, match="conversation 0, turn 0: OSError"):
        env.reply([0, 1], [B, B])


def test_resumed_conversations_start_as_the_next_ones():
    env, other = turns(), turns(seed=5)
    env.start(2, 2)
    other.set_state(env.state())
    assert [prompt.text for prompt in env.start(6, 1)] == [prompt.text for prompt in other.start(6, 1)]


class Unreachable(Echo):
    """Its next resets raise, as many as `broken` says."""

    broken = 0

    def reset(self, *, seed=None, options=None):
        if Unreachable.broken:
            Unreachable.broken -= 1
            raise OSError("no backend")
        return super().reset(seed=seed, options=options)


def test_a_reset_that_raises_loses_only_its_conversation():
    env = turns(lambda: Unreachable(turns=1))
    env.start(1, 2)
    Unreachable.broken = 1
    with pytest.warns(UserWarning, match=r"conversation 0, turn 0: OSError\('no backend'\). Its reward counts as None"):
        prompts = env.start(1, 3)
    replies = env.reply([0, 1, 2], [A, A, HI])
    assert len(prompts) == 1 and replies[0] == Reply((), None, 0.0, True)
    np.testing.assert_array_equal(env.score(), [[np.nan], [1], [2]])


def test_a_group_whose_resets_all_raise_begins_again():
    env = turns(lambda: Unreachable(turns=1))
    env.start(1, 2)
    Unreachable.broken = 2
    with pytest.warns(UserWarning, match="no backend"):
        prompts = env.start(2, 2)
    env.reply([0, 1, 2, 3], [A, A, HI, A])
    assert len(prompts) == 2 and env.score().tolist() == [[1], [1], [2], [1]]


def test_an_env_that_cannot_be_reset_is_an_error():
    """At once where no reset has ever worked; else after 8 seeds for a group of 2."""
    Unreachable.broken = 1
    with pytest.raises(ConfigError, match=r"OSError.*no backend"):
        turns(Unreachable).start(1, 2)
    Unreachable.broken = 0
    env = turns(Unreachable)
    env.start(1, 2)
    Unreachable.broken = 10**6
    with (
        pytest.raises(ConfigError, match=r"though 16 were tried.*no backend"),
        pytest.warns(UserWarning, match="backend"),
    ):
        env.start(1, 2)
    Unreachable.broken = 0
