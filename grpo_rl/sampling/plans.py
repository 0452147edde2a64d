"""What a group is: plans that tell the step sampler where segments start and when a rollout is complete.

`EpisodeGroups` run from one root to the end of every member, `SeededGroups` do the same by seeded resets,
`WindowGroups` are n_steps from a root, with forks, and `BatchGroups` have no roots. A *lane* is the columns that share
a root; a *member* is one segment started from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from grpo_rl.errors import warn
from grpo_rl.types import Obs

if TYPE_CHECKING:
    from grpo_rl.sampling.steps import ColumnRoot, StepSampler


class Plan(Protocol):
    """Decides where segments start and when a rollout is complete.

    `state` is what it keeps from one rollout to the next. `resets`: each rollout begins with a reset of all columns.
    """

    resets: bool

    def begin(self, n_steps: int) -> None: ...
    def after_step(self, ended: np.ndarray) -> None: ...
    def finished(self) -> bool: ...
    def state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class BatchGroups:
    """No roots: n_steps in every column, each segment one episode (or its part in the window), all of one group."""

    resets = False

    def __init__(self, sampler: StepSampler) -> None:
        self.sampler = sampler

    def begin(self, n_steps: int) -> None:
        self.n_steps = n_steps

    def after_step(self, ended: np.ndarray) -> None:
        self.sampler.age[ended] = 0
        if self.finished():
            self.sampler.cut(np.flatnonzero(~ended))

    def finished(self) -> bool:
        return len(self.sampler.buffer) == self.n_steps

    def state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


class _Lane:
    """Columns that share a root, and the members that have been started from it."""

    def __init__(self, columns: np.ndarray, members: int) -> None:
        self.columns = columns
        self.members = max(members, len(columns))
        self.source = int(columns[0])  # the column whose state is the next root
        self.open = False
        self.root: ColumnRoot | None = None
        self.group = self.started = self.unfinished = 0
        self.member: dict[int, int] = {}  # which member runs in each column
        self.first_step: dict[int, int] = {}  # the buffer's length when it began
        self.branch: ColumnRoot | None = None  # a moment of the last group, any of its `moments` alike
        self.moments = 0


def _lanes(n_envs: int, group_size: int, split: bool = True) -> list[_Lane]:
    """Lanes of `group_size` columns where that divides, else one lane of all of them."""
    columns = np.arange(n_envs)
    split = split and n_envs % group_size == 0
    return [_Lane(lane, group_size) for lane in (columns.reshape(-1, group_size) if split else columns[None])]


class EpisodeGroups:
    """A group is `group_size` episodes from one root; a rollout is whole groups and at least n_steps · N steps.

    A root is a fresh start or, with probability `fork_prob`, a moment in the middle of the last group's episodes, drawn
    evenly. There members differ by what they do next alone; from a start they soon differ by where they are, too.

    With a freezable env, N/G lanes of G columns each run a group at a time, and a member that has ended waits. Else
    all columns form one lane, and a column whose member has ended starts the next member from the root; members beyond
    the group's size count where they end in time and are dropped where they do not. The next fresh start is the one to
    which the last member's env was reset.
    """

    resets = False

    def __init__(self, sampler: StepSampler, group_size: int, fork_prob: float) -> None:
        self.sampler = sampler
        self.fork_prob = fork_prob
        self.can_freeze = sampler.forker is not None and sampler.forker.can_freeze
        self.lanes = _lanes(sampler.env.num_envs, group_size, split=self.can_freeze)

    def begin(self, n_steps: int) -> None:
        self.target = n_steps * self.sampler.env.num_envs
        for lane in self.lanes:
            if self.sampler.fresh:
                lane.source, lane.branch = int(lane.columns[0]), None
            self._open(lane)
        self.sampler.fresh = False

    def _open(self, lane: _Lane) -> None:
        sampler = self.sampler
        if lane.branch is not None and np.random.random() < self.fork_prob:
            lane.root = lane.branch
            for column in lane.columns:
                sampler.restore(int(column), lane.root, group=0)
            sampler.new_group(lane.columns)
        else:
            sampler.new_group(lane.source)
            sources = np.arange(sampler.env.num_envs)
            sources[lane.columns] = lane.source
            sampler.fork(sources)
            needs_root = not self.can_freeze or lane.members > len(lane.columns)
            lane.root = sampler.capture(lane.source) if needs_root else None
        lane.branch, lane.moments = None, 0
        sampler.frozen[lane.columns] = False
        lane.group = int(sampler.group[lane.columns[0]])
        lane.member = {int(column): member for member, column in enumerate(lane.columns)}
        lane.first_step = dict.fromkeys(lane.member, len(sampler.buffer))
        lane.started, lane.unfinished, lane.open = len(lane.columns), lane.members, True

    def after_step(self, ended: np.ndarray) -> None:
        for lane in self.lanes:
            self._remember_moment(lane, ended)
            for column in lane.columns[ended[lane.columns]] if lane.open else ():
                if self._end_member(lane, int(column), ended):
                    break  # the group is complete: what else ended now belonged to it, not to the next one

    def _remember_moment(self, lane: _Lane, ended: np.ndarray) -> None:
        """Keeps one moment of the group, any of them with the same chance (reservoir sampling)."""
        alive = lane.columns[~(ended | self.sampler.frozen)[lane.columns]]
        if self.fork_prob == 0 or not lane.open or not len(alive):
            return
        lane.moments += 1
        if np.random.random() * lane.moments < 1:
            lane.branch = self.sampler.capture(int(np.random.choice(alive)))

    def _end_member(self, lane: _Lane, column: int, ended: np.ndarray) -> bool:
        """What `column` does after its member's end; returns whether that completed the group."""
        lane.unfinished -= lane.member[column] < lane.members
        complete = lane.unfinished == 0
        if complete:
            self._close(lane, column, ended)
        elif lane.started < lane.members or not self.can_freeze:
            assert lane.root is not None
            self.sampler.restore(column, lane.root, lane.group)
            lane.member[column], lane.first_step[column] = lane.started, len(self.sampler.buffer)
            lane.started += 1
        else:
            self.sampler.frozen[column] = True
        return complete

    def _close(self, lane: _Lane, last: int, ended: np.ndarray) -> None:
        for column in lane.columns:
            if not ended[column] and not self.sampler.frozen[column]:
                self.sampler.buffer.drop(column, lane.first_step[int(column)])
        lane.source, lane.open = last, False
        if self.sampler.counted < self.target:
            self._open(lane)
        else:
            self.sampler.frozen[lane.columns] = self.can_freeze

    def finished(self) -> bool:
        return not any(lane.open for lane in self.lanes)

    def state(self) -> list[tuple[int, ColumnRoot | None]]:
        """Of each lane: the column of its next fresh start, and the moment of its last group to start from."""
        return [(lane.source, lane.branch) for lane in self.lanes]

    def set_state(self, state: list[tuple[int, ColumnRoot | None]]) -> None:
        for lane, (source, branch) in zip(self.lanes, state, strict=True):
            lane.source, lane.branch = source, branch


