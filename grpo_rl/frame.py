"""What GRPO has of SB3 beside the algorithm itself: wrapping an env, learning, saving and loading."""

import math
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium.vector import VectorEnv
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, TensorDict
from stable_baselines3.common.vec_env import VecEnv

from grpo_rl.errors import ConfigError, UntrustedError, warn
from grpo_rl.groups.observations import batchable
from grpo_rl.groups.vector import from_vector_env
from grpo_rl.loading import ZipPath, foreign_arguments, open_zip
from grpo_rl.normalize import ReturnScale
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.progress import ProgressBar
from grpo_rl.regression import RidgeValue
from grpo_rl.text.vec_env import TextVecEnv, is_text

Self = TypeVar("Self", bound="Frame")


class Frame(OnPolicyAlgorithm):
    """SB3's methods as they are for steps and for texts; `GRPO` is the algorithm on it."""

    cold_start: int
    kl_coef: float
    normalize_reward: bool
    reward_scale: ReturnScale
    regression: RidgeValue | None

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """As SB3's; a gymnasium VectorEnv is converted, and so is an env of texts."""
        if is_text(env):
            return TextVecEnv.of(env)
        sb3_env = from_vector_env(env) if isinstance(env, VectorEnv) else env
        if isinstance(sb3_env, gym.Env):
            batchable(sb3_env)
        return OnPolicyAlgorithm._wrap_env(sb3_env, verbose, monitor_wrapper)

    def learn(
        self: Self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "GRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Trains for `total_timesteps` env steps (forked ones counted), rounded up to whole rollouts; returns self.

        Raises:
            ConfigError: `total_timesteps` is no number, or below 0, NaN or infinite. 0 trains nothing, as in SB3.
        """
        if not isinstance(total_timesteps, int | float | np.number) or not 0 <= total_timesteps < math.inf:
            raise ConfigError(f"total_timesteps={total_timesteps!r}: expected a number of env steps, such as 100_000")
        end = int(total_timesteps) + (0 if reset_num_timesteps else self.num_timesteps)
        if self.cold_start and self.cold_start >= end:
            warn(
                f"cold_start={self.cold_start:,} lasts beyond the end of this learn at {end:,} steps: all of it trains"
                " as PPO, without groups; give a smaller cold_start"
            )
        return super().learn(
            total_timesteps=int(total_timesteps),
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        given = super()._init_callback(callback)
        if not progress_bar:
            return given
        both = CallbackList([given, ProgressBar()])
        both.init_callback(self)
        return both

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # Whole episodes may overshoot the total by more than a step: schedules must not run past their end.
        super()._update_current_progress_remaining(min(num_timesteps, total_timesteps), total_timesteps)

    @classmethod
    def load(
        cls: type[Self],
        path: ZipPath,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        trust: bool = False,
        **kwargs: Any,
    ) -> Self:
        """As SB3's, for files from anywhere; of SB3's PPO with `value_head=True`.

        A `learning_rate` (or `clip_range`) that is given begins with the trust region's scale at 1.

        Raises:
            UntrustedError: The file would execute code, and `trust` is False.
            ConfigError: It is no agent's file, it is damaged, or it does not go with `env` and `kwargs`.
        """
        with open_zip(path, custom_objects, trust) as (file, data):
            kwargs = foreign_arguments(data, str(path), bool(kwargs.get("value_head"))) | kwargs
            named = (data.get("policy_kwargs") or {}).get("model")
            if isinstance(named, str) and not trust and "policy_kwargs" not in kwargs:
                raise UntrustedError(f"{path} names a model to be fetched, {named!r}: load(path, trust=True) does so")
            if kwargs.get("trust_region", data.get("trust_region")) in kwargs:  # what it scaled is given anew
                kwargs.setdefault("kl_scale", 1.0)
            return super().load(file, env, device, custom_objects, print_system_info, force_reset, **kwargs)

    def save(self, path: Any, exclude: Any = None, include: Any = None) -> None:
        """As SB3's; a language model is written as its configuration and weights, so that the file holds no code."""
        given = self.policy_kwargs
        if isinstance(self.policy, CausalLMPolicy):
            kept = {name: value for name, value in given.items() if name not in ("model", "tokenizer")}
            self.policy_kwargs = kept | self.policy.portable()
        try:
            super().save(path, exclude, include)
        finally:
            self.policy_kwargs = given

    def _excluded_save_params(self) -> list[str]:
        ours = [
            "_sampler",
            "_programs",
            "_precision",
            "_shared_rows",
            "groups",
            "curriculum",
            "auxiliary_losses",
            "reference_policy",
            "regression",
            "replay",
            "reward_scale",
        ]
        if is_text(self):
            ours.append("_last_obs")
        return [*super()._excluded_save_params(), *ours]

    def set_parameters(
        self, load_path_or_dict: str | TensorDict, exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """As SB3's. Where they lack a reference policy that is in use, it is the policy; one not in use is left out.

        Raises:
            ConfigError: A file that is damaged or holds something else than weights, or those of another model.
        """
        if not isinstance(load_path_or_dict, dict):
            with open_zip(load_path_or_dict, trust=True) as (file, _):  # its attributes are not read
                self.set_parameters(load_from_zip_file(file, device=device, load_data=False)[1], exact_match, device)
            return
        params: dict[str, Any] = load_path_or_dict
        optional = {"reference_policy": params.get("policy", {}), "reward_scale": self.reward_scale.state_dict()}
        optional["regression"] = {} if self.regression is None else self.regression.state_dict()
        used = self._get_torch_save_params()[0]
        given = {name: value for name, value in params.items() if name in used or name not in optional}
        super().set_parameters({name: optional[name] for name in used if name in optional} | given, exact_match, device)

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, variables = super()._get_torch_save_params()
        if self.kl_coef:
            state_dicts = [*state_dicts, "reference_policy"]
        if self.normalize_reward:
            state_dicts = [*state_dicts, "reward_scale"]
        if self.regression is not None:
            state_dicts = [*state_dicts, "regression"]
        return state_dicts, variables
