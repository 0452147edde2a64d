"""The plans on an env whose course is known: actions are scripted, and every array is compared exactly.

`Counter` observes [episode, t] and pays 100·episode + t; action 0 goes on, 1 terminates, 2 truncates. A column is a
string of actions, one a step; steps in which it is frozen are written as ".".
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from probe_envs import Counter, box
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from grpo_rl import make_group_env
from grpo_rl.buffers import GroupBuffer
from grpo_rl.errors import NonFiniteError
from grpo_rl.groups.assign import choose_grouping
from grpo_rl.sampling.steps import StepSampler


class Seeded(gym.Env):
    """Observes [start, t], start drawn at reset, pays t; actions as Counter's. The library cannot fork it."""

    observation_space = box(2)
    action_space = spaces.Discrete(3)

    def __init__(self, seeded: bool = True) -> None:
        self.seeded = seeded

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        generator = self.np_random if self.seeded else np.random.default_rng()
        self.start, self.t = float(generator.normal()), 0
        return np.array([self.start, self.t], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.start, self.t], np.float32), self.t - 1.0, action == 1, action == 2, {}


class Run:
    """A sampler with a scripted policy; `roll` plays one rollout and gives its buffer."""

    def __init__(self, env: VecEnv, group_size: int, kind: str, means: str = "auto", **settings: Any) -> None:
        self.columns: list[str] = []
        self.value_head = settings.get("value_head", False)
        self.model = SimpleNamespace(
            policy=self,
            value_head=self.value_head,
            bootstraps=self.value_head,
            device="cpu",
            action_space=env.action_space,
            gamma=settings.get("gamma", 0.5),
            use_sde=False,
            num_timesteps=0,
            _vec_normalize_env=None,
            _last_obs=env.reset(),
            _last_episode_starts=np.ones(env.num_envs, bool),
            _update_info_buffer=lambda infos, dones: None,
        )
        grouping = choose_grouping(env, group_size, kind, means, self.value_head)
        self.sampler = StepSampler(
            self.model, env, grouping, group_size, settings.get("fork_prob", 0.0), settings.get("reset_prob", 0.0)
        )
        self.plan = self.sampler.plan
        self.env = env

    def __call__(self, obs: th.Tensor) -> tuple[th.Tensor, th.Tensor | None, th.Tensor]:
        """The policy: the next actions of the script, values t, log-probabilities 0."""
        step = len(self.buffer)
        actions = [int(column[step].replace(".", "0")) for column in self.columns]
        for i, column in enumerate(self.columns):
            assert (column[step] == ".") == bool(self.sampler.frozen[i]), f"step {step}, column {i}"
        return th.tensor(actions), obs[:, 1:2] if self.value_head else None, th.zeros(len(actions))

    def roll(self, n_steps: int, *columns: str, callback: BaseCallback | None = None) -> GroupBuffer:
        self.columns = list(columns)
        self.buffer = GroupBuffer(self.env.observation_space, self.env.action_space, "cpu")
        before = self.model.num_timesteps
        watch = callback or Silent()
        watch.model = self.model  # type: ignore[assignment]
        finished = self.sampler.sample(watch, self.buffer, n_steps)
        if callback is None:
            assert finished
            assert len(self.buffer) == len(columns[0])  # the script was played to its end
            counted = sum(action != "." for column in columns for action in column)
            assert self.sampler.counted == self.model.num_timesteps - before == counted
        return self.buffer


class Silent(BaseCallback):
    def _on_step(self) -> bool:
        return True


def counters(n_envs: int) -> DummyVecEnv:
    return DummyVecEnv([Counter] * n_envs)


def column(buffer: GroupBuffer, i: int) -> dict[str, list[Any]]:
    """What the buffer says of column i, valid steps only: obs as "episode.t"."""
    valid = buffer.mask[:, i]
    obs = buffer.observations[valid, i]  # type: ignore[call-overload, index]
    return {
        "obs": [f"{episode:.0f}.{t:.0f}" for episode, t in obs],
        "group": buffer.group[valid, i].tolist(),
        "age": buffer.age[valid, i].tolist(),
    }


