"""Updates by numpy: torch's gradients, torch's runs, and torch itself where numpy is not for it."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from probe_envs import Spaces, grpo
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn
from torch.nn import functional

from grpo_rl import GRPO, LinearSchedule
from grpo_rl.checkpoint import load_checkpoint, save_checkpoint
from grpo_rl.errors import NonFiniteError
from grpo_rl.fast import update
from grpo_rl.fast.acting import is_plain
from grpo_rl.fast.update import NumpyUpdate, TorchUpdate

sys.path.insert(0, str(Path(__file__).parents[2] / "agents"))
from gated_policy import GatedExtractor

pytestmark = pytest.mark.filterwarnings("ignore")


def box(*shape):
    return spaces.Box(-2, 2, shape, np.float32)


class Normed(BaseFeaturesExtractor):
    """Layer norm before, GELU after a layer."""

    def __init__(self, observation_space, features_dim=8):
        super().__init__(observation_space, features_dim)
        size = spaces.flatdim(observation_space)
        self.net = nn.Sequential(nn.Flatten(), nn.LayerNorm(size), nn.Linear(size, features_dim), nn.GELU())

    def forward(self, observations):
        return self.net(observations)


class Dropping(Normed):
    """Half of the features are left out while training."""

    def forward(self, observations):
        return functional.dropout(self.net(observations), 0.5, self.training)


class BatchNormed(Normed):
    """Moves its statistics while training."""

    def __init__(self, observation_space, features_dim=8):
        super().__init__(observation_space, features_dim)
        self.net.append(nn.BatchNorm1d(features_dim))


def relu(**more):
    return {"activation_fn": nn.ReLU} | more


POLICIES = {
    "tanh": (box(5), box(2), {}, {}),
    "critic-free": (box(5), box(2), {}, {"value_head": False}),
    "ReLU, categorical": (box(5), spaces.Discrete(3), relu(), {"ent_coef": 0.01}),
    "ELU, nets of their own, normalised": (
        box(3, 2), box(1), {"activation_fn": nn.ELU, "net_arch": {"pi": [16], "vf": [32, 8]}}, {"normalize_obs": True},
    ),
    "SiLU, several choices": (box(4), spaces.MultiDiscrete([3, 4]), {"activation_fn": nn.SiLU}, {}),
    "linear, binary actions, a reference": (box(4), spaces.MultiBinary(3), {"net_arch": []}, {"kl_coef": 0.1}),
    "gated units, clipped values": (
        box(4), box(2), {"activation_fn": nn.Mish, "features_extractor_class": GatedExtractor}, {"clip_range_vf": 0.2},
    ),
    "layer norm, extractors of their own": (
        box(4), box(2), relu(features_extractor_class=Normed, share_features_extractor=False), {},
    ),
    "Dict observations": (spaces.Dict(a=box(3), b=spaces.Discrete(4)), box(2), {}, {"normalize_obs": True}),
    "Discrete observations": (spaces.Discrete(6), spaces.Discrete(3), relu(net_arch=[32]), {"max_grad_norm": 0.01}),
    "gSDE": (box(4), box(2), {}, {"use_sde": True}),
    "z-scores, no scale": (box(4), box(2), {"log_std_init": -1.0}, {"advantage_scale": "none", "clip_range": 0.05}),
}  # fmt: skip


def agent(name="tanh", **more):
    observations, actions, policy_kwargs, settings = POLICIES[name]
    env = DummyVecEnv([lambda: Spaces(observations, actions)] * 4)
    env.seed(0)
    observations.seed(0)
    kind = "MultiInputPolicy" if isinstance(observations, spaces.Dict) else "MlpPolicy"
    given = {"value_head": True, "batch_size": 32, "n_epochs": 2, "policy_kwargs": policy_kwargs} | settings | more
    return grpo(env, kind, **given)


@pytest.fixture
def at_once(monkeypatch):
    """A program from the first minibatch on."""
    monkeypatch.setattr(update, "TRACING_COST", 0)


def vector(model):
    return nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_autograds(name, at_once):
    model = agent(name).learn(128)
    by_numpy = model._programs.update(0.2)
    for rows in (32, 4, 5, 1, 77, 128):  # one program for all
        index = np.random.permutation(128)[:rows]
        terms = by_numpy.differentiate(index)
        assert by_numpy.gradients is not None
        loss, expected = model.loss(model.rollout_buffer.batch(index), 0.2)
        assert list(terms) == list(expected)
        for term in expected:
            th.testing.assert_close(terms[term], expected[term], rtol=1e-5, atol=1e-5)
        gradient = th.cat([part.reshape(-1) for part in th.autograd.grad(loss, list(model.policy.parameters()))])
        ours = np.concatenate([part.ravel() for part in by_numpy.gradients])
        assert np.linalg.norm(ours - gradient.numpy()) <= 1e-5 * gradient.norm() + 1e-8
    assert len(model._programs.programs) == 1


class Log(BaseCallback):
    """The names and numbers of each iteration's train/ metrics."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def _on_rollout_start(self):
        values = self.logger.name_to_value
        self.rows.append({name: float(value) for name, value in values.items() if name.startswith("train/")})

    def _on_step(self):
        return True


