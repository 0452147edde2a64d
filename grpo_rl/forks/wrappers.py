"""What known wrappers keep: what belongs to the episode, and travels, and what lasts, and stays with its env."""

from __future__ import annotations

from dataclasses import dataclass

# What gymnasium's own Wrapper and RecordConstructorArgs keep.
BARE = frozenset(["env", "_saved_kwargs", "_action_space", "_observation_space", "_metadata", "_cached_spec"])


@dataclass(frozen=True)
class Keeps:
    """Attributes of a wrapper.

    Args:
        episode: Those that belong to the episode: they travel with a fork.
        lasting: Running statistics, lists and counts: they stay with their env, and belong into a checkpoint.
        optional: Those that an older version, or an env before its first reset, lacks.
    """

    episode: tuple[str, ...] = ()
    lasting: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()


_WRAPPERS: dict[tuple[str, str], Keeps] = {
    ("gymnasium", "TimeLimit"): Keeps(("_elapsed_steps",)),
    ("gymnasium", "OrderEnforcing"): Keeps(("_has_reset",)),
    ("gymnasium", "PassiveEnvChecker"): Keeps(
        ("checked_step", "checked_data_reuse", "_previous_data"),
        optional=frozenset({"checked_data_reuse", "_previous_data"}),  # absent before gymnasium 1.4
    ),
    ("gymnasium", "Autoreset"): Keeps(("autoreset",)),
    ("gymnasium", "RecordEpisodeStatistics"): Keeps(
        ("episode_start_time", "episode_returns", "episode_lengths"),
        ("episode_count", "time_queue", "return_queue", "length_queue"),
    ),
    ("gymnasium", "NormalizeObservation"): Keeps(lasting=("obs_rms", "_update_running_mean")),
    ("gymnasium", "NormalizeReward"): Keeps(("discounted_reward",), ("return_rms", "_update_running_mean")),
    ("gymnasium", "FrameStackObservation"): Keeps(("obs_queue",)),
    ("gymnasium", "DelayObservation"): Keeps(("observation_queue",)),
    ("gymnasium", "TimeAwareObservation"): Keeps(("timesteps",)),
    ("gymnasium", "MaxAndSkipObservation"): Keeps(("_obs_buffer",)),
    ("gymnasium", "StickyAction"): Keeps(("last_action", "is_sticky_actions", "num_repeats", "repeats_taken")),
    ("gymnasium", "AtariPreprocessing"): Keeps(("lives", "game_over", "obs_buffer")),
    ("stable_baselines3", "Monitor"): Keeps(
        ("rewards", "needs_reset", "current_reset_info"),
        ("episode_returns", "episode_lengths", "episode_times", "total_steps"),
    ),
    ("stable_baselines3", "StickyActionEnv"): Keeps(("_sticky_action",), optional=frozenset({"_sticky_action"})),
    ("stable_baselines3", "EpisodicLifeEnv"): Keeps(("lives", "was_real_done")),
    ("stable_baselines3", "MaxAndSkipEnv"): Keeps(("_obs_buffer",)),
    ("grpo_rl", "Curriculum"): Keeps(lasting=("_whole",)),  # its episode is in its own get_snapshot
    ("minigrid", "ReseedWrapper"): Keeps(("seed_idx",)),
    ("minigrid", "ActionBonus"): Keeps(("counts",)),  # it counts for good, but the next reward depends on it
    ("minigrid", "PositionBonus"): Keeps(("counts",)),
    ("minigrid", "DirectionObsWrapper"): Keeps(("goal_position",), optional=frozenset({"goal_position"})),
}
_NOTHING = {
    "gymnasium": """TransformObservation FilterObservation FlattenObservation GrayscaleObservation ResizeObservation
        ReshapeObservation RescaleObservation DtypeObservation AddRenderObservation DiscretizeObservation
        TransformAction ClipAction RescaleAction DiscretizeAction RepeatAction TransformReward ClipReward
        RenderCollection RecordVideo HumanRendering AddWhiteNoise ObstructView ArrayConversion JaxToNumpy JaxToTorch
        NumpyToTorch""",
    "stable_baselines3": "NoopResetEnv FireResetEnv ClipRewardEnv WarpFrame AtariWrapper",
    "minigrid": """ImgObsWrapper OneHotPartialObsWrapper RGBImgObsWrapper RGBImgPartialObsWrapper FullyObsWrapper
        DictObservationSpaceWrapper FlatObsWrapper ViewSizeWrapper SymbolicObsWrapper StochasticActionWrapper
        NoDeath""",
}
_WRAPPERS |= {(package, name): Keeps() for package, names in _NOTHING.items() for name in names.split()}


def known_wrapper(cls: type) -> Keeps | None:
    """What instances of a wrapper class keep; None if the class is not known."""
    return _WRAPPERS.get((cls.__module__.partition(".")[0], cls.__name__))