def bits(array: np.ndarray) -> list[str]:
    """(T, N) bool as one string per column."""
    return ["".join("01"[int(x)] for x in array[:, i]) for i in range(array.shape[1])]


def tails(buffer: GroupBuffer) -> dict[tuple[int, int], list[float]]:
    return {(t, n): obs.tolist() for t, n, obs in buffer.tail_obs}


# --- groups of episodes, from exact roots -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "forks"),
    # without a freeze the member that ends first makes room for a third one, which is dropped when the group closes
    [(lambda: make_group_env(Counter, 1, 2, monitor=False), 2), (lambda: counters(2), 3)],
    ids=["group env", "dummy"],
)
def test_a_group_may_start_from_a_moment_in_the_middle_of_the_last_one(make: Any, forks: int) -> None:
    """Each group is two members that end together, after 4 steps or after what is left of 4: any of its moments may be
    the next root, t in 1 … 3 of episode 0, at age 0 of a new group; a group that ends in its first step leaves none."""
    run = Run(make(), 2, "episode", fork_prob=1.0)
    buffer = run.roll(4, "0001", "0001")
    assert column(buffer, 0) == {"obs": ["0.0", "0.1", "0.2", "0.3"], "group": [0] * 4, "age": [0, 1, 2, 3]}
    buffer = run.roll(1, "1", "1")
    assert column(buffer, 0) == column(buffer, 1)
    assert column(buffer, 0)["obs"][0] in ("0.1", "0.2", "0.3")
    assert (column(buffer, 0)["group"], column(buffer, 0)["age"]) == ([1], [0])
    assert buffer.rewards[0, 0] == int(column(buffer, 0)["obs"][0][-1])  # Counter pays 100·episode + t
    assert set(run.sampler.fork_depths) <= {1, 2, 3}
    assert len(run.sampler.fork_depths) == forks
    buffer = run.roll(1, "1", "1")  # nothing to start from but a fresh start
    assert column(buffer, 0)["obs"] == column(buffer, 1)["obs"] == ["1.0"]


def test_any_moment_of_a_group_may_be_the_next_root() -> None:
    """4 moments would each be drawn with chance 1/4: over 400 groups of 5 steps, each 100 ± 4.5σ (σ ≈ 8.7)."""
    np.random.seed(0)
    run = Run(make_group_env(Counter, 1, 2, monitor=False), 2, "episode", fork_prob=1.0)
    seen = []
    for _ in range(400):
        run.roll(5, "00001", "00001")
        seen.append(int(column(run.roll(1, "1", "1"), 0)["obs"][0].split(".")[1]))
        run.plan.lanes[0].branch = None  # the next group starts afresh
    assert set(seen) == {1, 2, 3, 4}
    assert all(61 < seen.count(t) < 139 for t in (1, 2, 3, 4))


def test_a_member_that_has_ended_waits_where_the_env_can_freeze() -> None:
    run = Run(make_group_env(Counter, 1, 2, monitor=False), 2, "episode")
    buffer = run.roll(2, "001", "1..")  # 4 steps, as many as asked
    assert column(buffer, 0) == {"obs": ["0.0", "0.1", "0.2"], "group": [0, 0, 0], "age": [0, 1, 2]}
    assert column(buffer, 1) == {"obs": ["0.0"], "group": [0], "age": [0]}
    assert bits(buffer.mask) == ["111", "100"]
    assert buffer.rewards.tolist() == [[0, 0], [1, 0], [2, 0]]
    assert bits(buffer.ends & buffer.mask) == ["001", "100"]
    assert not buffer.alive.any()
    assert tails(buffer) == {}
    assert run.sampler.forks == 1  # column 1 started from column 0's state