@pytest.mark.parametrize("name", POLICIES)
def test_two_iterations_are_torchs(name, monkeypatch):
    ends, logs = [], []
    for cost in (0, 10**9):
        monkeypatch.setattr(update, "TRACING_COST", cost)
        model, log = agent(name, n_steps=16), Log()
        model.learn(192, callback=log, log_interval=None)
        assert bool(model._programs.programs) == (cost == 0)
        ends.append(vector(model))
        logs.append(log.rows)
    th.testing.assert_close(*ends, rtol=1e-4, atol=1e-4)
    assert len(logs[0]) == 3 and len(logs[0][1]) > 8
    for ours, torchs in zip(*logs, strict=True):
        assert ours.keys() == torchs.keys()
        for metric in torchs:
            assert ours[metric] == pytest.approx(torchs[metric], rel=1e-3, abs=1e-4), metric


def test_the_loss_is_traced_when_it_was_asked_for_often_enough(monkeypatch):
    monkeypatch.setattr(update, "TRACING_COST", 5)
    model = agent(n_steps=32, batch_size=50)  # 128 rows: minibatches of 64
    tracings = []
    trace = update.trace
    monkeypatch.setattr(update, "trace", lambda *args: tracings.append(model.minibatches_seen[1]) or trace(*args))
    model.learn(128)
    assert model.minibatches_seen[1] == 4 and not tracings  # 2 epochs of 2
    model.learn(512, reset_num_timesteps=False)
    assert tracings == [6]


def test_noise_within_the_loss_is_torchs(monkeypatch):
    ends = []
    for cost in (0, 10**9):
        monkeypatch.setattr(update, "TRACING_COST", cost)
        model = agent(policy_kwargs={"features_extractor_class": Dropping}).learn(256)
        assert all(model._programs.programs.values())
        ends.append(vector(model))
    th.testing.assert_close(*ends, rtol=1e-4, atol=1e-4)


def test_other_settings_get_another_program(at_once):
    model = agent()
    model.learn(128)
    model.ent_coef = 0.5
    model.learn(128)
    assert len(model._programs.programs) == 2 and all(model._programs.programs.values())
    assert model.minibatches_seen[1] == 1  # counted anew


def stateful(policy, batch):
    stateful.calls += 1
    return batch.advantages.square() * 0 + (1 if stateful.calls <= 2 else 2) * policy.log_std.sum()


def test_what_numpy_gets_wrong_is_left_to_torch(at_once):
    """A loss that changes by Python's hand: the program has the number in it with which it was traced."""
    stateful.calls = 0
    model = agent(auxiliary_losses={"odd": (stateful, 1.0)}).learn(128)
    by_numpy = model._programs.update(0.2)
    by_numpy.differentiate(next(by_numpy.minibatches()))
    assert all(by_numpy.programs.values()) and by_numpy.gradients is None
    assert stateful.calls == 3 + 8 + 2  # traced twice and compared; two epochs of four; compared, and by torch


class Own(GRPO):
    def loss(self, batch, clip_range):
        return super().loss(batch, clip_range)


class Halting(GRPO):
    def differentiate(self, minibatch, clip_range):
        terms = super().differentiate(minibatch, clip_range)
        for parameter in self.policy.parameters():
            parameter.grad.zero_()
        return terms


class Spectral(Normed):
    """Its weights are made anew in each forward pass, with a power iteration kept in buffers."""

    def __init__(self, observation_space, features_dim=8):
        super().__init__(observation_space, features_dim)
        self.net[2] = nn.utils.parametrizations.spectral_norm(self.net[2])


class Averaging(Normed):
    """Counts its forward passes with gradients, as running statistics do."""

    def __init__(self, observation_space, features_dim=8):
        super().__init__(observation_space, features_dim)
        self.register_buffer("passes", th.zeros(()))

    def forward(self, observations):
        if th.is_grad_enabled():
            self.passes += 1
        return self.net(observations)


def test_what_differentiates_in_its_own_way_is_asked_each_time(at_once):
    env = DummyVecEnv([lambda: Spaces(box(3), box(1))] * 2)
    own = Halting("MlpPolicy", env, n_steps=16, batch_size=16, value_head=True, device="cpu")
    before = vector(own)
    assert type(own.learn(96)._programs.update(0.2)) is TorchUpdate
    assert th.equal(vector(own), before)
    model = agent()
    model.differentiate = model.differentiate
    assert type(model.learn(128)._programs.update(0.2)) is TorchUpdate


