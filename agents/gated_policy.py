"""A features extractor of your own: gated linear units: one half of a layer decides what of the other half passes.

h = (W x + b) · sigmoid(U x + c) (Dauphin et al., arXiv 1612.08083). Any `BaseFeaturesExtractor` of Stable-Baselines3
works with `GRPO`; in a recipe it is `features_extractor_class: gated_policy.py:GatedExtractor` under `model`.
"""

from itertools import pairwise

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn


class GatedExtractor(BaseFeaturesExtractor):
    """Gated layers over a flat observation.

    Args:
        observation_space: A Box of any shape; it is flattened.
        features_dim: Width of each layer, the last one included.
        layers: Number of gated layers, at least 1.
    """

    def __init__(self, observation_space: spaces.Box, features_dim: int = 64, layers: int = 2) -> None:
        super().__init__(observation_space, features_dim)
        widths = [spaces.flatdim(observation_space)] + [features_dim] * layers
        # GLU halves its input: each linear layer makes the content and the gate.
        gated = [(nn.Linear(n, 2 * m), nn.GLU()) for n, m in pairwise(widths)]
        self.net = nn.Sequential(nn.Flatten(), *(part for pair in gated for part in pair))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """Features (M, features_dim) of observations (M, …)."""
        return self.net(observations)
