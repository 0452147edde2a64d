"""What an SB3 user relies on, line by line: the number in a test's name is the line of the contract.

Critic-free agents are tried unless a line is about values; windows and episodes both where a line differs for them.
"""

from __future__ import annotations

import base64
import gc
import inspect
import io
import json
import os
import pathlib
import pickle
import random
import time
import warnings
import zipfile
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3 as sb3
import torch as th
from gymnasium import spaces
from probe_envs import Bandit, Constant, Spaces, Unknown, Walk, box, grpo
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger, configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule
from stable_baselines3.common.utils import LinearSchedule as SB3LinearSchedule
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecNormalize,
    VecTransposeImage,
)

import grpo_rl
from grpo_rl import GRPO, CnnPolicy, LinearSchedule, MlpPolicy, MultiInputPolicy, make_group_env
from grpo_rl.policies.language import CausalLMPolicy

KINDS: list[dict[str, Any]] = [{"group_kind": "window"}, {"group_kind": "episode"}, {"value_head": True}]
IMAGE = spaces.Box(0, 255, (36, 36, 3), np.uint8)
DISCRETE = spaces.Discrete(2)
ACTIONS = [
    spaces.Box(-2, 3, (2,), np.float32),
    spaces.Discrete(3),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
]
OBSERVATIONS = [
    box(3),
    spaces.Box(-1, 1, (2, 2), np.float64),
    spaces.Box(0, 255, (4,), np.uint8),
    spaces.Discrete(3),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Dict({"vector": box(3), "number": spaces.Discrete(3), "picture": IMAGE}),
    IMAGE,
]


pytestmark = pytest.mark.filterwarnings("ignore:A rollout of", "ignore:groups. ", "ignore:rich is experimental")


def parameters(model: Any) -> th.Tensor:
    return th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()


class Recorder(BaseCallback):
    """Keeps the order of calls, `num_timesteps` and selected locals of each step."""

    def __init__(self, stop_at: int | None = None, stop_with: Any = False) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.counts: list[int] = []
        self.seen: list[dict[str, Any]] = []
        self.stop_at, self.stop_with = stop_at, stop_with

    def _on_training_start(self) -> None:
        self.calls.append("training_start")

    def _on_rollout_start(self) -> None:
        self.calls.append("rollout_start")

    def _on_step(self) -> Any:
        self.calls.append("step")
        self.counts.append(self.model.num_timesteps)
        self.seen.append(dict(self.locals))
        return self.stop_with if self.n_calls == self.stop_at else True

    def _on_rollout_end(self) -> None:
        self.calls.append("rollout_end")

    def _on_training_end(self) -> None:
        self.calls.append("training_end")


# --- construction -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "env"),
    [
        ("MlpPolicy", "CartPole-v1"),
        (MlpPolicy, gym.make("CartPole-v1")),
        ("MlpPolicy", make_vec_env("CartPole-v1", 3)),
        ("MlpPolicy", Bandit()),
    ],
)
def test_01_policy_and_env_may_be_names_or_objects(policy: Any, env: Any) -> None:
    model = GRPO(policy, env, group_size=2, device="cpu")
    assert isinstance(model, BaseAlgorithm)
    assert type(model.policy) is MlpPolicy
    expected = {str: 2, DummyVecEnv: 3}.get(type(env), 1)  # an id makes one group, an env is used as it is
    assert model.n_envs == model.get_env().num_envs == expected


def test_02_arguments_and_defaults_are_ppos() -> None:
    ours = list(inspect.signature(GRPO.__init__).parameters.values())
    theirs = list(inspect.signature(sb3.PPO.__init__).parameters.values())
    ours, named = ours[: len(theirs)], ours[len(theirs) :]
    assert [p.name for p in ours] == [p.name for p in theirs]
    differing = {p.name: p.default for p, q in zip(ours, theirs, strict=True) if p.default != q.default}
    assert differing == {"n_steps": None}  # 2048 transitions in all, for any number of envs:
    assert GRPO("MlpPolicy", Bandit(), device="cpu").n_steps == 2048
    assert GRPO("MlpPolicy", make_vec_env("CartPole-v1", 4), device="cpu").n_steps == 512
    assert all(p.kind is p.KEYWORD_ONLY for p in named)


def test_03_policy_names() -> None:
    ours = {"MlpPolicy": MlpPolicy, "CnnPolicy": CnnPolicy, "MultiInputPolicy": MultiInputPolicy}
    assert GRPO.policy_aliases == ours | {"CausalLMPolicy": CausalLMPolicy}
    with pytest.raises(ValueError, match=r'did you mean "MlpPolicy"\?'):
        GRPO("MlpPolcy", "CartPole-v1")

    class Mine(MlpPolicy):
        pass

    assert type(grpo(Bandit(), Mine).policy) is Mine
    assert type(grpo(Bandit(), ActorCriticPolicy).policy) is MlpPolicy  # SB3's own name for it


def test_03_a_policy_class_of_sb3_trains_with_its_own_critic() -> None:
    class Theirs(ActorCriticPolicy):
        pass

    with pytest.raises(ValueError, match="value_head=True"):
        grpo("CartPole-v1", Theirs)
    model = grpo("CartPole-v1", Theirs, value_head=True, group_kind="window", fork_prob=1.0, group_weight=0.5)
    assert model.learn(64).num_timesteps == 64


@pytest.mark.parametrize("policy", ["MlpPolicy", "CnnPolicy"])
def test_04_dict_observations_need_the_multi_input_policy(policy: str) -> None:
    observations = spaces.Dict({"a": box(1)})
    with pytest.raises(ValueError, match="MultiInputPolicy"):
        grpo(Spaces(observations, DISCRETE), policy)
    nested = spaces.Dict({"a": spaces.Dict({"b": box(1)})})
    with pytest.raises(NotImplementedError):
        grpo(Spaces(nested, DISCRETE), "MultiInputPolicy")


@pytest.mark.parametrize("actions", ACTIONS, ids=str)
def test_05_38_action_spaces(actions: spaces.Space) -> None:
    """The env asserts that its actions are in the space; so must predictions be, of one observation and of a batch."""
    model = grpo(Spaces(box(3), actions)).learn(64)
    for deterministic in (True, False):
        one, state = model.predict(np.zeros(3, np.float32), deterministic=deterministic)
        many, _ = model.predict(np.zeros((5, 3), np.float32), deterministic=deterministic)
        assert state is None
        assert isinstance(many, np.ndarray)
        assert many.shape == (5, *actions.shape)
        assert np.shape(one) == actions.shape
        dtype = np.float32 if isinstance(actions, spaces.MultiBinary) else actions.dtype  # as SB3
        assert many.dtype == dtype
        assert all(actions.contains(action.astype(actions.dtype)) for action in [one, *many])


@pytest.mark.parametrize(
    "actions",
    [
        spaces.Tuple([DISCRETE, DISCRETE]),
        spaces.Dict({"a": DISCRETE}),
        spaces.Box(-np.inf, np.inf, (1,), np.float32),
        spaces.Box(0, np.inf, (1,), np.float32),
        spaces.MultiBinary([2, 2]),
    ],
    ids=str,
)
def test_05_other_action_spaces_are_refused(actions: spaces.Space) -> None:
    with pytest.raises(AssertionError, match=r"action space|MultiBinary"):
        grpo(Spaces(box(1), actions))


