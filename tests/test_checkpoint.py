"""A run that was stopped and goes on is the run that was never stopped, to the bit; its file is whole or refused."""

import copy
import decimal
import json
import pickle
import random

import gymnasium as gym
import numpy as np
import pytest
import safetensors.numpy
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from grpo_rl import GRPO, LinearSchedule, checkpoint, make_group_env
from grpo_rl.checkpoint import CheckpointEvery, load_checkpoint, read_file, resume, save_checkpoint, write_file
from grpo_rl.curriculum import AdaptiveDifficulty, Curriculum
from grpo_rl.errors import ConfigError
from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.recipes import load_recipe

SHORT = {"seed": 3, "n_epochs": 2, "batch_size": 32}


class Stopped(Exception):
    pass


class StopAfter(CheckpointEvery):
    """Saves before rollout `rollouts` + 1 and stops there, as a power cut would."""

    def __init__(self, path, rollouts):
        super().__init__(path, seconds=None)
        self.left = rollouts

    def _on_rollout_start(self):
        if self.left == 0:
            assert self.save()
            raise Stopped
        self.left -= 1


def everything(model):
    """All that two equal runs have in common after their last step, times apart."""
    parts = {"parameters": model.get_parameters()}
    names = (
        "num_timesteps _n_updates _iterations kl_scale _baseline_table _forks _fork_depths curriculum_state _last_obs"
    )
    parts["attributes"] = {name: getattr(model, name, None) for name in names.split()}
    parts["episodes"] = [{key: episode[key] for key in ("r", "l")} for episode in model.ep_info_buffer]
    if hasattr(model, "_logger"):
        parts["log"] = {key: value for key, value in model.logger.name_to_value.items() if "time/" not in key}
    parts["random"] = [random.getstate(), np.random.get_state(), th.get_rng_state()]
    if model._vec_normalize_env is not None:
        normalizer = model._vec_normalize_env
        parts["normalizer"] = [vars(normalizer.obs_rms), vars(normalizer.ret_rms), normalizer.returns]
    if hasattr(model, "reward_scale"):
        parts["reward_scale"] = model.reward_scale.state_dict()
    return [(str(path), _bits(leaf)) for path, leaf in th.utils._pytree.tree_flatten_with_path(parts)[0]]


def _bits(leaf):
    return np.asarray(leaf).tobytes() if isinstance(leaf, np.ndarray | np.generic | th.Tensor) else repr(leaf)


def hopper(**settings):
    return lambda: GRPO("MlpPolicy", "Hopper-v5", **{"n_steps": 48, "group_size": 4} | SHORT | settings)


def cartpole(make=lambda: "CartPole-v1", **settings):
    return lambda: GRPO("MlpPolicy", make(), **{"n_steps": 32, "group_size": 4} | SHORT | settings)


def curriculum_env():
    def make():
        dial = AdaptiveDifficulty(0.0, 5.0, step=0.5, window=3, raise_above=0.3, lower_below=0.1, success_return=20.0)
        env = gym.make("CartPole-v1", max_episode_steps=25)
        return Curriculum(env, dial, apply=lambda env, difficulty: setattr(env.unwrapped, "force_mag", 10 - difficulty))

    return make_group_env(make, n_groups=1, group_size=4, seed=3)


def reach():
    """A robot with a state of its own class and a curriculum, from its recipe."""
    recipe = load_recipe("reach", ["optimization.n_steps=32", "optimization.n_epochs=2"])
    return build_agent(recipe, build_env(recipe))