class SeededGroups:
    """Groups of episodes from resets with one seed, for envs that cannot be forked.

    All columns reset together, N/G lanes with a seed each (or one lane, reset ceil(G/N) times with its seed). A column
    whose member has ended goes on with an episode of its own, kept if it ends before the slowest member does. An env
    that starts differently after the same seed is found out at the first resets, and said: it gets batch groups.
    """

    resets = True

    def __init__(self, sampler: StepSampler, group_size: int) -> None:
        self.sampler = sampler
        self.lanes = _lanes(sampler.env.num_envs, group_size)
        self.rounds = -(-group_size // len(self.lanes[0].columns))
        self.same_start: bool | None = None

    def begin(self, n_steps: int) -> None:
        self.target = n_steps * self.sampler.env.num_envs
        self.complete = False
        self._open()

    def _open(self) -> None:
        self.round = 0
        self.seeds = np.random.randint(2**31, size=len(self.lanes))
        self._reset()

    def _reset(self) -> None:
        sampler = self.sampler
        seeds = np.zeros(sampler.env.num_envs, np.int64)
        for lane, seed in zip(self.lanes, self.seeds, strict=True):
            seeds[lane.columns] = seed
        sampler.env.unwrapped._seeds = list(seeds.tolist())
        obs = sampler.reset()
        if self.round == 0:
            self.start = obs
        if self.same_start is not False:
            self._check_starts(obs)
        for lane in self.lanes:
            if self.round == 0:
                sampler.new_group(lane.columns if self.same_start else slice(None))
                lane.group = int(sampler.group[lane.columns[0]])
            sampler.group[lane.columns] = lane.group
        self.waiting = set(range(len(seeds)))
        self.first_step: dict[int, int] = {}

    def _check_starts(self, obs: Obs) -> None:
        starts, arrays = ([*o.values()] if isinstance(o, dict) else [o] for o in (self.start, obs))
        self.same_start = all(
            np.array_equal(array[lane.columns], np.broadcast_to(start[lane.columns[0]], array[lane.columns].shape))
            for start, array in zip(starts, arrays, strict=True)
            for lane in self.lanes
        )
        if not self.same_start:
            warn(
                "This env starts differently after resets with one seed, so groups share no start: members are compared"
                " at the same age across the batch. Seeding its random numbers in reset(seed=...), or get_snapshot and"
                " set_snapshot methods, would give real groups."
            )

    def after_step(self, ended: np.ndarray) -> None:
        sampler = self.sampler
        for column in np.flatnonzero(ended).tolist():
            self.waiting.discard(column)
            sampler.new_group(column)
            self.first_step[column] = len(sampler.buffer)
        if self.waiting:
            return
        for column, first in self.first_step.items():
            sampler.buffer.drop(column, first)
        self.round += 1
        if self.round < self.rounds:
            self._reset()
        elif sampler.counted < self.target:
            self._open()
        else:
            self.complete = True

    def finished(self) -> bool:
        return self.complete

    def state(self) -> bool | None:
        """Whether one seed gives one start; None before the first reset."""
        return self.same_start

    def set_state(self, state: bool | None) -> None:
        self.same_start = state


class WindowGroups:
    """A group is a window of n_steps from one root, for tasks that go on for long ("vine", TRPO 5.2; VinePPO).

    At its start each lane of G columns, with probability `fork_prob`, copies one random column to all; with
    `reset_prob` all start from its last fresh episode start; else its columns go on as they are. With fewer columns
    than members the window is split into rounds, each from the same root. With `respawn` (critic-free) a column whose
    episode ends goes on from a living sibling, so that no row lacks a comparison; else from its own next episode.
    """

    resets = False

    def __init__(
        self, sampler: StepSampler, group_size: int, fork_prob: float, reset_prob: float, respawn: bool
    ) -> None:
        self.sampler = sampler
        self.lanes = _lanes(sampler.env.num_envs, group_size)
        self.rounds = -(-group_size // len(self.lanes[0].columns))
        self.fork_prob, self.reset_prob, self.respawn = fork_prob, reset_prob, respawn
        self.starts: dict[int, ColumnRoot] = {}  # by a lane's first column: a fresh episode start

    def begin(self, n_steps: int) -> None:
        sampler = self.sampler
        self.n_steps = n_steps
        self.round_steps = max(n_steps // self.rounds, 1)
        self.wants_start = {int(lane.columns[0]) for lane in self.lanes} if self.reset_prob > 0 else set()
        sources = np.arange(sampler.env.num_envs)
        for lane in self.lanes:
            lane.open = self._choose_root(lane, sources)
        sampler.fork(sources)
        for lane in self.lanes:
            self._start_segments(lane)
            lane.root = sampler.capture(int(lane.columns[0])) if lane.open and self.rounds > 1 else None
        sampler.fresh = False

    def _choose_root(self, lane: _Lane, sources: np.ndarray) -> bool:
        """Moves the lane to a root of its own, or notes in `sources` what to fork; returns whether it has one."""
        first, share = int(lane.columns[0]), self.sampler.group_share
        draw = np.random.random() if share > 0 else 1.0  # a cold start draws no numbers that PPO would not
        fork_prob, reset_prob = share * self.fork_prob, share * self.reset_prob
        if draw < fork_prob or (self.sampler.fresh and draw < fork_prob + reset_prob):
            sources[lane.columns] = first if self.sampler.fresh else np.random.choice(lane.columns)
            return True
        if draw < fork_prob + reset_prob and first in self.starts:
            for column in lane.columns:
                self.sampler.restore(int(column), self.starts[first], group=0)
            return True
        return False

    def _start_segments(self, lane: _Lane) -> None:
        for columns in [lane.columns] if lane.open else lane.columns:
            self.sampler.new_group(columns)
        lane.group = int(self.sampler.group[lane.columns[0]])

    def after_step(self, ended: np.ndarray) -> None:
        sampler = self.sampler
        for first in self.wants_start & set(np.flatnonzero(ended).tolist()):
            self.starts[first] = sampler.capture(first)
            self.wants_start = self.wants_start - {first}
        step = len(sampler.buffer)
        if self.finished() or (step % self.round_steps == 0 and step // self.round_steps < self.rounds):
            sampler.cut(np.flatnonzero(~ended))
            if not self.finished():
                self._next_round()
        elif ended.any():
            self._go_on(ended)

    def _next_round(self) -> None:
        for lane in self.lanes:
            if lane.root is None:
                self._start_segments(lane)
            else:
                for column in lane.columns:
                    self.sampler.restore(int(column), lane.root, lane.group)

    def _go_on(self, ended: np.ndarray) -> None:
        """Where columns whose episode has ended start their next segment."""
        sampler = self.sampler
        sources = np.arange(len(ended))
        fresh: list[Any] = []
        for lane in self.lanes:
            dead, alive = lane.columns[ended[lane.columns]], lane.columns[~ended[lane.columns]]
            if self.respawn and lane.open and len(alive):
                sources[dead] = np.random.choice(alive, len(dead))
            elif self.respawn and lane.open and len(dead) > 1:
                sources[dead] = dead[0]
                fresh.append(dead)
            else:
                fresh.extend(dead)
        sampler.fork(sources)
        for columns in fresh:
            sampler.new_group(columns)

    def finished(self) -> bool:
        return len(self.sampler.buffer) == self.n_steps

    def state(self) -> dict[int, ColumnRoot]:
        """The fresh episode start of each lane, by its first column."""
        return dict(self.starts)

    def set_state(self, state: dict[int, ColumnRoot]) -> None:
        self.starts = dict(state)