@pytest.mark.parametrize("observations", OBSERVATIONS, ids=lambda space: str(space)[:30])
@pytest.mark.parametrize("value_head", [False, True])
def test_06_observation_spaces(observations: spaces.Space, value_head: bool) -> None:
    policy = "MultiInputPolicy" if isinstance(observations, spaces.Dict) else "MlpPolicy"
    policy = "CnnPolicy" if observations is IMAGE else policy
    kwargs = {"net_arch": [8]}
    if policy == "CnnPolicy":
        kwargs["features_extractor_kwargs"] = {"features_dim": 8}  # type: ignore[assignment]
    env = Spaces(observations, DISCRETE)
    model = grpo(env, policy, policy_kwargs=kwargs, value_head=value_head, normalize_obs=True).learn(64)
    assert parameters(model).isfinite().all()
    action, _ = model.predict(env.observe())
    assert DISCRETE.contains(int(action))


def test_07_wrapping(capsys: pytest.CaptureFixture[str]) -> None:
    model = grpo(Spaces(IMAGE, DISCRETE), "CnnPolicy", verbose=1)
    assert isinstance(model.env, VecTransposeImage)
    assert model.observation_space.shape == (3, 36, 36)
    assert model.env.env_is_wrapped(Monitor) == [True]
    said = capsys.readouterr().out
    for words in ("Monitor", "DummyVecEnv", "VecTransposeImage"):
        assert words in said
    model = grpo(Spaces(spaces.Dict({"picture": IMAGE}), DISCRETE), "MultiInputPolicy")
    assert model.observation_space["picture"].shape == (3, 36, 36)
    monitored = Monitor(Bandit())
    assert grpo(monitored).env.envs[0] is monitored  # not twice


def test_08_many_envs() -> None:
    assert grpo(make_vec_env("CartPole-v1", 5)).learn(100).num_timesteps >= 100


def test_09_sde_and_squash_need_each_other_and_boxes() -> None:
    with pytest.raises(ValueError, match="continuous actions"):
        grpo("CartPole-v1", use_sde=True)
    with pytest.raises(AssertionError, match="squash_output"):
        grpo(Walk(), policy_kwargs={"squash_output": True})


def test_10_batches_of_one_are_refused() -> None:
    """One row has no spread: SB3#440, #265."""
    with pytest.raises(AssertionError, match=r"n_steps \* n_envs"):
        GRPO("MlpPolicy", Bandit(), n_steps=1)
    with pytest.raises(AssertionError, match="batch_size"):
        GRPO("MlpPolicy", Bandit(), n_steps=64, batch_size=1)
    GRPO("MlpPolicy", Bandit(), n_steps=64, batch_size=1, normalize_advantage=False)  # nothing is divided by a spread