def test_the_next_group_starts_where_the_last_member_was_reset() -> None:
    """Column 0 ended last and is in episode 1 now: both start there. Then column 1 is last, and its episode is 2."""
    run = Run(make_group_env(Counter, 1, 2, monitor=False), 2, "episode")
    run.roll(1, "01", "1.")
    buffer = run.roll(2, "21", "11")  # two groups of two steps
    assert column(buffer, 0) == {"obs": ["1.0", "2.0"], "group": [1, 2], "age": [0, 0]}
    assert column(buffer, 1) == column(buffer, 0)
    assert bits(buffer.ends) == ["11", "11"]
    assert bits(buffer.alive) == ["10", "00"]
    assert tails(buffer) == {(0, 0): [1, 1]}  # the true next observation of the truncated member


def test_lanes_go_on_independently_to_the_end_of_the_rollout() -> None:
    """Target 2·4 = 8. Lane 1 ends after 4 counted steps and opens group 2; lane 0 reaches 8 and waits, frozen."""
    run = Run(make_group_env(Counter, 2, 2, monitor=False), 2, "episode")
    buffer = run.roll(2, "01.", "01.", "101", "101")
    assert [column(buffer, i)["group"] for i in range(4)] == [[0, 0], [0, 0], [1, 2, 2], [1, 2, 2]]
    assert [column(buffer, i)["age"] for i in range(4)] == [[0, 1], [0, 1], [0, 0, 1], [0, 0, 1]]
    assert bits(buffer.mask) == ["110", "110", "111", "111"]
    assert column(buffer, 3)["obs"] == ["0.0", "1.0", "1.1"]


def test_one_env_visits_the_root_again_and_again() -> None:
    run = Run(counters(1), 3, "episode")
    buffer = run.roll(1, "1012")
    assert column(buffer, 0) == {"obs": ["0.0", "0.0", "0.1", "0.0"], "group": [0] * 4, "age": [0, 0, 1, 0]}
    assert bits(buffer.ends) == ["1011"]
    assert bits(buffer.alive) == ["0001"]
    assert run.sampler.forks == 2
    buffer = run.roll(1, "111")
    assert column(buffer, 0) == {"obs": ["1.0"] * 3, "group": [1] * 3, "age": [0] * 3}


def test_columns_that_cannot_wait_start_further_members() -> None:
    """Group of 3 in 2 columns. Member 3 is one too many: it ends in time in the first rollout, in the second not."""
    run = Run(counters(2), 3, "episode")
    buffer = run.roll(1, "0110", "1001")
    assert column(buffer, 0) == {"obs": ["0.0", "0.1", "0.0"], "group": [0] * 3, "age": [0, 1, 0]}
    assert column(buffer, 1) == {"obs": ["0.0", "0.0", "0.1", "0.2"], "group": [0] * 4, "age": [0, 0, 1, 2]}
    assert bits(buffer.mask) == ["1110", "1111"]
    buffer = run.roll(1, "0100", "1001")
    assert bits(buffer.mask) == ["1100", "1111"]  # steps 2 and 3 of column 0 are dropped
    assert column(buffer, 0) == {"obs": ["1.0", "1.1"], "group": [1, 1], "age": [0, 1]}
    assert bits(buffer.ends & buffer.mask) == ["0100", "1001"]


def test_members_that_end_together_all_count_once() -> None:
    """Three columns, group of 2, cannot freeze: all three end in step 0. The group is complete, and the next opens."""
    run = Run(counters(3), 2, "episode")
    buffer = run.roll(2, "11", "11", "11")
    assert [column(buffer, i)["group"] for i in range(3)] == [[0, 1]] * 3
    assert bits(buffer.mask) == ["11"] * 3


def test_what_ends_with_the_last_member_does_not_count_for_the_next_group() -> None:
    """Group of 3 in 2 columns: in step 1 member 2 completes it, and the extra member 3 ends in time, just.

    The next group opens in both columns and needs three ends of its own: it gets them in steps 2 and 3.
    """
    run = Run(counters(2), 3, "episode")
    buffer = run.roll(3, "1111", "1111")
    assert bits(buffer.mask) == bits(buffer.ends) == ["1111", "1111"]
    assert column(buffer, 0)["group"] == column(buffer, 1)["group"] == [0, 0, 1, 1]
    assert column(buffer, 0)["obs"] == column(buffer, 1)["obs"] == ["0.0", "0.0", "1.0", "1.0"]


