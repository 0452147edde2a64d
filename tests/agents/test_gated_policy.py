"""A features extractor from a recipe's own file."""

import gymnasium as gym
import numpy as np
import torch as th

from grpo_rl.lab.build import build_agent, build_env, load_agent
from grpo_rl.recipes import load_object, load_recipe, shipped

GatedExtractor = load_object(f"{shipped() / 'agents' / 'gated_policy.py'}:GatedExtractor")


def test_a_layer_by_hand():
    # x = (1, 2), content 3·1 + 0·2 = 3, gate sigmoid(0·1 + 0·2) = 1/2: h = 3/2.
    extractor = GatedExtractor(gym.spaces.Box(-9, 9, (2,)), features_dim=1, layers=1)
    linear = extractor.net[1]
    linear.weight.data = th.tensor([[3.0, 0], [0, 0]])  # content, then gate
    linear.bias.data.zero_()
    assert extractor(th.tensor([[1.0, 2]])).tolist() == [[1.5]]


def test_it_takes_any_box_and_gives_features_dim():
    extractor = GatedExtractor(gym.spaces.Box(0, 1, (3, 5)), features_dim=7, layers=3)
    assert extractor(th.rand(4, 3, 5)).shape == (4, 7)
    assert sum(isinstance(part, th.nn.GLU) for part in extractor.net) == 3


def test_the_recipe_trains_it_and_saves_it(tmp_path):
    recipe = load_recipe("gated", ["optimization.n_steps=32", "optimization.n_epochs=2"])
    agent = build_agent(recipe, build_env(recipe))
    extractor = agent.policy.features_extractor
    assert type(extractor).__name__ == "GatedExtractor"
    before = [parameter.clone() for parameter in extractor.parameters()]
    agent.learn(500)
    assert not any(th.equal(a, b) for a, b in zip(before, extractor.parameters(), strict=True)), "gradients reach it"

    agent.save(tmp_path / "model.zip")
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    loaded = load_agent(recipe, tmp_path / "model.zip")
    assert (loaded.predict(obs, deterministic=True)[0] == agent.predict(obs, deterministic=True)[0]).all()