def test_11_a_truncated_minibatch_warns_and_trains() -> None:
    """64 rows in minibatches of 63 would leave one of a single row, which has no spread: it joins the 63."""
    with pytest.warns(UserWarning, match="truncated mini-batch of size 1"):
        model = grpo(batch_size=63, group_kind="window")
    model.learn(64)
    assert [len(batch.weight) for batch in model.rollout_buffer.get(63)] == [64]
    assert parameters(model).isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {"group_kind": "window"},
        {"group_kind": "episode"},
        {"value_head": True, "fork_prob": 0.5, "group_weight": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_12_the_same_seed_is_the_same_run(env: str, settings: dict[str, Any]) -> None:
    def run(seed: int) -> tuple[th.Tensor, list[float]]:
        model = grpo(env, seed=seed, **settings).learn(128)
        return parameters(model), [episode["r"] for episode in model.ep_info_buffer]

    first, again, other = run(3), run(3), run(4)
    assert first[1] == again[1]
    assert th.equal(first[0], again[0])
    assert not th.equal(first[0], other[0])


def test_12_seed_reaches_every_generator() -> None:
    model = grpo("Pendulum-v1", seed=5)
    drawn = [(random.random(), np.random.rand(), th.rand(1).item(), model.action_space.sample()) for _ in [0]]
    observed = model.env.reset()
    model = grpo("Pendulum-v1", seed=5)
    assert drawn == [(random.random(), np.random.rand(), th.rand(1).item(), model.action_space.sample())]
    np.testing.assert_array_equal(observed, model.env.reset())


def test_13_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("auto", "cpu", th.device("cpu")):
        model = grpo(Bandit(), device=device)
        cuda = device == "auto" and th.cuda.is_available()
        assert model.policy.device.type == ("cuda" if cuda else "cpu")
    asked: list[str] = []
    monkeypatch.setattr(GRPO, "_maybe_recommend_cpu", lambda self, name: asked.append(name))
    grpo(Bandit())
    monkeypatch.undo()
    assert asked == ["MlpPolicy"]
    model.device = th.device("cuda")  # as if it ran there
    with pytest.warns(UserWarning, match="trying to run GRPO on the GPU"):
        model._maybe_recommend_cpu(*asked)


def test_14_verbosity(capsys: pytest.CaptureFixture[str]) -> None:
    for env in ("CartPole-v1", gym.make("CartPole-v1"), make_vec_env("CartPole-v1", 4)):
        grpo(env, n_steps=64, verbose=0).learn(64)
    assert capsys.readouterr() == ("", "")
    grpo(verbose=1).learn(128)  # the numbers of an update come with the next rollout
    said = capsys.readouterr().out
    for words in ("groups: ", "total_timesteps", "policy_gradient_loss"):
        assert words in said


def test_15_nothing_is_built_without_init_setup_model() -> None:
    model = grpo(_init_setup_model=False)
    assert not hasattr(model, "policy")
    assert not hasattr(model, "rollout_buffer")
    model._setup_model()
    assert model.learn(64).num_timesteps >= 64


class Extractor(BaseFeaturesExtractor):
    def __init__(self, observation_space: spaces.Space, features_dim: int = 5) -> None:
        super().__init__(observation_space, features_dim)
        self.net = th.nn.Linear(observation_space.shape[0], features_dim)  # type: ignore[index]

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.net(observations)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"net_arch": []},
        {"net_arch": [6, 7]},
        {"net_arch": {"pi": [6], "vf": [7, 8]}},
        {"net_arch": None},
        {"activation_fn": th.nn.ReLU, "ortho_init": False},
        {"log_std_init": -1.5},
        {"features_extractor_class": Extractor, "features_extractor_kwargs": {"features_dim": 3}},
        {"features_extractor_class": Extractor, "share_features_extractor": False},
        {"optimizer_class": th.optim.SGD, "optimizer_kwargs": {"weight_decay": 0.1, "momentum": 0.5}},
        {"optimizer_kwargs": {"weight_decay": 0.1}},
        {"normalize_images": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("value_head", [False, True])
def test_16_policy_kwargs(kwargs: dict[str, Any], value_head: bool) -> None:
    given = dict(kwargs)
    model = grpo("Pendulum-v1", policy_kwargs=kwargs, value_head=value_head).learn(64)
    assert kwargs == given
    actor = [m for m in model.policy.mlp_extractor.policy_net if isinstance(m, th.nn.Linear)]
    critic = [m for m in model.policy.mlp_extractor.value_net if isinstance(m, th.nn.Linear)]
    arch = kwargs.get("net_arch")
    arch = [64, 64] if arch is None else arch
    arch = arch if isinstance(arch, dict) else {"pi": arch, "vf": arch}
    assert [layer.out_features for layer in actor] == arch["pi"]
    assert [layer.out_features for layer in critic] == (arch["vf"] if value_head else [])
    if "log_std_init" in kwargs:
        fresh = grpo("Pendulum-v1", policy_kwargs=kwargs, value_head=value_head)
        assert fresh.policy.log_std.item() == -1.5
    if "activation_fn" in kwargs:
        assert any(isinstance(m, th.nn.ReLU) for m in model.policy.mlp_extractor.policy_net)
    if "features_extractor_class" in kwargs:
        own = value_head and kwargs.get("share_features_extractor") is False
        assert sum(isinstance(m, Extractor) for m in model.policy.modules()) == (2 if own else 1)
    optimizer = model.policy.optimizer
    assert type(optimizer) is kwargs.get("optimizer_class", th.optim.Adam)
    assert optimizer.defaults["weight_decay"] == kwargs.get("optimizer_kwargs", {}).get("weight_decay", 0)
    if "optimizer_kwargs" not in kwargs:
        assert optimizer.defaults["eps"] == 1e-5  # SB3's, for Adam


def test_16_old_net_arch_warns() -> None:
    with pytest.warns(UserWarning, match="net_arch"):
        grpo(policy_kwargs={"net_arch": [{"pi": [8], "vf": [8]}]})


def test_17_schedules_are_values() -> None:
    model = grpo(learning_rate=LinearSchedule(1e-3, 0.0), clip_range=lambda progress: 0.2 * progress)
    for schedule in (model.lr_schedule, model.clip_range):
        assert type(schedule) is FloatSchedule
        assert type(schedule(0.5)) is float
    assert model.lr_schedule(0.5) == pytest.approx(5e-4)
    assert model.clip_range(0.5) == pytest.approx(0.1)
    model = grpo(learning_rate=1e-3, clip_range=0.1, clip_range_vf=0.3, value_head=True)
    for schedule, value in ((model.lr_schedule, 1e-3), (model.clip_range, 0.1), (model.clip_range_vf, 0.3)):
        assert isinstance(schedule.value_schedule, ConstantSchedule)
        assert schedule(0.5) == value


def test_17_progress_runs_from_one_to_zero() -> None:
    """Two rollouts of 64 of 128 steps: the first update is half way, the second at the end, also beyond the total."""
    asked: list[float] = []

    def schedule(progress: float) -> float:
        asked.append(progress)
        return 1e-3

    model = grpo(group_kind="window", learning_rate=schedule)
    asked.clear()
    model.learn(128)
    assert list(dict.fromkeys(asked)) == [0.5, 0.0]
    model = grpo(Constant(50), n_steps=64, group_kind="episode", learning_rate=schedule)
    asked.clear()
    assert model.learn(70).num_timesteps == 100  # one group of two episodes of 50 steps
    assert set(asked) == {0.0}


def test_18_stats_window_size() -> None:
    model = grpo(Bandit(), stats_window_size=7).learn(64)
    assert model.ep_info_buffer.maxlen == model.ep_success_buffer.maxlen == len(model.ep_info_buffer) == 7


def test_19_rollout_buffer_class_is_refused() -> None:
    for settings in ({"rollout_buffer_class": sb3.common.buffers.RolloutBuffer}, {"rollout_buffer_kwargs": {"x": 1}}):
        with pytest.raises(ValueError, match="rollout_buffer_class is not offered"):
            grpo(**settings)


# --- learn ------------------------------------------------------------------------------------------------------------
def test_20_learn_returns_self_and_takes_floats() -> None:
    model = grpo(group_kind="window")
    assert model.learn(1e2) is model
    assert model.num_timesteps == 128
    ours, theirs = (inspect.signature(cls.learn).parameters.values() for cls in (GRPO, sb3.PPO))
    assert [(p.name, p.default) for p in ours if p.name != "tb_log_name"] == [
        (p.name, p.default) for p in theirs if p.name != "tb_log_name"
    ]
    assert inspect.signature(GRPO.learn).parameters["tb_log_name"].default == "GRPO"


@pytest.mark.parametrize("total", [1, 64, 65, 128])
def test_21_windows_stop_at_the_first_multiple(total: int) -> None:
    """32 steps × 2 envs a rollout: 1 and 64 take one rollout, 65 and 128 two."""
    recorder = Recorder()
    model = grpo(group_kind="window").learn(total, recorder)
    assert model.num_timesteps == -(-total // 64) * 64
    assert recorder.counts == list(range(2, model.num_timesteps + 1, 2))  # counted before on_step


def test_21_episode_groups_stop_at_a_whole_group() -> None:
    """Episodes of 50 steps, groups of 2: a rollout of 64 steps or more is one group of 100."""
    model = grpo(Constant(50), n_steps=64, group_kind="episode").learn(64)
    assert model.num_timesteps == 100


def test_22_order_of_callbacks_and_their_locals() -> None:
    recorder, nested = Recorder(), Recorder()
    model = grpo("Pendulum-v1", group_kind="window").learn(128, CallbackList([recorder, nested]))
    rollout = ["rollout_start", *["step"] * 32, "rollout_end"]
    assert recorder.calls == nested.calls == ["training_start", *rollout, *rollout, "training_end"]
    assert recorder.locals is nested.locals
    for seen in recorder.seen:
        assert seen["self"] is model
        assert seen["env"] is model.env
        assert seen["new_obs"].shape == (2, 3)
        assert all(model.observation_space.contains(obs) for obs in seen["new_obs"])
        assert seen["actions"].shape == (2, 1)
        assert seen["rewards"].shape == seen["dones"].shape == (2,)
        assert len(seen["infos"]) == 2
        assert isinstance(seen["obs_tensor"], th.Tensor)
    assert recorder.seen[0]["new_obs"] is nested.seen[0]["new_obs"]


def test_22_locals_name_the_transition_that_was_made() -> None:
    """Reward and done at on_step are those of the env's step, and the step is not in the buffer yet."""
    recorder = Recorder()
    grpo(Constant(4), n_steps=64).learn(64, recorder)
    assert [bool(seen["dones"][0]) for seen in recorder.seen[:8]] == [False, False, False, True] * 2
    assert [seen["n_steps"] for seen in recorder.seen[:5]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("falsy", [False, np.bool_(False), th.tensor(0), 0, None], ids=repr)
def test_23_a_falsy_value_stops_at_once(falsy: Any) -> None:
    recorder = Recorder(stop_at=5, stop_with=falsy)
    before = grpo()
    weights = parameters(before)
    model = before.learn(200, recorder)
    assert recorder.n_calls == 5
    assert recorder.calls[-2:] == ["step", "training_end"]  # no rollout_end, as SB3
    assert model.num_timesteps == 10
    assert th.equal(parameters(model), weights)


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("env", ["CartPole-v1", "dummy", "subproc"])
def test_23_training_goes_on_after_a_stop(env: str, settings: dict[str, Any]) -> None:
    """A stop in the middle of an episode, then learn without a reset: no "needs reset", and the count goes on."""
    venv: Any = env
    if env != "CartPole-v1":
        kwargs = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}} if env == "subproc" else {}
        venv = make_vec_env("CartPole-v1", 2, seed=0, **kwargs)  # type: ignore[arg-type]
    model = grpo(venv, **settings)
    for stop in (1, 20, 33):
        before = model.num_timesteps
        model.learn(200, Recorder(stop_at=stop), reset_num_timesteps=False)
        assert model.num_timesteps > before
    before = model.num_timesteps
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps >= before + 64
    model.env.close()


def test_24_kinds_of_callback() -> None:
    counted: list[int] = []

    def function(local: dict[str, Any], _: dict[str, Any]) -> bool:
        counted.append(local["self"].num_timesteps)
        return True

    model = grpo(group_kind="window")
    for callback in (None, function, [Recorder(), Recorder()], Recorder(), CallbackList([])):
        model.learn(64, callback)
    assert counted == list(range(2, 65, 2))


def test_25_going_on_keeps_count_env_and_progress() -> None:
    model = grpo(group_kind="window").learn(64)
    resets = []
    model.env.reset, reset = lambda: resets.append(1) or reset(), model.env.reset  # type: ignore[func-returns-value]
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == 128
    assert model._total_timesteps == 128  # "total" is: more steps
    assert not resets
    model.learn(64)
    assert model.num_timesteps == 64
    assert resets == [1]


def test_25_31_tensorboard_runs(tmp_path: pathlib.Path) -> None:
    model = grpo(tensorboard_log=str(tmp_path))
    model.learn(64).learn(64, reset_num_timesteps=False)
    assert sorted(os.listdir(tmp_path)) == ["GRPO_1"]
    model.learn(64).learn(64, tb_log_name="other")
    assert sorted(os.listdir(tmp_path)) == ["GRPO_1", "GRPO_2", "other_1"]
    assert all(any("tfevents" in name for name in os.listdir(tmp_path / run)) for run in os.listdir(tmp_path))


def test_26_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    grpo(group_kind="window").learn(64, progress_bar=True)
    out, err = capfd.readouterr()
    assert "64/64" in (out + err).replace(" ", "")


class Success(Constant):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"is_success": self.t == 4}