def test_no_segment_begins_in_a_row_that_does_not_count() -> None:
    """Frozen and dropped rows are ends, so that what begins after them begins there: outcome credit reads that."""
    run = Run(make_group_env(Counter, 2, 2, monitor=False), 2, "episode")
    buffer = run.roll(3, "0011", "1..1", "0011", "1..1")  # two groups in each lane
    assert bits(buffer.mask)[1] == "1001"
    assert bits(buffer.ends)[1] == "1111"
    run = Run(counters(2), 3, "episode")
    buffer = run.roll(5, "010011", "100110")
    assert bits(buffer.mask) == ["110011", "111110"]
    assert bits(buffer.ends) == ["011111", "100111"]


# --- groups of episodes, from seeded resets ---------------------------------------------------------------------------
def test_seeded_groups() -> None:
    """Column 0 ends first and plays on for itself; column 1 is slowest, so that those further steps are dropped."""
    run = Run(DummyVecEnv([Seeded, Seeded]), 2, "episode")
    buffer = run.roll(1, "100", "001")
    start = buffer.observations[0, :, 0]  # type: ignore[call-overload]
    assert start[0] == start[1]
    assert bits(buffer.mask) == ["100", "111"]
    assert buffer.group[buffer.mask].tolist() == [0] * 4
    assert buffer.age.tolist() == [[0, 0], [0, 1], [1, 2]]
    assert bits(buffer.ends & buffer.mask) == ["100", "001"]
    buffer = run.roll(2, "1011", "0001")  # column 0: its own next episode ends in time and is a group of its own
    assert bits(buffer.mask) == ["1111", "1111"]
    first, _, own, *_ = groups = buffer.group[:, 0].tolist()
    assert groups == [first, own, own, groups[3]]
    assert buffer.group[:, 1].tolist() == [first] * 4
    assert len({first, own, groups[3]}) == 3


def test_seeded_rounds_of_one_env_start_alike() -> None:
    run = Run(DummyVecEnv([Seeded]), 3, "episode")
    buffer = run.roll(1, "1012")  # members "1", "01" and "2"
    obs = buffer.observations[:, 0]  # type: ignore[call-overload]
    assert obs[:, 1].tolist() == [0, 0, 1, 0]
    assert len(set(obs[:, 0])) == 1


def test_seeded_lanes_start_differently() -> None:
    run = Run(DummyVecEnv([Seeded] * 4), 2, "episode")
    buffer = run.roll(1, *["1"] * 4)
    starts = buffer.observations[0, :, 0]  # type: ignore[call-overload]
    assert starts[0] == starts[1] != starts[2] == starts[3]
    assert buffer.group.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize(("n_envs", "script"), [(2, "1"), (1, "11")])
def test_an_env_that_does_not_follow_the_seed_gets_batch_groups(n_envs: int, script: str) -> None:
    """Two columns show it in the first reset; a single env shows it when the second member starts elsewhere."""
    run = Run(DummyVecEnv([lambda: Seeded(seeded=False)] * n_envs), 2, "episode")
    with pytest.warns(UserWarning, match="starts differently"):
        buffer = run.roll(1, *[script] * n_envs)
    assert np.unique(buffer.group).size == 1
    assert run.plan.same_start is False  # type: ignore[attr-defined]


