"""Losses of your own beside GRPO's: one that needs nothing, and one with a network of its own.

`GRPO(auxiliary_losses={name: (function, weight)})` adds weight · mean(function(policy, batch)) to the loss of each
minibatch; the log has it as train/auxiliary/<name>. In a recipe it is `name: [auxiliary_loss.py:smoothness, 0.01]`.
"""

from typing import Any

import torch as th
from torch import nn

from grpo_rl import MlpPolicy
from grpo_rl.types import Batch

NOISE = 0.05
"""Standard deviation of the noise that `smoothness` adds, in units of the observation."""


def smoothness(policy: Any, batch: Batch) -> th.Tensor:
    """KL (M,) of the policy at an observation to that close by: small for smooth control (CAPS, arXiv 2012.06644)."""
    obs = batch.observations
    assert isinstance(obs, th.Tensor), "smoothness is for vector observations"
    here = policy.get_distribution(obs).distribution
    nearby = policy.get_distribution(obs + NOISE * th.randn_like(obs)).distribution
    return th.distributions.kl_divergence(here, nearby).reshape(len(obs), -1).sum(dim=1)


class DecodingPolicy(MlpPolicy):
    """An `MlpPolicy` with a decoder from the actor's last hidden layer back to the observation."""

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        # Made here, before SB3 makes the optimiser, so that its parameters are trained and saved like all others.
        self.decoder = nn.Linear(self.mlp_extractor.latent_dim_pi, self.features_dim)


def reconstruction(policy: Any, batch: Batch) -> th.Tensor:
    """Squared error (M,) of the observation decoded from the actor's features; needs a `DecodingPolicy`.

    The target is what the features extractor gives: the flat observation, normalised where the policy normalises.
    """
    features = policy.extract_features(batch.observations, policy.pi_features_extractor)
    decoded = policy.decoder(policy.mlp_extractor.forward_actor(features))
    return (decoded - features.detach()).square().mean(dim=1)