def test_27_28_statistics_of_episodes(tmp_path: pathlib.Path) -> None:
    """Episodes of 4 steps with reward 1 that all succeed: return 4, length 4, success rate 1."""
    model = grpo(Success(4), n_steps=64)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(128)
    assert set(model.ep_success_buffer) == {True}
    assert {(episode["r"], episode["l"]) for episode in model.ep_info_buffer} == {(4.0, 4)}
    log = read_csv(tmp_path / "progress.csv")
    assert log["rollout/ep_rew_mean"] == [4.0, 4.0]
    assert log["rollout/ep_len_mean"] == [4.0, 4.0]
    assert log["rollout/success_rate"] == [1.0, 1.0]


def read_csv(path: pathlib.Path) -> dict[str, list[float]]:
    import pandas

    return pandas.read_csv(path).to_dict("list")


def test_28_names_in_the_log(tmp_path: pathlib.Path) -> None:
    model = grpo("Pendulum-v1", value_head=True, clip_range_vf=0.2, group_kind="window", n_steps=256, n_epochs=2)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(1024)
    log = read_csv(tmp_path / "progress.csv")
    expected = {
        "time": "fps iterations time_elapsed total_timesteps",
        "rollout": "ep_rew_mean ep_len_mean",
        "train": "learning_rate loss entropy_loss policy_gradient_loss value_loss approx_kl clip_fraction clip_range"
        " clip_range_vf n_updates std explained_variance",
    }
    assert {f"{section}/{name}" for section, names in expected.items() for name in names.split()} <= log.keys()
    assert log["time/total_timesteps"] == [512, 1024]
    assert log["time/iterations"] == [1, 2]
    assert log["train/n_updates"][1] == 2  # epochs so far; a row is written before its own update
    assert log["train/clip_range"][1] == 0.2


def test_29_fps_counts_this_learn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still, then runs one second per call: 64 steps are at most 64 per second, not 128."""
    model = grpo(group_kind="window")
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    model.learn(64)
    clock = iter(range(10**9, 10**13, 10**9))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    dumped: dict[str, Any] = {}
    monkeypatch.setattr(Logger, "dump", lambda self, step: dumped.update(self.name_to_value))
    model.learn(64, reset_num_timesteps=False)
    assert dumped["time/fps"] == 64


def test_30_a_logger_of_ones_own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = grpo(tensorboard_log=str(tmp_path / "tb"))
    logger = configure(str(tmp_path / "mine"), ["csv"])
    model.set_logger(logger)
    model.learn(64).learn(64)
    assert model.logger is logger
    assert not (tmp_path / "tb").exists()
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "env"))
    assert configure(None, ["csv"]).get_dir() == str(tmp_path / "env")


def test_32_learn_again_on_another_env_and_after_load(tmp_path: pathlib.Path) -> None:
    model = grpo(n_epochs=2)
    model.learn(64).learn(64)
    env = make_group_env("CartPole-v1", 1, 2, seed=1)
    model.set_env(env)
    model.learn(64)
    assert model._sampler.env is model.env
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 2), device="cpu")
    updates = loaded._n_updates
    loaded.learn(64).learn(64)
    assert loaded._n_updates == updates + 4


# 33: truncation and termination are told apart in test_grpo.py (test_truncation_…), in test_known_issues.py rows 3
# and 4 and, as arrays, in sampling/test_steps.py.


def test_33_value_head_bootstraps_from_the_terminal_observation_that_vec_normalize_saw() -> None:
    env = VecNormalize(DummyVecEnv([lambda: Walk(5, truncates=True)]), norm_reward=False)
    model = grpo(env, value_head=True, group_size=1, n_steps=64, gamma=0.5, gae_lambda=1.0)
    recorder = Recorder()
    model.learn(64, recorder)
    buffer = model.rollout_buffer
    rows = {(t, n): obs for t, n, obs in buffer.tail_obs}
    cut = [t for t, seen in enumerate(recorder.seen) if seen["dones"][0] and seen["infos"][0]["TimeLimit.truncated"]]
    assert len(cut) >= 5
    for t in cut:
        np.testing.assert_array_equal(rows[t, 0], recorder.seen[t]["infos"][0]["terminal_observation"])
        assert abs(rows[t, 0][0]) <= 10.0  # VecNormalize's clip: it is normalised


def test_34_the_buffer_holds_unclipped_actions_the_env_clipped_ones() -> None:
    model = grpo(Walk(), n_steps=64, policy_kwargs={"log_std_init": 1.0, "net_arch": []}).learn(64)  # std e
    actions = model.rollout_buffer.actions[model.rollout_buffer.mask]
    assert (np.abs(actions) > 1).mean() > 0.5  # and Walk.step asserts the bounds
    obs, _ = model.rollout_buffer.rows()
    fresh = grpo(Walk(), n_steps=64, policy_kwargs={"log_std_init": 1.0, "net_arch": []})  # the weights that sampled
    log_prob = fresh.policy.evaluate_actions(obs, th.as_tensor(actions))[1].detach().numpy()
    np.testing.assert_allclose(log_prob, model.rollout_buffer.log_probs[model.rollout_buffer.mask], rtol=1e-5)


class Bounds(Spaces):
    """Keeps all actions it is given."""

    given: list[np.ndarray] = []  # noqa: RUF012

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.given.append(np.array(action))
        return super().step(action)


@pytest.mark.parametrize("use_expln", [False, True])  # 16
def test_34_squashed_actions_are_unscaled(use_expln: bool) -> None:
    """tanh lies in (-1, 1); the env's Box is [2, 6], so that it gets 4 + 2·tanh."""
    Bounds.given.clear()
    env = Bounds(box(1), spaces.Box(2, 6, (1,), np.float32))
    kwargs = {"squash_output": True, "use_expln": use_expln, "net_arch": [8]}
    model = grpo(env, n_steps=64, use_sde=True, policy_kwargs=kwargs).learn(64)
    actions = model.rollout_buffer.actions
    assert np.abs(actions).max() < 1
    np.testing.assert_allclose(np.array(Bounds.given), 4 + 2 * actions[:, 0], rtol=1e-6)
    for deterministic in (True, False):
        action, _ = model.predict(np.zeros((9, 1), np.float32), deterministic=deterministic)
        assert ((action >= 2) & (action <= 6)).all()