MODELS = {
    "episodes": cartpole(),
    "episodes, moving average": cartpole(baseline="moving_average", baseline_every=2),
    "hybrid, normalised, schedules": hopper(
        value_head=True,
        normalize_obs=True,
        normalize_reward=True,
        learning_rate=LinearSchedule(1e-3, 0.0),
        clip_range=LinearSchedule(0.3, 0.1),
    ),
    "regression": hopper(baseline="regression", normalize_obs=True, normalize_reward=True, fork_prob=0.5),
    "old rollouts, priorities": hopper(
        value_head=True,
        normalize_obs=True,
        normalize_reward=True,
        fork_prob=0.5,
        reuse=3,
        priority=0.5,
        priority_beta=LinearSchedule(0.4, 1.0),
    ),
    "old rollouts, episodes": cartpole(reuse=2),
    "old rollouts, regression": hopper(baseline="regression", reuse=3, kl_coef=0.1, reference_every=2),
    "windows, fresh starts": hopper(reset_prob=0.5, fork_prob=0.5),
    "reference policy": hopper(kl_coef=0.1, reference_every=2),
    "trust region": hopper(trust_region="learning_rate", target_kl=0.001),
    "cold start": hopper(value_head=True, cold_start=300, cold_start_ramp=300),
    "gSDE": hopper(value_head=True, use_sde=True, sde_sample_freq=8),
    "curriculum": cartpole(curriculum_env),
    "recipe reach": reach,
    "VecNormalize": cartpole(
        lambda: VecNormalize(make_group_env("Pendulum-v1", 2, 3, seed=3)), group_size=3, group_kind="window"
    ),
    "VecFrameStack": cartpole(
        lambda: VecFrameStack(make_group_env("Pendulum-v1", 1, 4, seed=3), 2), group_kind="window"
    ),
    "seeded groups": cartpole(lambda: make_vec_env("CartPole-v1", 4, seed=3), grouping="seed"),
    "batch groups": cartpole(lambda: make_vec_env("CartPole-v1", 4, seed=3), grouping="batch"),
    "own envs": cartpole(lambda: make_vec_env("CartPole-v1", 4, seed=3), grouping="fork"),
    "SB3's PPO": lambda: PPO("MlpPolicy", VecNormalize(make_vec_env("Hopper-v5", 2, seed=3)), n_steps=64, **SHORT),
}


def stop_and_go(build, path, total, rollouts, disturb=True):
    """What an uninterrupted run ends with, and one that stopped after so many rollouts."""
    whole = build()
    expected = everything(whole.learn(total))
    whole.env.close()
    stopped = build()
    with pytest.raises(Stopped):
        stopped.learn(total, callback=StopAfter(path, rollouts))
    assert 0 < stopped.num_timesteps < whole.num_timesteps
    stopped.env.close()
    fresh = build()
    if disturb:
        for noise in (random.random, np.random.random, lambda: th.rand(1)):
            noise()
    return expected, everything(resume(fresh, path)), fresh


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(name, tmp_path):
    expected, got, fresh = stop_and_go(MODELS[name], tmp_path / "x", 900, rollouts=3)
    fresh.env.close()
    assert got == expected


def test_groups_in_worker_processes(tmp_path):
    def build():
        env = make_group_env("Hopper-v5", n_groups=2, group_size=2, seed=3, vec_env_cls=SubprocVecEnv)
        return GRPO("MlpPolicy", env, n_steps=48, group_size=2, **SHORT)

    expected, got, fresh = stop_and_go(build, tmp_path / "x", 500, rollouts=1)
    fresh.env.close()
    assert got == expected


def test_load_and_learn_by_hand(tmp_path):
    """Between two calls of learn; `total` of SB3 counts from here."""
    expected = everything(cartpole()().learn(800))
    first = cartpole()().learn(400)  # another total, but no setting here depends on progress
    save_checkpoint(first, tmp_path / "x")
    second = cartpole()()
    load_checkpoint(second, tmp_path / "x")
    assert second.num_timesteps == first.num_timesteps
    got = everything(second.learn(800 - second.num_timesteps, reset_num_timesteps=False))
    assert [part for part in got if "'log'" not in part[0]] == [part for part in expected if "'log'" not in part[0]]