# --- no roots ---------------------------------------------------------------------------------------------------------
def test_batch_groups() -> None:
    run = Run(counters(2), 1, "window")
    buffer = run.roll(3, "002", "100")
    assert np.unique(buffer.group).size == 1
    assert column(buffer, 0) | {"group": []} == {"obs": ["0.0", "0.1", "0.2"], "group": [], "age": [0, 1, 2]}
    assert column(buffer, 1) | {"group": []} == {"obs": ["0.0", "1.0", "1.1"], "group": [], "age": [0, 0, 1]}
    assert bits(buffer.ends) == ["001", "101"]
    assert bits(buffer.alive) == ["001", "001"]  # truncated, and cut by the end of the rollout
    assert tails(buffer) == {(2, 0): [0, 3], (2, 1): [1, 2]}
    buffer = run.roll(2, "00", "01")
    assert [column(buffer, i)["age"] for i in range(2)] == [[0, 1], [2, 3]]  # column 1 is still in its episode
    assert tails(buffer) == {(1, 0): [1, 2]}


# --- windows ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [counters, lambda n: make_group_env(Counter, 1, n, monitor=False)])
def test_a_window_starts_from_one_column_exactly(make: Any) -> None:
    run = Run(make(2), 2, "window", fork_prob=1.0)
    buffer = run.roll(3, "000", "000")
    assert column(buffer, 0) == column(buffer, 1) == {"obs": ["0.0", "0.1", "0.2"], "group": [0] * 3, "age": [0, 1, 2]}
    assert bits(buffer.ends) == bits(buffer.alive) == ["001", "001"]
    assert tails(buffer) == {(2, 0): [0, 3], (2, 1): [0, 3]}
    buffer = run.roll(2, "00", "01")
    assert column(buffer, 0) == column(buffer, 1) == {"obs": ["0.3", "0.4"], "group": [1, 1], "age": [0, 1]}
    assert bits(buffer.alive) == ["01", "00"]
    buffer = run.roll(1, "0", "0")  # column 0 is at 0.5, column 1 was reset: whichever was drawn, both start there
    assert column(buffer, 0) == column(buffer, 1)
    assert column(buffer, 0)["obs"][0] in ("0.5", "1.0")
    assert (run.sampler.forks, run.sampler.fork_depths) in ((1, [5]), (1, [0]))


def test_without_forks_each_column_is_a_group() -> None:
    run = Run(counters(2), 2, "window", fork_prob=0.0)
    buffer = run.roll(2, "00", "10")
    assert column(buffer, 0) == {"obs": ["0.0", "0.1"], "group": [0, 0], "age": [0, 1]}
    assert column(buffer, 1) == {"obs": ["0.0", "1.0"], "group": [1, 2], "age": [0, 0]}
    assert run.sampler.forks == 0


def test_a_dead_member_goes_on_from_a_living_sibling() -> None:
    """Column 0 dies in step 0 and continues from column 1: same group, same age, same state."""
    run = Run(counters(2), 2, "window", fork_prob=1.0)
    buffer = run.roll(3, "100", "000")
    assert column(buffer, 0) == {"obs": ["0.0", "0.1", "0.2"], "group": [0] * 3, "age": [0, 1, 2]}
    assert bits(buffer.ends) == ["101", "001"]
    assert bits(buffer.alive) == ["001", "001"]
    assert run.sampler.fork_depths == [0, 1]  # at the window's start, and one step into the episode


def test_members_that_die_together_form_a_new_group() -> None:
    run = Run(counters(2), 2, "window", fork_prob=1.0)
    buffer = run.roll(4, "0100", "0100")
    assert column(buffer, 0) == column(buffer, 1)
    assert column(buffer, 0) == {"obs": ["0.0", "0.1", "1.0", "1.1"], "group": [0, 0, 1, 1], "age": [0, 1, 0, 1]}


def test_members_that_die_together_start_together() -> None:
    """Where each reset draws a start of its own, they continue from one of them."""

    class Drawn(Counter):
        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            _, info = super().reset(**kwargs)
            self.episode = float(self.np_random.normal())  # type: ignore[assignment]
            return self.observe(), info

    run = Run(DummyVecEnv([Drawn] * 2), 2, "window", fork_prob=1.0)
    starts = run.roll(3, "100", "100").observations[:, :, 0]  # type: ignore[call-overload]
    assert starts[0, 0] == starts[0, 1]
    assert starts[1, 0] == starts[1, 1] != starts[0, 0]