@pytest.mark.parametrize(("every", "expected"), [(-1, [0]), (8, [0, 0, 8, 16, 24])])
def test_35_sde_noise_is_drawn_at_the_start_and_every_n(every: int, expected: list[int]) -> None:
    model = grpo("Pendulum-v1", use_sde=True, sde_sample_freq=every, group_kind="window")
    drawn: list[tuple[int, int]] = []
    reset = model.policy.reset_noise
    model.policy.reset_noise = lambda n: drawn.append((len(model.rollout_buffer), n)) or reset(n)
    model.learn(64)
    assert drawn == [(step, 2) for step in expected]


class WithBatchNorm(MlpPolicy):
    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        self.mlp_extractor.policy_net = th.nn.Sequential(th.nn.BatchNorm1d(4), *self.mlp_extractor.policy_net)


def test_36_batch_norm_moves_in_train_only() -> None:
    model = grpo("CartPole-v1", WithBatchNorm, group_kind="window")

    def statistics() -> th.Tensor:
        return model.policy.mlp_extractor.policy_net[0].running_mean.clone()

    modes: list[bool] = []
    moved: list[bool] = []

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:
            self.start = statistics()

        def _on_step(self) -> bool:
            modes.append(model.policy.training)
            return True

        def _on_rollout_end(self) -> None:
            moved.append(not th.equal(self.start, statistics()))

    start = statistics()
    model.learn(64, Watch())
    assert moved == [False]
    assert set(modes) == {False}
    trained = statistics()
    assert not th.equal(trained, start)
    model.policy.set_training_mode(True)
    model.predict(np.ones((4, 4), np.float32))
    assert th.equal(statistics(), trained)


def test_37_the_parts_that_subclasses_call() -> None:
    model = grpo(group_kind="window")
    total, callback = model._setup_learn(64)
    assert total == 64
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=8) is True
    assert len(model.rollout_buffer) == 8
    assert model.rollout_buffer.advantages.shape == (8, 2)
    model.train()
    assert model._n_updates == 1
    _, callback = model._setup_learn(64, Recorder(stop_at=3))
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=8) is False


# --- predict, evaluate ------------------------------------------------------------------------------------------------
# 38: test_05_38_action_spaces.


def test_39_the_tuple_of_reset_is_refused() -> None:
    env = gym.make("CartPole-v1")
    with pytest.raises(ValueError, match="mixing Gym API"):
        grpo(env).predict(env.reset())


def test_40_channel_last_images_and_numbers_as_observations() -> None:
    model = grpo(Spaces(IMAGE, DISCRETE), "CnnPolicy")
    image = IMAGE.sample()
    last, _ = model.predict(image, deterministic=True)
    first, _ = model.predict(np.transpose(image, (2, 0, 1)), deterministic=True)
    assert last == first
    model = grpo(Spaces(spaces.Discrete(3), DISCRETE))
    for obs in (2, np.int64(2), np.array(2)):
        assert DISCRETE.contains(int(model.predict(obs)[0]))
    assert model.predict(np.array([0, 1, 2]))[0].shape == (3,)


def test_41_evaluate_policy() -> None:
    model = grpo(Constant(8))
    for subject in (model, model.policy):
        for env in (Monitor(Constant(8)), make_vec_env(Constant, 3), model.get_env()):
            assert evaluate_policy(subject, env, 6, return_episode_rewards=True) == ([8.0] * 6, [8] * 6)
    calls: list[int] = []
    with pytest.raises(AssertionError, match="below threshold"):
        evaluate_policy(model, Monitor(Constant(8)), 2, reward_threshold=9, callback=lambda *_: calls.append(1))
    assert len(calls) == 16


@pytest.mark.parametrize("value_head", [False, True])
def test_42_methods_of_the_policy(value_head: bool) -> None:
    policy = grpo(value_head=value_head).policy
    obs, vectorized = policy.obs_to_tensor(np.zeros(4, np.float32))
    assert obs.shape == (1, 4)
    assert not vectorized
    actions, values, log_prob = policy(obs.repeat(3, 1))
    assert actions.shape == log_prob.shape == (3,)
    again, log_prob_again, entropy = policy.evaluate_actions(obs.repeat(3, 1), actions)
    th.testing.assert_close(log_prob_again, log_prob)
    assert entropy.shape == (3,)
    distribution = policy.get_distribution(obs.repeat(3, 1))
    th.testing.assert_close(distribution.log_prob(actions), log_prob)
    if value_head:
        assert values.shape == again.shape == policy.predict_values(obs.repeat(3, 1)).shape == (3, 1)
        th.testing.assert_close(policy.predict_values(obs.repeat(3, 1)), values)
    else:
        assert values is None
        assert again is None
        with pytest.raises(AttributeError, match="value_head=True"):
            policy.predict_values(obs)


# --- environment ------------------------------------------------------------------------------------------------------
def test_43_get_and_set_env() -> None:
    model = grpo(VecNormalize(make_vec_env("CartPole-v1", 2)))
    model.learn(64)
    assert model.get_env() is model.get_vec_normalize_env() is model.env
    with pytest.raises(AssertionError, match="number of environments"):
        model.set_env(make_vec_env("CartPole-v1", 3))
    with pytest.raises(ValueError, match="spaces do not match"):
        model.set_env(make_vec_env("Pendulum-v1", 2))
    last, env = model._last_obs, make_vec_env("CartPole-v1", 2)
    env.reset()
    model.set_env(env, force_reset=False)
    assert model._last_obs is last
    model.set_env(env)
    assert model._last_obs is None
    assert model.get_vec_normalize_env() is None
    assert model.learn(64, reset_num_timesteps=False).num_timesteps > 64


