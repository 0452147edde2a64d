"""Actions, values and log-probabilities for a step of the sampler: by numpy, where that does what the policy does.

numpy runs what torch would (`program.trace`), with noise from torch's generator, drawn as torch draws it: the stream of
random numbers is the same. The first step of each rollout is compared with torch's; where it differs, so does the rest
of that rollout, by torch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.utils import obs_as_tensor

from grpo_rl.fast.program import Untraceable, trace, untouched
from grpo_rl.policies.control import ControlPolicy
from grpo_rl.types import Obs

TRACING_COST = 500
"""Steps by torch that take as long as tracing one."""
TOLERANCE = 1e-5
"""Largest difference from what torch gives, relative or absolute."""

_METHODS = ("forward", "evaluate_actions", "get_distribution", "extract_features", "_get_action_dist_from_latent")

Acted = tuple[np.ndarray, np.ndarray | None, np.ndarray]
"""Actions (N, ...), values (N,) or None, log-probabilities (N,)."""


class Acting:
    """How `model`'s policy acts in the sampler."""

    def __init__(self, model: Any, n_envs: int) -> None:
        self.model = model
        self.n_envs = n_envs
        self.program: Callable[..., list[Any]] | None = None
        self.made_for: Any = None
        self.by_numpy: bool | None = False  # None: the next step will tell

    def begin(self) -> None:
        """A rollout begins: the policy is another than in the last."""
        model = self.model
        worth = model.num_timesteps >= TRACING_COST * self.n_envs and th.device(model.device).type == "cpu"
        self.by_numpy = None if worth and not model.use_sde and is_plain(model.policy) else False

    @th.no_grad()
    def __call__(self, obs: Obs) -> Acted:
        """What the policy does at observations (N, ...)."""
        if self.by_numpy:
            return self._by_numpy(obs)
        state = th.get_rng_state() if self.by_numpy is None else None
        actions, values, log_probs = self.model.policy(obs_as_tensor(obs, self.model.device))
        values = None if values is None else values.flatten().cpu().numpy()
        acted = actions.cpu().numpy(), values, log_probs.cpu().numpy()
        if state is not None:
            self.by_numpy = self._agrees(obs, acted, state)
        return acted

    def _by_numpy(self, obs: Obs) -> Acted:
        assert self.program is not None
        with np.errstate(all="ignore"):
            actions, log_probs, *values = self.program(*_arrays(obs))
        return actions, values[0] if values else None, log_probs

    def _agrees(self, obs: Obs, expected: Acted, state: th.Tensor) -> bool:
        """Whether numpy does what torch has done from the generator's `state`; it is left as torch left it."""
        after = th.get_rng_state()
        th.set_rng_state(state)
        policy, arrays = self.model.policy, _arrays(obs)
        memory = [tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers())]
        made_for = memory, [(array.shape, array.dtype) for array in arrays]
        if made_for != self.made_for:
            with untouched(policy):
                self.program, self.made_for = self._trace(obs), made_for
        agrees = False
        if self.program is not None:
            pairs = [
                (a, b) for a, b in zip(self._by_numpy(obs), expected, strict=True) if a is not None and b is not None
            ]
            close = all(np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in pairs)
            agrees = close and th.equal(th.get_rng_state(), after)
        th.set_rng_state(after)
        return agrees

    def _trace(self, obs: Obs) -> Callable[..., list[Any]] | None:
        keys = sorted(obs) if isinstance(obs, dict) else None

        def act(*tensors: th.Tensor) -> list[th.Tensor]:
            given: Any = tensors[0] if keys is None else dict(zip(keys, tensors, strict=True))
            actions, values, log_probs = self.model.policy(given)
            return [actions, log_probs] if values is None else [actions, log_probs, values.flatten()]

        try:
            return trace(act, [th.as_tensor(array) for array in _arrays(obs)])
        except Untraceable:
            return None


def is_plain(policy: Any) -> bool:
    """Whether `policy` acts and evaluates as ours do, whatever its networks are. One that does it in its own way may do
    more than reckon (count, record), and is left to torch."""
    ours = all(getattr(type(policy), name, None) is getattr(ControlPolicy, name) for name in _METHODS)
    return ours and policy.autocast is None and not (policy._forward_hooks or policy._forward_pre_hooks)


def _arrays(obs: Obs) -> list[np.ndarray]:
    return [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]