def test_with_a_value_head_a_dead_member_starts_its_own_episode() -> None:
    run = Run(counters(2), 2, "window", fork_prob=1.0, value_head=True)
    buffer = run.roll(3, "100", "000")
    assert column(buffer, 0) == {"obs": ["0.0", "1.0", "1.1"], "group": [0, 1, 1], "age": [0, 0, 1]}
    assert buffer.values is not None
    assert buffer.values.tolist() == [[0, 0], [0, 1], [1, 2]]  # what the policy said of each observation


def test_a_window_may_go_back_to_a_fresh_start() -> None:
    """Column 0 is reset in window 0, in episode 1; with reset_prob = 1 window 1 starts there, also for column 1."""
    run = Run(counters(2), 2, "window", reset_prob=1.0)
    buffer = run.roll(3, "010", "000")
    assert column(buffer, 0)["obs"] == ["0.0", "0.1", "0.2"]  # it went on from its sibling
    for _ in range(2):  # and once more, as no later start is known
        buffer = run.roll(2, "00", "00")
        assert column(buffer, 0) == column(buffer, 1)
        assert column(buffer, 0)["obs"] == ["1.0", "1.1"]
        assert column(buffer, 0)["age"] == [0, 1]


def test_one_env_splits_the_window_into_rounds() -> None:
    run = Run(counters(1), 2, "window", fork_prob=1.0)
    buffer = run.roll(4, "0000")
    assert column(buffer, 0) == {"obs": ["0.0", "0.1", "0.0", "0.1"], "group": [0] * 4, "age": [0, 1, 0, 1]}
    assert bits(buffer.ends) == bits(buffer.alive) == ["0101"]
    assert tails(buffer) == {(1, 0): [0, 2], (3, 0): [0, 2]}
    buffer = run.roll(5, "01000")  # rounds of 2 and 3 steps, from 0.2; in the first the episode ends with the round
    assert column(buffer, 0)["obs"] == ["0.2", "0.3", "0.2", "0.3", "0.4"]
    assert bits(buffer.ends) == ["01001"]
    assert bits(buffer.alive) == ["00001"]


# --- bookkeeping ------------------------------------------------------------------------------------------------------
def test_discounted_returns_of_episodes_follow_forks() -> None:
    """d ← γ·d + r with γ = 0.5, over the episode: rewards 0, 1, 2 give 0, 1, 2.5; a fork copies it."""
    run = Run(counters(2), 2, "window", fork_prob=1.0)
    buffer = run.roll(3, "010", "000")
    assert buffer.discounted.tolist() == [[0, 0], [1, 1], [2.5, 2.5]]
    buffer = run.roll(1, "0", "0")
    assert buffer.discounted.tolist() == [[4.25, 4.25]]  # 0.5 · 2.5 + 3
    buffer = Run(counters(1), 1, "window").roll(3, "010")
    assert buffer.discounted.tolist() == [[0], [1], [100]]  # a new episode begins at 0