class Opaque(gym.Env):
    """Nobody can copy it, and it starts differently each time."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.generator, self.t = (i for i in range(9)), 0
        return self.np_random.random(2).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        return self.np_random.random(2).astype(np.float32), float(action), self.t == 9, False, {}


def test_what_cannot_be_kept_is_said_and_the_rest_goes_on(tmp_path):
    def build():
        env = VecNormalize(DummyVecEnv([Opaque] * 4))
        return GRPO("MlpPolicy", env, n_steps=32, group_size=4, grouping="batch", group_kind="window", **SHORT)

    first = build().learn(300)
    save_checkpoint(first, tmp_path / "x")
    second = build()
    with pytest.warns(UserWarning, match="goes on from a seeded reset, not bit for bit: .*Opaque"):
        resume(second, tmp_path / "x", total_timesteps=first.num_timesteps + 1)
    assert second.num_timesteps == first.num_timesteps + 128, "one more rollout"
    third = build()
    said = []
    load_checkpoint(third, tmp_path / "x", said.append)
    assert len(said) == 1
    assert everything(third)[:12] == everything(first)[:12], "the policy"
    assert vars(third.env.obs_rms)["count"] == vars(first.env.obs_rms)["count"]


def test_a_state_of_ones_own_is_kept_or_said(tmp_path):
    class Mine(GRPO):
        def _setup_model(self):
            super()._setup_model()
            self.seen, self.odd = {"a": [0]}, object()

    first, second, said = Mine("MlpPolicy", "CartPole-v1", n_steps=32), Mine("MlpPolicy", "CartPole-v1", n_steps=32), []
    first.learn(100)
    first.seen["a"].append(7)
    save_checkpoint(first, tmp_path / "x")
    load_checkpoint(second, tmp_path / "x", said.append)
    assert second.seen == {"a": [0, 7]}
    assert said == ["odd of Mine is not in the checkpoint (the state is a builtins.object): set it again"]


# ---------------------------------------------------------------------------------------------------------------- when


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path):
    saved = []

    class Noting(CheckpointEvery):
        def save(self):
            saved.append(self.model.num_timesteps)
            return super().save()

    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=10, group_size=4, group_kind="window", value_head=True, n_epochs=1)
    model.learn(400, callback=Noting(tmp_path / "x", steps=100, seconds=None))
    # A rollout is 10 steps of 4 envs; 100 steps after the last checkpoint is at the third rollout, 120 steps on.
    assert saved == [0, 120, 240, 360, 400]
    assert checkpoint.checkpoint_steps(tmp_path / "x") == 400
    assert [path.name for path in tmp_path.iterdir()] == ["x"], "no draft is left"


class StopAt(BaseCallback):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def _on_step(self):
        return self.num_timesteps < self.steps


@pytest.mark.parametrize("last", [False, True])
def test_a_stop_in_the_middle_of_a_rollout_keeps_the_checkpoint_before_it(last, tmp_path):
    def build():
        return hopper(group_kind="window", value_head=True)()

    expected = everything(build().learn(900))  # rollouts of 48 · 4 = 192 steps: up to 960
    stopped, every = build(), CheckpointEvery(tmp_path / "x", steps=1, seconds=None)
    stop = StopAt(500)  # the third rollout goes from 384 to 576
    stopped.learn(900, callback=[stop, every] if last else [every, stop])
    assert stopped.num_timesteps == 500
    assert every.saved_steps == checkpoint.checkpoint_steps(tmp_path / "x") == 384
    assert everything(resume(build(), tmp_path / "x")) == expected


def test_a_stop_in_the_first_rollout_leaves_a_checkpoint_all_the_same(tmp_path):
    hopper()().learn(900, callback=[StopAt(20), CheckpointEvery(tmp_path / "x", seconds=None)])
    assert checkpoint.checkpoint_steps(tmp_path / "x") == 0, "that of the start"


class Dice(gym.Env):
    """Its rewards come from generators of Python, torch and NumPy, its observations from a space; `odd` has no form."""

    def __init__(self, odd=False):
        self.observation_space, self.action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
        self.odd = odd

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31))
        self.r, self.r2, self.t = random.Random(number), th.Generator().manual_seed(number), 0
        self.r3 = np.random.RandomState(number)
        self.r.gauss(0, 1), self.r3.standard_normal()  # the second of a pair is kept
        if self.odd:
            self.r4 = decimal.Decimal(number)
        self.observation_space.seed(number)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        reward = float(action) * (
            self.r.gauss(0, 1) + float(th.rand((), generator=self.r2)) + self.r3.standard_normal()
        )
        return self.observation_space.sample(), reward, self.t == 9, False, {}


class OwnDice(Dice):
    """All of it is its snapshot, spaces included."""

    def get_snapshot(self):
        return copy.deepcopy(self.__dict__)

    def set_snapshot(self, state):
        self.__dict__.update(copy.deepcopy(state))


@pytest.mark.parametrize("env", [Dice, OwnDice])
def test_generators_and_spaces_of_an_env_of_ones_own(env, tmp_path):
    build = cartpole(lambda: make_group_env(env, 1, 4, seed=3), group_kind="window")
    expected, got, fresh = stop_and_go(build, tmp_path / "x", 600, rollouts=2)
    assert any("'log'" in name for name, _ in got)
    assert got == expected
    said = []
    load_checkpoint(fresh, tmp_path / "x", said.append)
    assert said == []


@pytest.mark.parametrize(("env", "where"), [(Dice, "Dice.r4"), (OwnDice, "the snapshot of OwnDice.r4")])
def test_what_has_no_form_is_named_as_its_author_knows_it(env, where, tmp_path):
    build, said = cartpole(lambda: make_group_env(lambda: env(odd=True), 1, 4, seed=3), group_kind="window"), []
    save_checkpoint(build().learn(1), tmp_path / "x")
    load_checkpoint(build(), tmp_path / "x", said.append)
    assert said == [
        f"the run goes on from a seeded reset, not bit for bit: {where} is a decimal.Decimal, which a"
        " checkpoint cannot hold: keep numbers, text, arrays and generators instead, or give the env get_snapshot() and"
        " set_snapshot(state) with these"
    ]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
def test_a_full_disk_leaves_the_last_checkpoint_and_the_training(share, tmp_path, monkeypatch):
    said, full = [], False
    blob = safetensors.numpy.save

    class Disk:
        """A file on a disk that is full after a share of what is written; at 1.0 it is full when it is flushed."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.file.write(data[: int(share * len(data))])
            if share < 1:
                raise OSError(28, "No space left on device")

        def flush(self):
            raise OSError(28, "No space left on device")

    opened = type(tmp_path).open
    monkeypatch.setattr(
        type(tmp_path),
        "open",
        lambda path, *a, **k: Disk(opened(path, *a, **k)) if full and "tmp" in path.name else opened(path, *a, **k),
    )
    model = cartpole()()
    model.learn(100, callback=CheckpointEvery(tmp_path / "x"))
    before, full = (tmp_path / "x").read_bytes(), True
    model.learn(200, callback=CheckpointEvery(tmp_path / "x", seconds=0.0, say=said.append), reset_num_timesteps=False)
    assert said and all("No space left on device" in line and "there is none yet" in line for line in said)
    assert (tmp_path / "x").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert blob is safetensors.numpy.save


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and a model that it fits."""
    model = cartpole()().learn(200)
    path = tmp_path_factory.mktemp("saved") / "x"
    save_checkpoint(model, path)
    return path, model


def refused(model, path, match="checkpoint|damaged"):
    files = sorted(path.parent.iterdir())
    with pytest.raises(ConfigError, match=match) as error:
        load_checkpoint(model, path)
    assert len(str(error.value).splitlines()) == 1
    assert str(path) in str(error.value)
    assert sorted(path.parent.iterdir()) == files, "nothing was written"


def test_cut_and_flipped_files_are_refused(saved, tmp_path):
    path, model = saved
    blob = path.read_bytes()
    rng = np.random.default_rng(0)
    for part in range(20):
        (tmp_path / "cut").write_bytes(blob[: len(blob) * part // 20])
        refused(model, tmp_path / "cut")
    for bit in rng.integers(8 * len(blob), size=60).tolist() + list(range(0, 64)):
        hurt = bytearray(blob)
        hurt[bit // 8] ^= 1 << bit % 8
        (tmp_path / "flipped").write_bytes(hurt)
        refused(model, tmp_path / "flipped")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a checkpoint has executed code')",)


def test_other_files_are_refused(saved, tmp_path):
    model = saved[1]
    arrays = {"0": np.zeros(3)}
    others = {
        "nothing": b"",
        "pickle": pickle.dumps(Bomb()),
        "zip": b"PK\3\4" + bytes(100),
        "huge header": (2**62).to_bytes(8, "little") + b"{}",
        "huge array": _safetensors({"0": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}}, b""),
        "overflow": _safetensors({"0": {"dtype": "F64", "shape": [2**33, 2**33], "data_offsets": [0, 8]}}, bytes(8)),
        "beyond": _safetensors({"0": {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]}}, bytes(8)),
        "no metadata": safetensors.numpy.save(arrays),
        "another format": safetensors.numpy.save(arrays, {"format": "grpo_rl checkpoint 99", "state": "{}"}),
        "no digest": safetensors.numpy.save(arrays, {"format": checkpoint.FORMAT, "state": "{}"}),
        "no state": safetensors.numpy.save(arrays, {"format": checkpoint.FORMAT}),
    }
    for name, blob in others.items():
        (tmp_path / name).write_bytes(blob)
        refused(model, tmp_path / name)
    (tmp_path / "folder").mkdir()
    refused(model, tmp_path / "folder")
    refused(model, tmp_path / "missing")


def _safetensors(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_file_with_a_right_digest_and_wrong_things_in_it_is_refused(saved, tmp_path):
    """Each value of the tree in turn is replaced: a hostile file may have a digest of its own."""
    path, model = saved
    text, arrays = read_file(path)
    tree = json.loads(text)
    places = [(tree, key) for key in tree] + [(tree["attributes"], key) for key in tree["attributes"]]
    places += [(tree["settings"], "class"), (tree["sampler"], "group"), (tree["env"], "env"), (tree["random"], "numpy")]
    hostile = ["../../x", {"$handle": "os:system"}, {"$plain": "subprocess:Popen", "attributes": []}]
    kept = {name: value for name, value in vars(model).items() if not name.startswith("__")}
    for owner, key in places:
        before = owner[key]
        for value in hostile:
            owner[key] = value
            write_file(tmp_path / "x", json.dumps(tree), arrays)
            if key != "reason" and getattr(model, key, ...) is not None:  # a text; nothing to check
                refused(model, tmp_path / "x", match=".")
            vars(model).update(kept)
        owner[key] = before
    tree["attributes"]["env"] = None
    write_file(tmp_path / "x", json.dumps(tree), arrays)
    refused(model, tmp_path / "x", match="holds env, which GRPO does not have")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (cartpole(group_size=5), "number of envs is 4, here it is 5"),
        (hopper(), "observation space is Box.*, here it is Box"),
        (cartpole(group_kind="window"), "kind of groups is episode, by fork, here it is window, by fork"),
        (cartpole(policy_kwargs={"net_arch": [5]}), "was it built as then. RuntimeError: .*size mismatch"),
        (cartpole(value_head=True, group_kind="episode"), "does not fit this GRPO"),
        (lambda: PPO("MlpPolicy", make_vec_env("CartPole-v1", 4), n_steps=32), "class is GRPO, here it is PPO"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_of_another_model_is_refused(saved, build, message):
    refused(build(), saved[0], message)
