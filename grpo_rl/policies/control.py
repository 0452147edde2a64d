"""SB3's actor-critic policies with the value head made optional and running observation normalisation built in.

Without a value head (the default) a policy HAS no value parameters: `forward` and `evaluate_actions` return None in the
value's place, and `predict_values` says what to switch on. Everything else is SB3's `ActorCriticPolicy`.
"""

from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from grpo_rl.errors import ConfigError
from grpo_rl.normalize import RunningNorm
from grpo_rl.precision import autocast


class NormalizedExtractor(BaseFeaturesExtractor):
    """A features extractor that sees observations through `RunningNorm`s, one per vector-valued Box.

    Images and discrete observations pass as they are. Statistics are module buffers, so checkpoints and exports carry
    them; they move only in `update`.
    """

    def __init__(self, extractor: BaseFeaturesExtractor, observation_space: spaces.Space) -> None:
        super().__init__(observation_space, extractor.features_dim)
        self.extractor = extractor
        named = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
        self.norms = nn.ModuleDict(
            # A module's name must not be empty: "obs" stands for the only space, "obs.key" may not contain dots.
            {
                self._name(key): RunningNorm(space.shape)
                for key, space in named.items()
                if isinstance(space, spaces.Box) and not is_image_space(space)
            }
        )

    @staticmethod
    def _name(key: str) -> str:
        return "obs_" + key.replace(".", "_")

    def forward(self, observations: Any) -> th.Tensor:
        return self.extractor(self._map(observations, lambda norm, obs: norm(obs)))

    @th.no_grad()
    def update(self, observations: PyTorchObs) -> None:
        """Moves the statistics by raw observations (M, ...), or a dict of them."""
        self._map(observations, lambda norm, obs: norm.update(obs))

    def _map(self, observations: Any, function: Any) -> Any:
        if not isinstance(observations, dict):
            return function(self.norms["obs_"], observations) if "obs_" in self.norms else observations
        names = {key: self._name(key) for key in observations}
        return {
            key: function(self.norms[names[key]], obs) if names[key] in self.norms else obs
            for key, obs in observations.items()
        }