class Episodes(Counter):
    """Writes the episode's length into its last info, as Monitor does."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {"episode": {"l": self.t}} if terminated else info


class Ends(BaseCallback):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.ends.extend(info["episode"] for info in self.locals["infos"] if "episode" in info)
        return True


def test_episodes_that_share_steps_are_marked() -> None:
    """Column 0 respawns from its sibling at age 1 and ends at 3: that end is forked. Its first one was not."""
    watch = Ends()
    run = Run(DummyVecEnv([Episodes] * 2), 2, "window", fork_prob=1.0)
    run.roll(4, "1010", "0000", callback=watch)
    assert watch.ends == [{"l": 1}, {"l": 3, "forked": True}]


def test_the_mark_ends_with_the_episode() -> None:
    """Window 1 starts with a fork at age 2: both episodes share those steps. The next episodes share nothing."""
    watch = Ends()
    run = Run(DummyVecEnv([Episodes] * 2), 2, "window", fork_prob=1.0, value_head=True)
    run.roll(2, "00", "00")
    run.roll(2, "11", "11", callback=watch)
    assert watch.ends == [{"l": 3, "forked": True}] * 2 + [{"l": 1}] * 2


def test_a_stop_leaves_the_books_in_order() -> None:
    """Stopped in the step that ends column 0: the sampler knows that it is in a fresh episode, column 1 at age 2."""

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 2

    run = Run(counters(2), 1, "window")
    buffer = run.roll(5, "01000", "00000", callback=Stop())
    assert len(buffer) == 1  # the step that was stopped in is not in the buffer, as in SB3
    assert run.sampler.episode_age.tolist() == [0, 2]
    assert run.sampler.age.tolist()[1] == 2
    np.testing.assert_array_equal(run.model._last_obs, [[1, 0], [0, 2]])
    assert run.model._last_episode_starts.tolist() == [True, False]


def test_a_reset_from_outside_forgets_segments() -> None:
    run = Run(counters(2), 1, "window")
    run.roll(2, "00", "00")
    run.model._last_obs = run.env.reset()
    buffer = run.roll(1, "0", "0")
    assert column(buffer, 0) | {"group": []} == {"obs": ["1.0"], "group": [], "age": [0]}


@pytest.mark.parametrize("settings", [{"kind": "episode"}, {"kind": "window", "fork_prob": 0.5, "reset_prob": 0.5}])
def test_every_step_of_an_env_is_counted_and_no_other(settings: dict[str, Any]) -> None:
    run = Run(make_group_env(Counter, 2, 2, monitor=False), 2, **settings)
    generator = np.random.default_rng(0)
    run.model.policy = lambda obs: (th.tensor(generator.integers(0, 3, 4)), None, th.zeros(4))
    Counter.steps = 0
    for _ in range(5):
        run.roll(8, callback=Silent())
    assert Counter.steps == run.model.num_timesteps >= 5 * 8 * 4


# --- errors -----------------------------------------------------------------------------------------------------------
class Broken(Counter):
    """In step 2 of column 1: `what` happens."""

    def __init__(self, what: str = "", dict_obs: bool = False) -> None:
        self.what = what
        self.dict_obs = dict_obs
        if dict_obs:
            self.observation_space = spaces.Dict({"a": box(2)})

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(**kwargs)
        return ({"a": obs} if self.dict_obs else obs * (np.nan if self.what == "start" else 1)), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        if self.t == 2 and self.what == "raise":
            raise ZeroDivisionError("in the env")
        if self.t == 2 and self.what == "reward":
            reward = np.nan
        if self.t == 2 and self.what == "observation":
            obs = obs * np.inf
        return ({"a": obs} if self.dict_obs else obs), reward, *rest


@pytest.mark.parametrize(
    ("what", "dict_obs", "message", "step"),
    [
        ("reward", False, r"env 1, step 2: the reward is not finite: .*nan", 2),
        ("observation", False, r"env 1, step 2: the observation is not finite: .*inf", 2),
        ("observation", True, r"env 1, step 2: the observation a is not finite: .*inf", 2),
        ("start", False, r"env 1, step 0: the observation is not finite: .*nan", 0),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_finite_is_found(what: str, dict_obs: bool, message: str, step: int) -> None:
    env = DummyVecEnv([lambda: Broken(dict_obs=dict_obs), lambda: Broken(what, dict_obs)])
    run = Run(env, 2, "window", means="batch")
    run.model.policy = lambda obs: (th.zeros(2).long(), None, th.zeros(2))
    with pytest.raises(NonFiniteError, match=message) as error:
        run.roll(4, "0000", "0000")
    assert (error.value.column, error.value.step) == (1, step)


def test_an_error_of_the_env_comes_through_with_a_note() -> None:
    env = DummyVecEnv([Broken, lambda: Broken("raise")])
    run = Run(env, 2, "window", means="batch")
    with pytest.raises(ZeroDivisionError, match="in the env") as error:
        run.roll(4, "0000", "0000")
    assert "2 env steps" in error.value.__notes__[0]
