"""Observations that SB3 cannot batch are refused before it tries."""

from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation
from probe_envs import Spaces, box

from grpo_rl import GRPO, make_group_env
from grpo_rl.errors import ConfigError
from grpo_rl.groups.observations import batchable

ACTION = spaces.Discrete(2)
NESTED = spaces.Dict({"a": box(1, low=0, high=1), "b": spaces.Dict({"c": spaces.Discrete(2)})})


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(5), "the observation is a Text"),
        (spaces.Sequence(spaces.Discrete(2)), "the observation is a Sequence"),
        (spaces.Graph(box(1, low=0, high=1), None), "the observation is a Graph"),
        (spaces.Dict({"a": box(1), "say": spaces.Text(5)}), "observation 'say' is a Text"),
        (spaces.Tuple([ACTION, spaces.Text(5)]), "observation 1 is a Text"),
        (NESTED, "observation 'b' is a Dict, .*FlattenObservation"),
        (spaces.Tuple([ACTION, spaces.Tuple([ACTION])]), "observation 1 is a Tuple, .*FlattenObservation"),
    ],
)
def test_what_cannot_be_batched_is_refused(space: Any, words: str) -> None:
    for make in (
        lambda: make_group_env(lambda: Spaces(space, ACTION)),
        lambda: GRPO("MlpPolicy", Spaces(space, ACTION)),
    ):
        with pytest.raises(ConfigError, match=f"{words}.*wrap"):
            make()


def test_what_can_be_passes_and_so_does_what_the_message_proposes() -> None:
    for space in (box(2), ACTION, spaces.Dict({"a": box(2), "b": ACTION}), spaces.Tuple([box(2), ACTION])):
        assert batchable(Spaces(space, ACTION)).observation_space == space
    batchable(FlattenObservation(Spaces(NESTED, ACTION)))


def test_minigrid_is_told_its_wrapper() -> None:
    minigrid = pytest.importorskip("minigrid")
    with pytest.raises(ConfigError, match=r"'mission' is a MissionSpace.*wrapper=minigrid\.wrappers\.ImgObsWrapper"):
        make_group_env("MiniGrid-Empty-5x5-v0")
    env = make_group_env("MiniGrid-Empty-5x5-v0", wrapper=minigrid.wrappers.ImgObsWrapper)
    assert env.observation_space.shape == (7, 7, 3)
    assert isinstance(env.envs[0], gym.Wrapper)
