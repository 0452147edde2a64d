"""The control policies: critic-free means no critic at all, and with one they are SB3's, weight for weight."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from probe_envs import box
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from grpo_rl import CnnPolicy, MlpPolicy, MultiInputPolicy
from grpo_rl.policies.control import NormalizedExtractor

IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
DICT = spaces.Dict({"vector": box(3), "picture": IMAGE, "number": spaces.Discrete(4)})
SMALL = {"net_arch": [8]}
ALL: list[tuple[Any, Any, spaces.Space, dict[str, Any]]] = [
    (MlpPolicy, ActorCriticPolicy, box(3), SMALL),
    (CnnPolicy, ActorCriticCnnPolicy, IMAGE, SMALL | {"features_extractor_kwargs": {"features_dim": 8}}),
    (MultiInputPolicy, MultiInputActorCriticPolicy, DICT, SMALL | {"features_extractor_kwargs": {"cnn_output_dim": 8}}),
]
ACTIONS = [
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Discrete(3),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(2),
]
BOX = ACTIONS[0]


def batch(space: spaces.Space, n: int = 5) -> Any:
    space.seed(0)
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: th.as_tensor(np.stack([sample[key] for sample in samples])) for key in space.spaces}
    return th.as_tensor(np.stack(samples))


def seeded(cls: Any, observation_space: spaces.Space, action_space: spaces.Space = BOX, **kwargs: Any) -> Any:
    th.manual_seed(0)
    return cls(observation_space, action_space, lambda _: 1e-3, **kwargs)


@pytest.mark.parametrize(("ours", "theirs", "space", "kwargs"), ALL)
@pytest.mark.parametrize("actions", ACTIONS, ids=str)
def test_with_a_value_head_the_policy_is_sb3s(
    ours: Any, theirs: Any, space: spaces.Space, kwargs: dict[str, Any], actions: spaces.Space
) -> None:
    """From one seed: the same weights by name, the same forward pass, the same log-probabilities and entropies."""
    mine, its = seeded(ours, space, actions, value_head=True, **kwargs), seeded(theirs, space, actions, **kwargs)
    assert mine.state_dict().keys() == its.state_dict().keys()
    assert all(th.equal(mine.state_dict()[key], value) for key, value in its.state_dict().items())
    obs = batch(space)
    results = []
    for policy in (mine, its):
        th.manual_seed(1)
        results.append(policy(obs))
    assert all(th.equal(a, b) for a, b in zip(*results, strict=True))
    taken = results[0][0]
    assert all(
        th.equal(a, b) for a, b in zip(mine.evaluate_actions(obs, taken), its.evaluate_actions(obs, taken), strict=True)
    )
    assert th.equal(mine.predict_values(obs), its.predict_values(obs))


@pytest.mark.parametrize(("ours", "theirs", "space", "kwargs"), ALL)
@pytest.mark.parametrize("actions", ACTIONS, ids=str)
def test_critic_free_the_actor_is_sb3s_and_there_is_nothing_else(
    ours: Any, theirs: Any, space: spaces.Space, kwargs: dict[str, Any], actions: spaces.Space
) -> None:
    mine, its = seeded(ours, space, actions, **kwargs), seeded(theirs, space, actions, **kwargs)
    for name in [*dict(mine.named_parameters()), *mine.state_dict()]:
        assert "value" not in name
        assert "vf" not in name
    its.load_state_dict(mine.state_dict(), strict=False)
    obs = batch(space)
    results = []
    for policy in (mine, its):
        th.manual_seed(1)
        results.append(policy(obs))
    (actions_taken, values, log_prob), (their_actions, _, their_log_prob) = results
    assert values is None
    assert th.equal(actions_taken, their_actions)
    assert th.equal(log_prob, their_log_prob)
    values, log_prob, entropy = mine.evaluate_actions(obs, actions_taken)
    assert values is None
    assert th.equal(log_prob, their_log_prob)
    assert th.equal(entropy, its.get_distribution(obs).entropy())
    counted = sum(p.numel() for group in mine.optimizer.param_groups for p in group["params"])
    assert counted == sum(p.numel() for p in mine.parameters())
    with pytest.raises(AttributeError, match=r"critic-free.*value_head=True"):
        mine.predict_values(obs)


class Flat(BaseFeaturesExtractor):
    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, 2)
        self.net = th.nn.Linear(3, 2)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.net(observations)


def test_critic_free_has_one_extractor_even_if_two_are_asked_for() -> None:
    policy = MlpPolicy(
        box(3), BOX, lambda _: 1e-3, features_extractor_class=Flat, share_features_extractor=False, net_arch=[]
    )
    assert [name for name, module in policy.named_modules() if isinstance(module, Flat)] == ["features_extractor"]


def test_adam_is_fused_and_has_sb3s_epsilon_unless_told_otherwise() -> None:
    assert MlpPolicy(box(3), BOX, lambda _: 1e-3).optimizer.defaults["fused"] is True
    assert MlpPolicy(box(3), BOX, lambda _: 1e-3).optimizer.defaults["eps"] == 1e-5
    given = {"eps": 1e-3}
    policy = MlpPolicy(box(3), BOX, lambda _: 1e-3, optimizer_kwargs=given)
    assert policy.optimizer.defaults["eps"] == 1e-3
    assert not policy.optimizer.defaults["fused"]
    assert given == {"eps": 1e-3}


# --- running normalisation --------------------------------------------------------------------------------------------
def test_observations_are_normalised_and_statistics_move_in_update_only() -> None:
    """Two observations 1 and 3 per dimension: mean 2, population std 1, so that 3 is seen as 1."""
    policy = seeded(MlpPolicy, box(2), normalize_obs=True, **SMALL)
    plain = seeded(MlpPolicy, box(2), **SMALL)
    seen, expected = th.full((4, 2), 3.0), th.full((4, 2), 1.0)
    th.testing.assert_close(policy.get_distribution(seen).mode(), plain.get_distribution(seen).mode())  # nothing seen
    policy.update_normalizer(th.tensor([[1.0, 1.0], [3.0, 3.0]]))
    before = copy.deepcopy(policy.state_dict())
    th.testing.assert_close(policy.get_distribution(seen).mode(), plain.get_distribution(expected).mode())
    policy.set_training_mode(True)
    policy(seen)
    policy.evaluate_actions(seen, th.zeros(4, 2))
    policy.predict(seen.numpy())
    assert all(th.equal(before[key], value) for key, value in policy.state_dict().items())
    assert before["features_extractor.norms.obs_.count"] == 2


def test_only_vectors_are_normalised() -> None:
    policy = seeded(MultiInputPolicy, DICT, normalize_obs=True, **ALL[2][3])
    extractor = policy.features_extractor
    assert isinstance(extractor, NormalizedExtractor)
    assert list(extractor.norms) == ["obs_vector"]
    obs = batch(DICT)
    policy.update_normalizer(obs)
    assert extractor.norms["obs_vector"].count == 5
    th.testing.assert_close(extractor.norms["obs_vector"].mean, obs["vector"].double().mean(0))
    policy(obs)
    image_only = seeded(CnnPolicy, IMAGE, normalize_obs=True, **ALL[1][3])
    image_only.update_normalizer(batch(IMAGE))
    assert not list(image_only.features_extractor.norms)


def test_actor_and_critic_share_the_statistics() -> None:
    policy = seeded(MlpPolicy, box(3), value_head=True, normalize_obs=True, share_features_extractor=False, **SMALL)
    actor, critic = policy.pi_features_extractor, policy.vf_features_extractor
    assert actor is not critic
    assert actor.norms is critic.norms
    policy.update_normalizer(th.ones(4, 3))
    assert critic.norms["obs_"].count == 4


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_saved_alone_it_comes_back_the_same(value_head: bool, normalize_obs: bool, tmp_path: Any) -> None:
    policy = seeded(MlpPolicy, box(3), value_head=value_head, normalize_obs=normalize_obs, **SMALL)
    policy.update_normalizer(th.randn(9, 3) * 4 + 1)
    policy.save(tmp_path / "policy")
    again = MlpPolicy.load(tmp_path / "policy", device="cpu")
    assert (again.has_value, again.normalize_obs) == (value_head, normalize_obs)
    obs = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    np.testing.assert_array_equal(again.predict(obs, deterministic=True)[0], policy.predict(obs, deterministic=True)[0])


def test_state_dependent_noise_works_without_a_critic() -> None:
    policy = seeded(MlpPolicy, box(3), use_sde=True, squash_output=True, **SMALL)
    policy.reset_noise(5)
    actions, values, log_prob = policy(batch(box(3)))
    assert values is None
    assert actions.abs().max() <= 1
    value, again, entropy = policy.evaluate_actions(batch(box(3)), actions)
    assert value is entropy is None  # a squashed Gaussian has no closed form
    th.testing.assert_close(again, log_prob, rtol=1e-3, atol=1e-3)