def test_networks_that_cannot_be_traced_train_by_torch(at_once):
    model = agent(policy_kwargs={"features_extractor_class": Spectral}).learn(256)
    assert not any(model._programs.programs.values())
    assert vector(model).isfinite().all()


def test_tracing_and_comparing_move_no_statistics(monkeypatch):
    passes = []
    for cost in (0, 10**9):
        monkeypatch.setattr(update, "TRACING_COST", cost)
        model = agent(policy_kwargs={"features_extractor_class": Averaging}).learn(256)
        if not any(model._programs.programs.values()):  # by torch, with or without an attempt to trace it
            passes.append(float(model.policy.features_extractor.passes))
    assert len(passes) == 2 and passes[0] == passes[1] > 0


def test_a_hook_on_the_policy_leaves_acting_and_learning_to_torch(at_once):
    """As docs/learner.md says."""
    plain, hooked = (grpo(DummyVecEnv([lambda: Spaces(box(3), box(1))] * 2)) for _ in range(2))
    hooked.policy.register_forward_pre_hook(lambda policy, arguments: None)
    for model, kind, acts in ((plain, NumpyUpdate, True), (hooked, TorchUpdate, False)):
        model.learn(128)
        assert type(model._programs.update(0.2)) is kind
        assert is_plain(model.policy) is acts


class Looking(nn.Tanh):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else 2 * x)


def test_what_goes_by_torch_alone(at_once):
    model = agent().learn(128)
    assert type(model._programs.update(0.2)) is NumpyUpdate
    model.loss = model.loss  # patched: it may do more than reckon
    assert type(model._programs.update(0.2)) is TorchUpdate
    env = DummyVecEnv([lambda: Spaces(box(3), box(1))] * 2)
    own = Own("MlpPolicy", env, n_steps=16, batch_size=16, value_head=True, device="cpu").learn(32)
    assert type(own._programs.update(0.2)) is TorchUpdate
    images = spaces.Box(0, 255, (3, 36, 36), np.uint8)
    for space, policy, settings in (
        (box(3), "MlpPolicy", {"policy_kwargs": {"optimizer_class": th.optim.AdamW}}),
        (images, "CnnPolicy", {"policy_kwargs": {}}),
        (box(3), "MlpPolicy", {"policy_kwargs": {"activation_fn": Looking}}),
        (box(3), "MlpPolicy", {"policy_kwargs": {"features_extractor_class": BatchNormed}}),
    ):
        model = grpo(DummyVecEnv([lambda space=space: Spaces(space, box(1))] * 2), policy, **settings).learn(64)
        assert not any(model._programs.programs.values())


def test_early_stop_and_errors_are_torchs(monkeypatch):
    counts = []
    for cost in (0, 10**9):
        monkeypatch.setattr(update, "TRACING_COST", cost)
        model = agent(target_kl=1e-4, learning_rate=1e-2, n_epochs=10).learn(256)
        counts.append(model._n_updates)
        before = vector(model)
        model.learning_rate = 1e20
        model._setup_lr_schedule()
        with pytest.raises(NonFiniteError, match="not finite"):
            model.learn(512, reset_num_timesteps=False)
        assert vector(model).isfinite().all()
        assert before.shape == vector(model).shape
    assert counts[0] == counts[1] < 2 * 10


def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(update, "TRACING_COST", 20)

    def build():  # 64 rows: 8 updates of 32 an iteration, numpy's from the third on
        settings = {"n_epochs": 4, "clip_range": LinearSchedule(0.3, 0.1)}
        return grpo("CartPole-v1", value_head=True, group_kind="window", **settings)

    whole = build().learn(512)
    assert any(whole._programs.programs.values())

    class Stop(BaseCallback):
        def _on_rollout_start(self):
            if self.model._iterations == 5:
                save_checkpoint(self.model, tmp_path / "x")
                raise KeyboardInterrupt

        def _on_step(self):
            return True

    with pytest.raises(KeyboardInterrupt):
        build().learn(512, callback=Stop())
    fresh = build()
    load_checkpoint(fresh, tmp_path / "x")
    fresh.learn(512 - fresh.num_timesteps, reset_num_timesteps=False)
    assert fresh.num_timesteps == whole.num_timesteps
    assert th.equal(vector(fresh), vector(whole))


def test_a_model_is_saved_and_loaded_as_ever(tmp_path, at_once):
    model = agent().learn(128)
    model.save(tmp_path / "model.zip")
    loaded = GRPO.load(tmp_path / "model.zip", env=model.env, device="cpu")
    assert th.equal(vector(loaded), vector(model))
    ours, theirs = (copy.deepcopy(m.policy.optimizer.state_dict()["state"]) for m in (model, loaded))
    assert ours.keys() == theirs.keys()
    for index in ours:
        assert all(th.equal(ours[index][name], theirs[index][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert loaded.minibatches_seen == model.minibatches_seen
    loaded.learn(128)