def test_43_set_env_refuses_to_normalise_twice() -> None:
    model = grpo(make_vec_env("CartPole-v1", 2), normalize_obs=True)
    with pytest.raises(ValueError, match="normalised twice"):
        model.set_env(VecNormalize(make_vec_env("CartPole-v1", 2)))


VEC_NORMALIZED = {
    "episodes by fork": (lambda: make_vec_env("CartPole-v1", 2), {}),
    "episodes in a GroupVecEnv": (lambda: make_group_env("CartPole-v1", 2, 2), {}),
    "windows by fork": (lambda: make_vec_env("CartPole-v1", 2), {"group_kind": "window", "fork_prob": 0.5}),
    "hybrid": (lambda: make_vec_env("CartPole-v1", 2), {"value_head": True, "fork_prob": 1.0}),
    "seeded episodes": (lambda: make_vec_env(Unknown, 2), {"group_kind": "episode"}),
    "batch": (lambda: make_vec_env(Unknown, 2), {"group_kind": "window"}),
}


@pytest.mark.parametrize("case", VEC_NORMALIZED)
def test_44_vec_normalize_counts_steps_only(case: str) -> None:
    """One observation per step that is counted, and those of the first reset; neither forks nor evaluation."""
    make, settings = VEC_NORMALIZED[case]
    eval_env = VecNormalize(make(), training=False)
    env = VecNormalize(make())
    model = grpo(env, **settings)
    counts: list[tuple[int, float]] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            counts.append((model.num_timesteps, env.obs_rms.count))
            return True

    model.learn(256, Watch())
    first = env.num_envs + 1e-4  # of learn's reset; 1e-4 is RunningMeanStd's own start
    assert [count for _, count in counts] == pytest.approx([steps + first for steps, _ in counts])
    assert env.obs_rms.count == pytest.approx(model.num_timesteps + first)
    evaluate_policy(model, eval_env, 2)
    assert env.obs_rms.count == pytest.approx(model.num_timesteps + first)


class Opaque(DummyVecEnv):
    """A VecEnv that hides its envs, refuses copies, and hands out the same arrays at each step."""

    def __init__(self, env_fns: list[Any]) -> None:
        super().__init__(env_fns)
        self._hidden = self.envs
        self._arrays: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("cannot be copied")

    __reduce_ex__ = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "envs" and "_hidden" in vars(self):
            raise AttributeError("there is no .envs here")
        return super().__getattribute__(name)

    def _same(self, name: str, value: np.ndarray) -> np.ndarray:
        mine = self._arrays.setdefault(name, value.copy())
        mine[...] = value
        return mine

    def step_wait(self) -> Any:
        vars(self)["envs"], hidden = self._hidden, vars(self).pop("_hidden")
        try:
            obs, rewards, dones, infos = super().step_wait()
        finally:
            vars(self)["_hidden"] = hidden
        return self._same("obs", obs), self._same("rewards", rewards), self._same("dones", dones), infos  # type: ignore[arg-type]

    def reset(self) -> Any:
        vars(self)["envs"], hidden = self._hidden, vars(self).pop("_hidden")
        try:
            return self._same("obs", super().reset())  # type: ignore[arg-type]
        finally:
            vars(self)["_hidden"] = hidden

    def env_method(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


@pytest.mark.parametrize("settings", [{}, {"value_head": True}, {"group_kind": "episode"}], ids=str)
def test_45_a_vec_env_that_gives_nothing_away(settings: dict[str, Any]) -> None:
    model = grpo(Opaque([lambda: Constant(5)] * 1), n_steps=64, **settings).learn(64)
    assert model.groups.means != "fork"
    assert model.num_timesteps >= 64


def test_45_arrays_that_the_env_reuses_are_copied() -> None:
    """Unknown's observation is start + t and each episode has 6 steps: what was stored must still say so afterwards."""
    model = grpo(Opaque([Unknown, Unknown]), group_kind="window", n_steps=36).learn(72)
    obs, rewards = model.rollout_buffer.observations[:, :, 0], model.rollout_buffer.rewards
    starts = np.repeat(obs[::6], 6, axis=0)
    np.testing.assert_allclose(obs - starts, np.tile(np.arange(6), 6)[:, None].repeat(2, 1), atol=1e-5)
    np.testing.assert_array_equal(rewards, model.rollout_buffer.actions)  # its reward is the action


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_46_the_users_envs_are_stepped_and_reset_in_order(
    settings: dict[str, Any], n_envs: int, tmp_path: pathlib.Path
) -> None:
    """gym.make adds OrderEnforcing, Monitor raises if stepped when it needs a reset; RecordEpisodeStatistics counts."""

    def make() -> gym.Env:
        return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))

    env = make_vec_env(make, n_envs, monitor_dir=str(tmp_path), seed=1)
    model = grpo(env, n_steps=128, group_size=4, **settings)
    recorder = Recorder()
    model.learn(600, recorder)
    ended = [info["episode"] for seen in recorder.seen for info in seen["infos"] if "episode" in info]
    rows = [line.split(",") for path in tmp_path.iterdir() for line in path.read_text().splitlines()[2:]]
    assert len(rows) == len(ended) > 10
    assert sorted(float(row[0]) for row in rows) == sorted(float(episode["r"]) for episode in ended)
    assert all(float(row[0]) == float(row[1]) for row in rows)  # CartPole pays 1 a step: return = length
    statistics = [env.env_method("get_wrapper_attr", "return_queue", indices=i)[0] for i in range(n_envs)]
    assert sorted(float(r) for queue in statistics for r in queue) == sorted(float(e["r"]) for e in ended)


