"""Auxiliary losses from a recipe's own file: their values, and their gradient in the policy."""

import gymnasium as gym
import pytest
import torch as th

from grpo_rl import GRPO
from grpo_rl.lab.build import build_agent, build_env, load_agent
from grpo_rl.recipes import load_object, load_recipe, shipped
from grpo_rl.types import Batch

FILE = shipped() / "agents" / "auxiliary_loss.py"


def load(name):
    return load_object(f"{FILE}:{name}")


def batch_of(obs, actions, weight=None):
    zeros = th.zeros(len(obs))
    return Batch(obs, actions, zeros, zeros, th.full((len(obs),), 1 / len(obs)), None, None, None)


def test_smoothness_by_hand():
    # A Gaussian policy with means a = W·o and equal spread σ: KL = Σ (W·noise)² / 2σ². With W = (2, 0, 0), σ = 1 and
    # noise of standard deviation 0.05 in each coordinate, E[KL] = 2²·0.05²/2 = 0.005.
    agent = GRPO("MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": []})
    agent.policy.action_net.weight.data = th.tensor([[2.0, 0, 0]])
    th.manual_seed(0)
    kl = load("smoothness")(agent.policy, batch_of(th.randn(20_000, 3), th.zeros(20_000, 1)))
    assert kl.shape == (20_000,)
    assert kl.min() >= 0
    assert kl.mean().item() == pytest.approx(0.005, rel=0.05)


def test_smoothness_of_discrete_actions():
    agent = GRPO("MlpPolicy", "CartPole-v1")
    kl = load("smoothness")(agent.policy, batch_of(th.randn(5, 4), th.zeros(5).long()))
    assert kl.shape == (5,)
    assert (kl >= -1e-6).all(), "a KL, up to rounding"


def test_reconstruction_by_hand():
    # A decoder of weights 0 and bias (1, 1, 1): the squared error of (1, 1, 1) against (3, 1, 0) is (4 + 0 + 1)/3.
    agent = GRPO(load("DecodingPolicy"), "Pendulum-v1")
    agent.policy.decoder.weight.data.zero_()
    agent.policy.decoder.bias.data.fill_(1)
    error = load("reconstruction")(agent.policy, batch_of(th.tensor([[3.0, 1, 0]]), th.zeros(1, 1)))
    assert error.tolist() == pytest.approx([5 / 3])


@pytest.mark.parametrize("name", ["smoothness", "reconstruction"])
@pytest.mark.parametrize("value_head", [False, True])
def test_its_gradient_reaches_the_policy(name, value_head):
    """Advantages are 0, so the actor's gradient is the auxiliary loss's alone."""
    losses = {name: (load(name), 0.1)}
    agent = GRPO(
        load("DecodingPolicy"), "Pendulum-v1", value_head=value_head, auxiliary_losses=losses, normalize_advantage=False
    )
    agent.policy.action_net.weight.data.normal_()
    th.manual_seed(0)
    loss, terms = agent.loss(batch_of(th.randn(16, 3), th.zeros(16, 1)), clip_range=0.2)
    assert loss.item() == pytest.approx(0.1 * terms[f"auxiliary/{name}"].item(), rel=1e-5)
    loss.backward()
    actor = agent.policy.mlp_extractor.policy_net[0].weight.grad
    assert actor is not None
    assert actor.abs().sum() > 0
    assert any(
        parameter is agent.policy.decoder.weight for parameter in agent.policy.optimizer.param_groups[0]["params"]
    )


def test_the_recipe_trains_and_saves_them(tmp_path):
    recipe = load_recipe("auxiliary", ["optimization.n_steps=32", "optimization.n_epochs=2"])
    agent = build_agent(recipe, build_env(recipe))
    decoder = agent.policy.decoder.weight.clone()
    agent.learn(400)
    assert not th.equal(decoder, agent.policy.decoder.weight)
    logged = agent.logger.name_to_value
    assert logged["train/auxiliary/smoothness"] >= 0
    assert logged["train/auxiliary/reconstruction"] > 0

    agent.save(tmp_path / "model.zip")
    loaded = load_agent(recipe, tmp_path / "model.zip")
    assert th.equal(loaded.policy.decoder.weight, agent.policy.decoder.weight)
    env = gym.make("Pendulum-v1")
    assert env.action_space.contains(loaded.predict(env.reset(seed=0)[0], deterministic=True)[0])
