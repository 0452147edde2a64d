"""Step-wise sampling: groups in, a rollout in the buffer out.

`StepSampler` steps the env, keeps what each column needs to be started again, and asks a *plan* (`plans.py`) what a
group is. A segment that ends is closed in the buffer. A column that has nothing to do is frozen where the env can leave
it out; else its steps are counted and, if its segment is unfinished when the group closes, dropped.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from grpo_rl.buffers import GroupBuffer
from grpo_rl.errors import ConfigError, NonFiniteError
from grpo_rl.fast.acting import Acting
from grpo_rl.groups.assign import Grouping
from grpo_rl.groups.forker import Root
from grpo_rl.sampling.plans import BatchGroups, EpisodeGroups, Plan, SeededGroups, WindowGroups
from grpo_rl.types import Obs


def obs_row(obs: Obs, column: int) -> Any:
    """One column of observations (N, ...), copied."""
    if isinstance(obs, dict):
        return {key: array[column].copy() for key, array in obs.items()}
    return obs[column].copy()


def _own(obs: Obs) -> Obs:
    """A copy of observations: an env may write again into arrays that it has handed out."""
    return {key: np.array(array) for key, array in obs.items()} if isinstance(obs, dict) else np.array(obs)


def _take(obs: Obs, sources: np.ndarray) -> Obs:
    return {key: array[sources] for key, array in obs.items()} if isinstance(obs, dict) else obs[sources]


_STATE = ("group", "age", "episode_age", "discounted", "frozen", "forked", "fresh", "_next_group")


class ColumnRoot(NamedTuple):
    """All that a column needs to start again from here: the env's state and what the sampler knows of the episode."""

    env: Root
    obs: Any
    episode_age: int
    discounted: float