# --- save, load -------------------------------------------------------------------------------------------------------
def saved(model: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    model.save(tmp_path / "model.zip")
    return tmp_path / "model.zip"


def test_47_the_files_in_the_zip(tmp_path: pathlib.Path) -> None:
    model = grpo().learn(64)
    path = saved(model, tmp_path)
    names = set(zipfile.ZipFile(path).namelist())
    expected = {"data", "policy.pth", "policy.optimizer.pth", "pytorch_variables.pth"}
    assert names == expected | {"_stable_baselines3_version", "system_info.txt"}
    model.save(str(tmp_path / "text"))
    assert (tmp_path / "text.zip").exists()
    stream = io.BytesIO()
    model.save(stream)
    assert not stream.closed
    stream.seek(0)
    assert GRPO.load(stream, device="cpu").num_timesteps == model.num_timesteps
    data = json.loads(zipfile.ZipFile(path).read("data"))
    assert data["num_timesteps"] == model.num_timesteps
    assert "group_size" in data
    model.save(tmp_path / "less", exclude=["group_size"], include=["rollout_buffer"])
    data = json.loads(zipfile.ZipFile(tmp_path / "less.zip").read("data"))
    assert "group_size" not in data
    assert "rollout_buffer" in data


def test_48_what_is_not_saved(tmp_path: pathlib.Path) -> None:
    model = grpo(auxiliary_losses={"zero": (lambda policy, batch: batch.advantages * 0, 1.0)}, kl_coef=0.1).learn(64)
    data = json.loads(zipfile.ZipFile(saved(model, tmp_path)).read("data"))
    excluded = ["policy", "device", "env", "rollout_buffer", "_vec_normalize_env", "_logger", "_custom_logger"]
    excluded += ["_sampler", "groups", "auxiliary_losses", "reference_policy", "reward_scale"]
    assert not data.keys() & set(excluded)
    assert os.path.getsize(tmp_path / "model.zip") < 60_000  # no snapshots, no rollout
    assert set(excluded) <= set(model._excluded_save_params())


def test_49_torch_parameters() -> None:
    assert grpo()._get_torch_save_params() == (["policy", "policy.optimizer"], [])
    names = ["policy", "policy.optimizer", "reference_policy", "reward_scale"]
    assert grpo(kl_coef=0.1, normalize_reward=True)._get_torch_save_params() == (names, [])


def test_50_load(tmp_path: pathlib.Path) -> None:
    model = grpo(n_epochs=2, group_kind="window").learn(128)
    path = saved(model, tmp_path)
    loaded = GRPO.load(path, n_steps=48, batch_size=24, n_epochs=3, group_size=4, device="cpu")
    assert (loaded.n_steps, loaded.batch_size, loaded.n_epochs, loaded.group_size) == (48, 24, 3, 4)
    assert loaded.num_timesteps == 128
    assert loaded.env is None
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])
    with pytest.raises(ValueError, match="policy kwargs"):
        GRPO.load(path, policy_kwargs={"net_arch": [9]})
    with pytest.raises(ValueError, match="spaces do not match"):
        GRPO.load(path, env=gym.make("Pendulum-v1"))
    for n_envs in (1, 2, 5):
        loaded = GRPO.load(path, env=make_vec_env("CartPole-v1", n_envs), device="cpu")
        assert loaded.n_envs == n_envs
        assert loaded.learn(64).num_timesteps == -(-64 // (32 * n_envs)) * 32 * n_envs
        assert loaded.rollout_buffer.rewards.shape == (32, n_envs)


def test_50_n_steps_left_open_follows_the_number_of_envs(tmp_path: pathlib.Path) -> None:
    path = saved(GRPO("MlpPolicy", make_vec_env("CartPole-v1", 4), device="cpu"), tmp_path)
    assert GRPO.load(path, env=make_vec_env("CartPole-v1", 8)).n_steps == 256
    assert GRPO.load(path, env=make_vec_env("CartPole-v1", 8), n_steps=100).n_steps == 100


@pytest.mark.parametrize("other", [{"kl_coef": 0.1}, {"normalize_reward": True}], ids=str)
def test_50_options_with_parameters_of_their_own_can_be_switched_at_load(
    tmp_path: pathlib.Path, other: dict[str, Any]
) -> None:
    """With kl_coef the reference of an agent that had none is the agent that was loaded."""
    model = grpo("Pendulum-v1").learn(64)
    loaded = GRPO.load(saved(model, tmp_path), env=make_vec_env("Pendulum-v1", 2), device="cpu", **other)
    if "kl_coef" in other:
        for ours, theirs in zip(loaded.reference_policy.parameters(), model.policy.parameters(), strict=True):
            assert th.equal(ours, theirs)
    loaded.learn(64)
    off = dict.fromkeys(other, 0)
    back = GRPO.load(saved(loaded, tmp_path), env=make_vec_env("Pendulum-v1", 2), device="cpu", **off)
    assert th.equal(parameters(back), parameters(loaded))
    back.learn(64)


def test_51_a_corrupt_entry_warns(tmp_path: pathlib.Path) -> None:
    path = saved(grpo(), tmp_path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(files["data"])
    data["clip_range"][":serialized:"] = base64.b64encode(b"cgrpo_rl.schedules\nGone\n.").decode()  # no such class
    files["data"] = json.dumps(data).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.warns(UserWarning, match="custom_objects"):
        loaded = GRPO.load(path)
    assert loaded.clip_range(1) == 0.2  # the constructor's default
    assert GRPO.load(path, custom_objects={"clip_range": 0.4}).clip_range(1) == 0.4


def test_52_get_and_set_parameters(tmp_path: pathlib.Path) -> None:
    model, other = grpo(seed=1), grpo(seed=2)
    given = model.get_parameters()
    assert set(given) == {"policy", "policy.optimizer"}
    other.set_parameters(given)
    assert th.equal(parameters(other), parameters(model))
    model.learn(64)
    other.set_parameters(str(saved(model, tmp_path)))
    assert th.equal(parameters(other), parameters(model))
    with pytest.raises(ValueError, match="do not match"):
        other.set_parameters({"policy": given["policy"]})
    with pytest.raises(ValueError, match="invalid object name"):
        other.set_parameters({"nothing": {}})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.set_parameters({"policy": {}, "policy.optimizer": given["policy.optimizer"]})
    other.set_parameters({"policy": {}}, exact_match=False)
    assert th.equal(parameters(other), parameters(model))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"value_head": True},
        {"kl_coef": 0.1, "normalize_reward": True, "normalize_obs": True, "baseline": "moving_average"},
        {"use_sde": True, "kl_coef": 0.1},
    ],
    ids=str,
)
def test_53_predictions_and_optimizer_survive(tmp_path: pathlib.Path, settings: dict[str, Any]) -> None:
    """The agent that was loaded and the one that was saved make the same next update from the same seed."""
    env = make_group_env("Pendulum-v1", 1, 2, seed=0)
    model = grpo(env, group_kind="window", **settings).learn(128)
    loaded = GRPO.load(saved(model, tmp_path), env=make_group_env("Pendulum-v1", 1, 2, seed=0), device="cpu")
    obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])
    results = []
    for agent in (model, loaded):
        agent.set_env(make_group_env("Pendulum-v1", 1, 2))
        agent.set_random_seed(7)
        agent.learn(64)
        results.append(parameters(agent))
    assert th.equal(*results)


def test_53_a_compiled_policy_trains_and_is_saved(tmp_path: pathlib.Path) -> None:
    model = grpo("Pendulum-v1", normalize_obs=True, group_kind="window")
    plain = grpo("Pendulum-v1", normalize_obs=True, group_kind="window")
    model.policy = th.compile(model.policy, backend="eager")
    for agent in (plain, model):
        agent.set_random_seed(0)
        agent.learn(128)
    np.testing.assert_allclose(parameters(model), parameters(plain), atol=1e-6)
    count = model.policy.features_extractor.norms["obs_"].count
    assert count == 128  # its statistics moved too
    loaded = GRPO.load(saved(model, tmp_path), device="cpu")
    np.testing.assert_allclose(parameters(loaded), parameters(model))


def test_54_files_are_closed(tmp_path: pathlib.Path) -> None:
    model = grpo().learn(64)
    gc.collect()  # what other tests left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        path = saved(model, tmp_path)
        GRPO.load(path)
        with open(tmp_path / "given", "wb") as stream:
            model.save(stream)
            assert not stream.closed
        with open(tmp_path / "given", "rb") as stream:
            GRPO.load(stream)
            assert not stream.closed
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []


@pytest.mark.parametrize("settings", [{}, {"value_head": True}, {"normalize_obs": True}], ids=str)
def test_55_a_policy_alone(tmp_path: pathlib.Path, settings: dict[str, Any]) -> None:
    model = grpo("Pendulum-v1", **settings).learn(64)
    model.policy.save(tmp_path / "policy.pth")
    loaded = MlpPolicy.load(tmp_path / "policy.pth", device="cpu")
    assert loaded.has_value is bool(settings.get("value_head"))
    obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])


def test_56_every_part_that_is_saved_can_be_pickled() -> None:
    model = grpo(learning_rate=LinearSchedule(1e-3, 0), clip_range=LinearSchedule(0.3, 0.1), clip_range_vf=0.2)
    model.learn(64)
    parts = {name: value for name, value in vars(model).items() if name not in model._excluded_save_params()}
    for name, part in parts.items():
        content = cloudpickle.dumps(part)
        if name not in ("policy_class", "policy_kwargs", "observation_space", "action_space"):
            assert b"<lambda>" not in content, name
            assert b"_make_function" not in content, name  # no code, which breaks on another Python
    for name in ("lr_schedule", "clip_range", "clip_range_vf"):
        again = pickle.loads(pickle.dumps(parts[name]))
        assert again(0.25) == parts[name](0.25)


def test_57_callbacks_of_sb3_in_the_middle_of_a_rollout(tmp_path: pathlib.Path) -> None:
    env = VecNormalize(make_vec_env("CartPole-v1", 2))
    eval_env = VecNormalize(make_vec_env("CartPole-v1", 1), training=False, norm_reward=False)
    model = grpo(env)
    stop = StopTrainingOnNoModelImprovement(max_no_improvement_evals=50)
    evaluation = EvalCallback(
        eval_env,
        eval_freq=10,
        n_eval_episodes=2,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path),
        callback_after_eval=stop,
        verbose=0,
    )
    checkpoint = CheckpointCallback(save_freq=10, save_path=str(tmp_path), save_vecnormalize=True)
    model.learn(128, [evaluation, checkpoint])
    names = set(os.listdir(tmp_path))
    assert {"best_model.zip", "evaluations.npz", "rl_model_20_steps.zip", "rl_model_vecnormalize_20_steps.pkl"} <= names
    assert list(np.load(tmp_path / "evaluations.npz")["timesteps"][:3]) == [20, 40, 60]
    model.learn(20, evaluation)  # 10 calls: it evaluates right after the last step
    np.testing.assert_array_equal(eval_env.obs_rms.mean.shape, env.obs_rms.mean.shape)
    loaded = GRPO.load(tmp_path / "rl_model_20_steps.zip", env=env)
    assert loaded.num_timesteps == 20


def test_57_eval_callback_syncs_and_does_not_change_training() -> None:
    """The run with an evaluation every 7 steps has the same weights as the run without."""

    def run(callbacks: list[BaseCallback]) -> tuple[th.Tensor, VecNormalize]:
        env = VecNormalize(make_vec_env("CartPole-v1", 2, seed=0))
        return parameters(grpo(env).learn(128, callbacks)), env

    eval_env = VecNormalize(make_vec_env("CartPole-v1", 1, seed=9), training=False)
    with_it, env = run([EvalCallback(eval_env, eval_freq=1, n_eval_episodes=1, verbose=0)])
    without, _ = run([])
    assert th.equal(with_it, without)
    np.testing.assert_array_equal(eval_env.obs_rms.mean, env.obs_rms.mean)


def test_57_callbacks_that_stop(tmp_path: pathlib.Path) -> None:
    model = grpo(Constant(8), n_steps=64).learn(10_000, StopTrainingOnMaxEpisodes(5))
    assert len(model.ep_info_buffer) in (4, 5)  # the last one is not in it: on_step comes first, as in SB3
    assert model.num_timesteps == 40
    evaluation = EvalCallback(
        Monitor(Constant(8)), callback_on_new_best=StopTrainingOnRewardThreshold(8), eval_freq=30, verbose=0
    )
    assert grpo(Constant(8), n_steps=64).learn(10_000, evaluation).num_timesteps == 30


def test_58_as_rl_zoo_uses_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rl_zoo3/exp_manager.py: ALGOS[name](env=…, tensorboard_log=…, seed=…, verbose=…, device=…, **hyperparams)."""
    pytest.importorskip("stable_baselines3")
    algos = {"grpo": GRPO}
    hyperparams = {
        "policy": "MlpPolicy",
        "n_steps": 32,
        "batch_size": 32,
        "learning_rate": FloatSchedule(SB3LinearSchedule(3e-4, 0, 1)),  # the zoo's "lin_3e-4" is such a class
        "policy_kwargs": eval("dict(net_arch=dict(pi=[8], vf=[8]), activation_fn=th.nn.ReLU)"),
    }
    env = VecNormalize(make_vec_env("CartPole-v1", 2, seed=0))
    model = algos["grpo"](
        env=env, tensorboard_log=str(tmp_path), seed=0, verbose=0, device="cpu", group_size=2, **hyperparams
    )
    model.learn(64, callback=[], log_interval=-1, progress_bar=False)
    model.save(f"{tmp_path}/CartPole-v1")
    model.get_vec_normalize_env().save(f"{tmp_path}/vecnormalize.pkl")
    # enjoy.py
    fresh = VecNormalize.load(f"{tmp_path}/vecnormalize.pkl", make_vec_env("CartPole-v1", 1, seed=0))
    fresh.training = fresh.norm_reward = False
    custom_objects = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    enjoyed = algos["grpo"].load(
        f"{tmp_path}/CartPole-v1.zip", custom_objects=custom_objects, device="cpu", seed=0, env=fresh
    )
    obs, state, starts = fresh.reset(), None, np.ones(1, bool)
    for _ in range(5):
        action, state = enjoyed.predict(obs, state=state, episode_start=starts, deterministic=True)
        obs, _, starts, _ = fresh.step(action)
    # train.py -i: hyperparameters override those of the file
    retrained = algos["grpo"].load(
        f"{tmp_path}/CartPole-v1.zip", env=env, seed=0, tensorboard_log=None, verbose=0, device="cpu", n_steps=16
    )
    assert retrained.learn(32).n_steps == 16


def test_59_public_names() -> None:
    for name in ("GRPO", "MlpPolicy", "CnnPolicy", "MultiInputPolicy", "make_group_env", "LinearSchedule"):
        assert name in dir(grpo_rl)
        assert getattr(grpo_rl, name).__name__ == name
    with pytest.raises(AttributeError, match="public names"):
        grpo_rl.PPO  # noqa: B018
    model = grpo().learn(64)
    names = "policy_aliases set_random_seed logger env n_envs action_space observation_space num_timesteps"
    for name in [*names.split(), "_n_updates", "lr_schedule", "rollout_buffer", "device", "seed", "policy_class"]:
        assert hasattr(model, name), name


def test_the_probes_are_gymnasium_envs() -> None:
    for env in (Bandit(), Walk(), Constant(), Unknown()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_env(env, skip_render_check=True)