class ControlPolicy(ActorCriticPolicy):
    """What the three policies share; subclass it (or them) for a policy of your own.

    Args:
        value_head: build a value network. False: no value parameters exist.
        normalize_obs: pass vector observations through running mean and variance, kept as buffers.

    The remaining arguments are SB3's `ActorCriticPolicy`'s. `net_arch` may keep its `vf` part: it is not built without
    a value head. Adam is the fused one unless `optimizer_kwargs` says otherwise (same results, a third of the time).
    """

    autocast: th.dtype | None = None
    """What the networks compute in, see `compute_in`; None: float32."""

    def __init__(self, *args: Any, value_head: bool = False, normalize_obs: bool = False, **kwargs: Any) -> None:
        self.has_value = value_head
        self.normalize_obs = normalize_obs
        if not value_head:
            kwargs["share_features_extractor"] = True  # a second extractor would belong to the critic
        if kwargs.get("optimizer_class", th.optim.Adam) is th.optim.Adam and kwargs.get("optimizer_kwargs") is None:
            kwargs["optimizer_kwargs"] = {"eps": 1e-5, "fused": True}
        super().__init__(*args, **kwargs)

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        extractor = super().make_features_extractor()
        if not self.normalize_obs:
            return extractor
        normalized = NormalizedExtractor(extractor, self.observation_space)
        if isinstance(actor := getattr(self, "features_extractor", None), NormalizedExtractor):
            normalized.norms = actor.norms  # the critic's own extractor shares the actor's statistics
        return normalized

    def compute_in(self, dtype: th.dtype | None) -> None:
        """Networks run in `dtype` by autocast from now on, None: in float32. Means, logits and values are float32.

        Raises:
            ConfigError: With gSDE, whose noise is a product that autocast would round.
        """
        if dtype is not None and self.use_sde:
            raise ConfigError(
                'precision: use_sde=True needs "32-true", as its log-probabilities are products of matrices'
            )
        if dtype is not None and self.autocast is None:
            for net in (self.action_net, self.value_net) if self.has_value else (self.action_net,):
                net.register_forward_hook(_to_float32)
        self.autocast = dtype

    def update_normalizer(self, observations: PyTorchObs) -> None:
        """Moves the observation statistics by raw observations (M, ...); nothing to do without `normalize_obs`."""
        if isinstance(self.features_extractor, NormalizedExtractor):
            self.features_extractor.update(observations)

    def share_normalizer(self, other: "ControlPolicy") -> None:
        """From now on the observation statistics are those of `other`, and move with them."""
        for mine, theirs in zip(self._extractors(), other._extractors(), strict=True):
            mine.norms = theirs.norms

    def _extractors(self) -> list[NormalizedExtractor]:
        return [module for module in self.modules() if isinstance(module, NormalizedExtractor)]

    def _build_mlp_extractor(self) -> None:
        net_arch = self.net_arch
        if not self.has_value:
            net_arch = {"pi": net_arch.get("pi", []) if isinstance(net_arch, dict) else net_arch, "vf": []}
        self.mlp_extractor = MlpExtractor(
            self.features_dim, net_arch=net_arch, activation_fn=self.activation_fn, device=self.device
        )

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        if not self.has_value:
            del self.value_net, self.vf_features_extractor
            self.optimizer = self.optimizer_class(
                self.parameters(),
                lr=lr_schedule(1),  # type: ignore[call-arg]
                **self.optimizer_kwargs,
            )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            **super()._get_constructor_parameters(),
            "value_head": self.has_value,
            "normalize_obs": self.normalize_obs,
            "share_features_extractor": self.share_features_extractor,
        }

    def forward(  # type: ignore[override]
        self, obs: th.Tensor, deterministic: bool = False
    ) -> tuple[th.Tensor, th.Tensor | None, th.Tensor]:
        """Actions (N, ...), values (N, 1) or None, and log-probabilities (N,) for observations (N, ...)."""
        if self.has_value:
            with autocast(self.device, self.autocast):
                return super().forward(obs, deterministic)
        distribution = self.get_distribution(obs)
        actions = distribution.get_actions(deterministic=deterministic)
        log_prob = distribution.log_prob(actions)
        return actions.reshape((-1, *self.action_space.shape)), None, log_prob  # type: ignore[misc]

    def evaluate_actions(  # type: ignore[override]
        self, obs: PyTorchObs, actions: th.Tensor
    ) -> tuple[th.Tensor | None, th.Tensor, th.Tensor | None]:
        """Values (M, 1) or None, log-probabilities (M,) and entropies (M,) or None of given actions."""
        if self.has_value:
            with autocast(self.device, self.autocast):
                return super().evaluate_actions(obs, actions)
        distribution = self.get_distribution(obs)
        return None, distribution.log_prob(actions), distribution.entropy()

    def predict_values(self, obs: PyTorchObs) -> th.Tensor:
        """Values (N, 1). Raises AttributeError when the policy was built without a value head."""
        if not self.has_value:
            raise AttributeError(
                "This policy is critic-free: it has no value function to ask. Build it with GRPO(..., value_head=True)."
            )
        with autocast(self.device, self.autocast):
            return super().predict_values(obs)

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """The distribution of actions for observations (N, ...)."""
        with autocast(self.device, self.autocast):
            return super().get_distribution(obs)


def _to_float32(module: nn.Module, inputs: Any, output: th.Tensor) -> th.Tensor:
    return output.float()


class MlpPolicy(ControlPolicy):
    """For vector observations; the default net is tanh 64 × 64, as SB3's."""


class CnnPolicy(ControlPolicy, ActorCriticCnnPolicy):
    """For images: SB3's `ActorCriticCnnPolicy` (NatureCNN)."""


class MultiInputPolicy(ControlPolicy, MultiInputActorCriticPolicy):
    """For Dict observations: SB3's `MultiInputActorCriticPolicy` (CombinedExtractor)."""