class StepSampler:
    """Samples rollouts for `model` from `env`; the state of its columns lives on between rollouts.

    Attributes:
        group, age: (N,) int64, the root of each column's segment and the steps since it.
        episode_age: (N,) int64, steps since the column's episode began, through forks.
        frozen: (N,) bool, columns left out of the next step.
        forks, fork_depths: how many columns were started from another's state in this rollout, and at which age of the
            episode each.
        forked: (N,) bool, the column's episode shares steps with another's; its end has info["episode"]["forked"].
        group_share: yours to set, 0–1: how much of their chance windows have to start as groups (cold start).
        fresh: True until the first rollout after a reset of the env has begun.
    """

    group: np.ndarray
    age: np.ndarray
    episode_age: np.ndarray
    discounted: np.ndarray
    frozen: np.ndarray
    forked: np.ndarray
    fresh: bool
    _obs: Obs

    def __init__(
        self, model: Any, env: VecEnv, grouping: Grouping, group_size: int, fork_prob: float, reset_prob: float
    ) -> None:
        self.model = model
        self.env = env
        self.forker = grouping.forker
        self.buffer: GroupBuffer
        self.plan: Plan
        if grouping.means == "batch":
            self.plan = BatchGroups(self)
        elif grouping.means == "seed":
            self.plan = SeededGroups(self, group_size)
        elif grouping.kind == "episode":
            self.plan = EpisodeGroups(self, group_size, fork_prob)
        else:
            self.plan = WindowGroups(self, group_size, fork_prob, reset_prob, respawn=not model.bootstraps)
        self.group_share = 1.0
        self.acting = Acting(model, env.num_envs)
        self._next_group = 0
        self._forget(np.empty(0))  # not an observation that an env has given: the first rollout starts anew

    # --- one rollout --------------------------------------------------------------------------------------------------

    def sample(self, callback: BaseCallback, buffer: GroupBuffer, n_steps: int) -> bool:
        """Fills `buffer` with one rollout. Returns False if the callback stopped it.

        Raises:
            NonFiniteError: an observation or a reward is NaN or infinite; names the column and the step.
        """
        model = self.model
        if model._last_obs is not self._obs:  # the env was reset since: no segment goes on
            self._forget(model._last_obs)
            self._set_obs(self._obs)
            self._check_finite(self._obs, np.zeros(1))
        self.buffer = buffer
        self.forks, self.fork_depths, self.counted = 0, [], 0  # type: ignore[var-annotated]
        buffer.reset()
        if model.use_sde:
            model.policy.reset_noise(self.env.num_envs)
        callback.on_rollout_start()
        self.acting.begin()
        self.plan.begin(n_steps)
        while not self.plan.finished():
            if model.use_sde and model.sde_sample_freq > 0 and len(buffer) % model.sde_sample_freq == 0:
                model.policy.reset_noise(self.env.num_envs)
            if not self._step(callback):
                return False
        buffer.finish()
        callback.update_locals({"self": model, "rollout_buffer": buffer, "env": self.env})
        return True

    def _step(self, callback: BaseCallback) -> bool:
        model, env, obs = self.model, self.env, self._obs
        obs_tensor = obs_as_tensor(obs, model.device)
        actions, env_actions, values, log_probs = self._act(obs)
        stepped = ~self.frozen
        if self.forker is not None and self.forker.can_freeze:
            self.forker.group_env.frozen[:] = self.frozen  # type: ignore[union-attr]
        new_obs: Any
        try:
            new_obs, rewards, dones, infos = env.step(env_actions)
        except Exception as error:
            error.add_note(f"grpo_rl: raised by env.step at {model.num_timesteps} env steps, actions {env_actions!r}")
            raise
        new_obs, rewards, dones = _own(new_obs), np.array(rewards), np.array(dones, bool)
        self._check_finite(new_obs, rewards)
        rows = int(stepped.sum())
        self.counted += rows
        model.num_timesteps += rows
        for column in np.flatnonzero(dones & self.forked).tolist():
            if "episode" in infos[column]:
                infos[column]["episode"]["forked"] = True
        callback.update_locals(
            {
                "self": model,
                "env": env,
                "callback": callback,
                "rollout_buffer": self.buffer,
                "obs_tensor": obs_tensor,
                "actions": actions,
                "clipped_actions": env_actions,
                "values": values,
                "log_probs": log_probs,
                "new_obs": new_obs,
                "rewards": rewards,
                "dones": dones,
                "infos": infos,
                "n_steps": len(self.buffer),
            }
        )
        goes_on = bool(callback.on_step())
        self.discounted = self.discounted * model.gamma + rewards
        if goes_on:
            model._update_info_buffer(infos, dones)
            self.buffer.add(
                observations=obs,
                actions=actions,
                rewards=rewards,
                log_probs=log_probs,
                values=values,
                group=self.group.copy(),
                age=self.age.copy(),
                mask=stepped,
                discounted=self.discounted,
            )
            for column in np.flatnonzero(dones).tolist():
                last_obs: Any = infos[column].get("terminal_observation")
                alive = infos[column].get("TimeLimit.truncated", False) and last_obs is not None
                self.buffer.end(column, not alive, _own(last_obs) if alive else None)
        self.age += stepped
        self.episode_age += stepped
        self.discounted = np.where(dones, 0.0, self.discounted)
        self.episode_age[dones] = 0
        self.forked[dones] = False
        model._last_episode_starts = dones.copy()
        self._set_obs(new_obs)
        if goes_on:
            self.plan.after_step(dones)
        return goes_on

    def _act(self, obs: Obs) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
        """Actions as sampled and as the env takes them (clipped or unscaled), values (N,) or None, log-probs (N,)."""
        policy = self.model.policy
        actions, values, log_probs = self.acting(obs)
        env_actions = actions
        if isinstance(space := self.model.action_space, spaces.Box):
            env_actions = (
                policy.unscale_action(actions) if policy.squash_output else np.clip(actions, space.low, space.high)
            )
        return actions, env_actions, values, log_probs

    def _check_finite(self, obs: Obs, rewards: np.ndarray) -> None:
        parts = {f"observation {key}": o for key, o in obs.items()} if isinstance(obs, dict) else {"observation": obs}
        for name, array in ({"reward": rewards} | parts).items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                column = int(np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))[0])
                raise NonFiniteError(
                    f"the {name} is not finite: {array[column]!r}. Training stopped before it reached the policy;"
                    " look at what the env computes in this step.",
                    column=column,
                    step=self.model.num_timesteps,
                )

    # --- between rollouts ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the next rollout depends on beside the env's own state and the model's."""
        return {name: copy.copy(getattr(self, name)) for name in _STATE} | {"plan": self.plan.state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave; the model's last observation is the env's.

        Raises:
            ConfigError: The state of another number of columns, or none.
        """
        for name in _STATE:
            here, value = getattr(self, name), state[name]
            if (type(value), np.shape(value)) != (type(here), np.shape(here)):
                raise ConfigError(
                    f"the sampler's {name}: expected {type(here).__name__} {np.shape(here)}, got {value!r:.80}"
                )
            setattr(self, name, copy.copy(value))
        self.plan.set_state(state["plan"])
        if self.model._last_obs is not None:
            self._set_obs(self.model._last_obs)

    # --- columns: what plans do with them -----------------------------------------------------------------------------

    def _forget(self, obs: Obs) -> None:
        columns = self.env.num_envs
        self.group = np.zeros(columns, np.int64)
        self.age = np.zeros(columns, np.int64)
        self.episode_age = np.zeros(columns, np.int64)
        self.frozen = np.zeros(columns, bool)
        self.forked = np.zeros(columns, bool)
        self.discounted = np.zeros(columns)
        self._obs = _own(obs)
        self.fresh = True

    def _set_obs(self, obs: Obs) -> None:
        self.model._last_obs = self._obs = obs

    def reset(self) -> Obs:
        """Resets every column; all segments are forgotten. Gives the observations (N, ...) as VecNormalize gets them.

        Its statistics stay as they are: a reset is not a step.
        """
        normalizer = self.model._vec_normalize_env
        if normalizer is not None:
            training, normalizer.training = normalizer.training, False
        obs: Any = self.env.reset()
        if normalizer is not None:
            normalizer.training = training
        self._forget(obs)
        self._set_obs(self._obs)
        self.model._last_episode_starts = np.ones(self.env.num_envs, bool)
        return self._obs if normalizer is None else normalizer.get_original_obs()

    def new_group(self, columns: Any) -> None:
        """Starts new segments of one new group in `columns`."""
        self.group[columns] = self._next_group
        self.age[columns] = 0
        self._next_group += 1

    def fork(self, sources: np.ndarray) -> None:
        """Column i continues from the exact state of column `sources[i]`, with all that the sampler knows of it."""
        copies = np.flatnonzero(sources != np.arange(len(sources)))
        if not len(copies):
            return
        assert self.forker is not None
        self.forker.fork(sources)
        for name in ("group", "age", "episode_age", "discounted", "forked"):
            setattr(self, name, getattr(self, name)[sources])
        shared = np.union1d(copies, sources[copies])
        self.forked[shared] |= self.episode_age[shared] > 0
        self.model._last_episode_starts = self.model._last_episode_starts[sources]
        self._set_obs(_take(self._obs, sources))
        self.forks += len(copies)
        self.fork_depths.extend(self.episode_age[copies].tolist())

    def capture(self, column: int) -> ColumnRoot:
        """Where `column` stands."""
        assert self.forker is not None
        return ColumnRoot(
            self.forker.capture(column),
            obs_row(self._obs, column),
            int(self.episode_age[column]),
            float(self.discounted[column]),
        )

    def restore(self, column: int, root: ColumnRoot, group: int) -> None:
        """Starts a segment of `group` in `column`, from `root`."""
        assert self.forker is not None
        self.forker.restore(column, root.env)
        obs = _take(self._obs, np.arange(self.env.num_envs))
        if isinstance(obs, dict):
            for key, array in obs.items():
                array[column] = root.obs[key]
        else:
            obs[column] = root.obs
        self._set_obs(obs)
        self.group[column], self.age[column] = group, 0
        self.episode_age[column], self.discounted[column] = root.episode_age, root.discounted
        self.forked[column] = root.episode_age > 0
        self.model._last_episode_starts[column] = root.episode_age == 0
        self.forks += 1
        self.fork_depths.append(root.episode_age)

    def cut(self, columns: np.ndarray) -> None:
        """Ends the segments of `columns` here, alive."""
        for column in columns:
            self.buffer.end(column, False, obs_row(self._obs, column))
