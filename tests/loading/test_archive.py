"""Agents' files: ordinary ones load without a word, code needs the user's word, damage is one line."""

import base64
import io
import json
import os
import pathlib
import pickle
import resource
import zipfile
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor
from stable_baselines3.common.vec_env import VecNormalize

from grpo_rl import GRPO, ConstantSchedule, LinearSchedule, PiecewiseSchedule
from grpo_rl.cli import main
from grpo_rl.errors import ConfigError, UntrustedError
from grpo_rl.lab.build import build_agent, build_env, load_agent, open_run
from grpo_rl.loading import inspect_zip
from grpo_rl.recipes import load_recipe, make_recipe
from tests.loading.test_pickles import SYSTEM, Call
from tests.probe_envs import Constant, Spaces, box, grpo


class Extractor(FlattenExtractor):
    """A user's own, in a module that can be imported."""


class Angle(spaces.Box):
    """A user's own space."""


Edit = Callable[[dict[str, Any], dict[str, bytes]], None]


def entry(value: Any) -> dict[str, str]:
    """`value` as SB3 writes an attribute that is no JSON; bytes are a pickle already."""
    data = value if isinstance(value, bytes) else cloudpickle.dumps(value)
    return {":type:": "<class 'object'>", ":serialized:": base64.b64encode(data).decode()}


def edited(path: pathlib.Path, edit: Edit, compression: int = zipfile.ZIP_STORED) -> pathlib.Path:
    """The zip with its attributes (a dict) and its other entries (name → bytes) changed by `edit`."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(files["data"])
    edit(data, files)
    if "data" in files:
        files["data"] = json.dumps(data).encode()
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trained") / "model.zip"
    grpo(Constant(8), group_kind="window").learn(64).save(path)
    return path.read_bytes()


@pytest.fixture
def saved(trained: bytes, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "model.zip"
    path.write_bytes(trained)
    return path


# --- what loads without a word ----------------------------------------------------------------------------------------


def normalized() -> VecNormalize:
    return VecNormalize(make_vec_env("CartPole-v1", 2))


IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
ORDINARY: dict[str, Callable[[], Any]] = {
    "mlp": grpo,
    "trained": lambda: grpo().learn(64),
    "Pendulum": lambda: grpo("Pendulum-v1", normalize_obs=True, normalize_reward=True, kl_coef=0.1).learn(64),
    "hybrid": lambda: grpo("Pendulum-v1", value_head=True, clip_range_vf=0.2, use_sde=True),
    "schedules": lambda: grpo(
        learning_rate=LinearSchedule(1e-3, 0), clip_range=PiecewiseSchedule([(0, 0.3), (1, 0.1)])
    ).learn(64),
    "constant": lambda: grpo(value_head=True, learning_rate=ConstantSchedule(1e-3), group_weight=LinearSchedule(1, 0)),
    "policy_kwargs": lambda: grpo(
        policy_kwargs={
            "net_arch": {"pi": [8], "vf": [4]},
            "activation_fn": th.nn.LeakyReLU,
            "optimizer_class": th.optim.RMSprop,
            "optimizer_kwargs": {"alpha": 0.99},
            "features_extractor_class": Extractor,
        }
    ),
    "own space": lambda: grpo(Spaces(Angle(-1, 1, (2,)), spaces.Discrete(2))),
    "VecNormalize": lambda: grpo(normalized()).learn(64),
    "dict": lambda: grpo(
        Spaces(spaces.Dict(a=box(2), b=spaces.Discrete(3)), spaces.MultiDiscrete([2, 3])),
        "MultiInputPolicy",
        policy_kwargs={"features_extractor_class": CombinedExtractor, "net_arch": [8]},
    ).learn(64),
    "image": lambda: grpo(Spaces(IMAGE, spaces.MultiBinary(2)), "CnnPolicy", n_steps=8, batch_size=8).learn(16),
    "discrete": lambda: grpo(Spaces(spaces.Discrete(3), box(2, low=-1, high=1))).learn(64),
    "PPO": lambda: PPO("MlpPolicy", "CartPole-v1", n_steps=64, n_epochs=1, device="cpu").learn(64),
    "A2C": lambda: A2C("MlpPolicy", "CartPole-v1", device="cpu").learn(8),
    "rollout buffer": lambda: PPO("MlpPolicy", "CartPole-v1", device="cpu", clip_range_vf=0.1),
}


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.filterwarnings("ignore")
def test_ordinary_agents_execute_nothing_and_load(name: str, tmp_path: pathlib.Path) -> None:
    model = ORDINARY[name]()
    model.action_space.seed(3)  # a space that has sampled holds a generator
    model.action_space.sample()
    model.observation_space.seed(3)
    model.save(tmp_path / "model")
    assert inspect_zip(tmp_path / "model").executes == {}
    if isinstance(model, GRPO):
        loaded = GRPO.load(tmp_path / "model", device="cpu")
        assert loaded.num_timesteps == model.num_timesteps
        assert type(loaded.policy) is type(model.policy)
        assert loaded.observation_space == model.observation_space


@pytest.mark.parametrize("form", ["str", "str without .zip", "Path", "BytesIO", "file"])
def test_every_form_of_path_and_streams_stay_open_where_they_were(form: str, saved: pathlib.Path) -> None:
    if form in ("BytesIO", "file"):
        with io.BytesIO(saved.read_bytes()) if form == "BytesIO" else open(saved, "rb") as stream:
            stream.seek(7)
            assert inspect_zip(stream).executes == {}
            assert GRPO.load(stream, device="cpu").num_timesteps == 64
            assert (stream.closed, stream.tell()) == (False, 7)
    else:
        path = {"str": str(saved), "str without .zip": str(saved)[:-4], "Path": saved}[form]
        assert GRPO.load(path, device="cpu").num_timesteps == 64
        assert inspect_zip(path).data["num_timesteps"] == 64


def test_no_file() -> None:
    with pytest.raises(FileNotFoundError):
        GRPO.load("nothing_here")
    with pytest.raises(TypeError, match="invalid type"):
        GRPO.load(3)  # type: ignore[arg-type]


# --- what needs the user's word ---------------------------------------------------------------------------------------


def fake_class() -> type:
    return type("Schedule", (), {"__module__": "__main__", "__call__": lambda self, progress: 1e-3})


BITS = b"\x80\x04cnumpy.random._pickle\n__generator_ctor\n"
UNTRUSTED: dict[str, tuple[Any, str]] = {
    "lambda": (lambda progress: 1e-3, "runs a function or a class whose code is in the file"),
    "class of a script": (fake_class()(), "runs a function or a class whose code is in the file"),
    "eval": (Call(eval, "1"), "calls builtins.eval('1')"),
    "getattr": (Call(getattr, 1, "real"), "calls builtins.getattr(1, 'real')"),
    "import": (Call(__import__, "antigravity"), "calls builtins.__import__('antigravity')"),
    "unimported": (b"cantigravity\nfly\n.", "imports antigravity.fly"),
    "torch.load": (th.zeros(2), "calls torch._utils._rebuild_tensor_v2"),
    "weights": (b"ctorch.storage\n_load_from_bytes\n(S'x'\ntR.", "calls torch.storage._load_from_bytes('x')"),
    "a layer made": (b"ctorch.nn.modules.linear\nLinear\n(I3\nI4\ntR.", "calls torch.nn.modules.linear.Linear(3, 4)"),
    "a class changed": (
        b"ctorch.nn.modules.activation\nReLU\n(N(dS'forward'\nI1\nstb.",
        "changes torch.nn.modules.act",
    ),
    "a module's attribute": (
        b"\x80\x04\x8c\x11grpo_rl.schedules\x8c\x09math.sqrt\x93.",
        "imports grpo_rl.schedules.math.sqrt",
    ),
    "a helper of ours": (b"cgrpo_rl.schedules\nparse_schedule\n.", "imports grpo_rl.schedules.parse_schedule"),
    "sys.path": (b"csys\npath\n(S'/tmp'\nla.", "imports sys.path"),
    "object dtype": (np.array([None]), "calls numpy.dtype('O8'"),
    "dtype with flags": (b"cnumpy\ndtype\n(S'f8'\nI00\nI01\ntR(I3\nS'|'\nNNNI-1\nI-1\nI63\ntb.", "changes numpy.dtype"),
    "large array": (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I9999999999\ntS'b'\ntR.",
        "_reconstruct",
    ),
    "constructor of bits": (BITS + b"(S'x'\ncbuiltins\nlist\ntR.", "calls numpy.random._pickle.__generator_ctor('x'"),
    "gymnasium.make": (b"cgymnasium\nmake\n(S'os:x'\ntR.", "calls gymnasium.make('os:x')"),
}


@pytest.mark.parametrize("name", UNTRUSTED)
def test_code_needs_the_users_word(name: str, saved: pathlib.Path) -> None:
    value, what = UNTRUSTED[name]
    edited(saved, lambda data, files: data.update(learning_rate=entry(value)))
    with pytest.raises(UntrustedError) as caught:
        GRPO.load(saved)
    message = str(caught.value)
    assert str(saved) in message
    assert 'entry "learning_rate" ' in message
    assert what in message
    assert "trust=True" in message
    assert 'custom_objects={"learning_rate": …}' in message
    assert "\n" not in message
    assert list(caught.value.executes) == ["learning_rate"] == list(inspect_zip(saved).executes)
    assert GRPO.load(saved, custom_objects={"learning_rate": 1e-3}, device="cpu").learning_rate == 1e-3


def test_a_payload_is_not_executed_without_and_is_with_the_users_word(saved: pathlib.Path) -> None:
    mark = saved.parent / "mark"
    edited(saved, lambda data, files: data.update(payload=entry(Call(os.system, f"touch {mark}"))))
    with pytest.raises(UntrustedError, match=r"posix\.system|nt\.system"):
        GRPO.load(saved)
    assert inspect_zip(saved).executes.keys() == {"payload"}
    GRPO.load(saved, custom_objects={"payload": None}, device="cpu")
    assert not mark.exists()
    GRPO.load(saved, trust=True, device="cpu")
    assert mark.exists()


def test_a_users_lambda_schedule(tmp_path: pathlib.Path) -> None:
    grpo(learning_rate=lambda progress: 1e-3 * progress).save(tmp_path / "model")
    with pytest.raises(UntrustedError, match=r'"learning_rate".*"lr_schedule".*LinearSchedule is saved by value'):
        GRPO.load(tmp_path / "model")
    assert GRPO.load(tmp_path / "model", trust=True, device="cpu").lr_schedule(0.5) == 5e-4
    zeros = {"learning_rate": 0.0, "lr_schedule": lambda progress: 0.0}
    assert GRPO.load(tmp_path / "model", custom_objects=zeros, device="cpu").learning_rate == 0


def test_an_env_in_the_file_is_not_made(saved: pathlib.Path) -> None:
    """SB3 takes a saved env where none is given, and a name like module:id imports the module."""
    edited(saved, lambda data, files: data.update(env="antigravity:Env-v0"))
    with pytest.raises(UntrustedError, match="entry \"env\" makes the environment 'antigravity:Env-v0'"):
        GRPO.load(saved)


def test_untrusted_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(UntrustedError("x would", {"x": ["calls y"]})))
    assert (str(error), error.executes) == ("x would", {"x": ["calls y"]})
    assert isinstance(error, pickle.UnpicklingError)


# --- what is damaged --------------------------------------------------------------------------------------------------


def nothing(data: dict[str, Any], files: dict[str, bytes]) -> None:
    pass


def pth(value: Any) -> bytes:
    stream = io.BytesIO()
    th.save(value, stream)
    return stream.getvalue()


def put(name: str, content: bytes) -> Edit:
    return lambda data, files: files.__setitem__(name, content)


def attribute(name: str, value: Any) -> Edit:
    return lambda data, files: data.__setitem__(name, value)


DAMAGED: dict[str, tuple[Edit, str]] = {
    "no data": (lambda data, files: files.pop("data"), 'holds no agent: a zip without the entry "data"'),
    "entry no base64": (attribute("learning_rate", {":serialized:": "a"}), 'entry "learning_rate" cannot be read'),
    "entry no text": (attribute("learning_rate", {":serialized:": 3}), 'entry "learning_rate" cannot be read'),
    "entry no pickle": (attribute("learning_rate", entry(b"hello")), 'entry "learning_rate" cannot be read'),
    "entry cut": (attribute("learning_rate", entry(pickle.dumps([1, 2])[:-3])), 'entry "learning_rate" cannot be read'),
    "weights gone": (lambda data, files: files.pop("policy.pth"), "do not match"),
    "weights empty": (put("policy.pth", b""), 'entry "policy.pth" holds something else than tensors'),
    "weights cut": (lambda data, files: files.update({"policy.pth": files["policy.pth"][:-99]}), 'entry "policy'),
    "weights of others": (put("policy.pth", pth({"a": th.zeros(2)})), "cannot be loaded as it is: RuntimeError"),
    "weights are code": (put("policy.pth", pth(Call(os.system, "false"))), f"unsupported GLOBAL {SYSTEM}"),
    "pickled weights": (
        put("policy.pth", pickle.dumps(Call(os.system, "false"))),
        'entry "policy.pth" holds something',
    ),
    "other weights": (put("strange.pth", pth({})), "strange is an invalid object name"),
    "path out": (put("../../evil.pth", pth({})), "'../../evil.pth' is no name"),
    "absolute path": (put("/tmp/evil.pth", pth({})), "'/tmp/evil.pth' is no name"),
    "no policy_class": (lambda data, files: data.pop("policy_class"), "policy_class"),
    "policy_kwargs": (attribute("policy_kwargs", 3), "cannot be loaded as it is: "),
    "no space": (lambda data, files: data.pop("observation_space"), "observation_space"),
    "space is a number": (attribute("observation_space", 3), "not a Gymnasium space"),
    "batch_size": (attribute("batch_size", "x"), "batch_size='x': expected a whole number"),
    "huge net": (attribute("policy_kwargs", {"net_arch": [10**12]}), "describes networks of"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.filterwarnings("ignore")
def test_damage_is_one_line(name: str, saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, what = DAMAGED[name]
    edited(saved, edit)
    before = sorted(saved.parent.rglob("*"))
    monkeypatch.chdir(saved.parent)
    with pytest.raises(ConfigError) as caught:
        GRPO.load(saved, device="cpu")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(saved.parent.rglob("*")) == before
    if name != "batch_size":
        assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is no zip-file"),
        (b"PK\x03\x04 not really", "is no zip-file"),
        (pickle.dumps([1]), "is no zip-file"),
    ],
)
def test_no_zip(content: bytes, what: str, saved: pathlib.Path) -> None:
    saved.write_bytes(content)
    for trust in (False, True):
        with pytest.raises(ConfigError, match=what):
            GRPO.load(saved, trust=trust)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 100_000, b'{"a": ' * 100_000, b"9" * 9999])
def test_data_that_is_no_json_object(text: bytes, saved: pathlib.Path) -> None:
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("data", text)
    with pytest.raises(ConfigError, match=r'is damaged|entry "data"|is no zip-file') as caught:
        GRPO.load(saved)
    assert len(str(caught.value)) < 600


def test_a_flipped_byte_of_the_weights_is_noticed(saved: pathlib.Path) -> None:
    content = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:
        start = archive.getinfo("policy.pth").header_offset
    content[start + 1000] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ConfigError, match=r'its entry "policy\.pth" is not what was written'):
        GRPO.load(saved)


def test_two_entries_of_one_name(saved: pathlib.Path) -> None:
    with zipfile.ZipFile(saved, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("data", "{}")
    with pytest.raises(ConfigError, match="two entries have one name"):
        GRPO.load(saved)


def test_a_zip_bomb_is_not_unpacked(saved: pathlib.Path) -> None:
    edited(saved, put("bomb.pth", bytes(200_000_000)), zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match=r"would unpack to 200,.*100 times"):
        GRPO.load(saved)


def test_sizes_that_are_claimed(saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_rl.loading.archive.MAX_BYTES", 10_000)
    with pytest.raises(ConfigError, match="more than 10,000 or"):
        GRPO.load(saved)


def test_sb3_itself_writes_nothing_for_names_that_lead_out(tmp_path: pathlib.Path) -> None:
    """It reads entries by name, in memory; and takes weights with `weights_only=True`."""
    path = tmp_path / "a" / "b" / "ppo.zip"
    PPO("MlpPolicy", "CartPole-v1", device="cpu").save(path)
    edited(path, put("../../evil.pth", pth({})))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="invalid object name"):
        PPO.load(path, device="cpu")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", [pth(Call(os.system, "touch mark")), pickle.dumps(Call(os.system, "touch mark"))])
def test_set_parameters_executes_nothing(content: bytes, saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the weights alone: a payload among the attributes is not touched, one among the weights is refused."""
    monkeypatch.chdir(saved.parent)
    model = grpo(Constant(8), group_kind="window")
    edited(saved, attribute("payload", entry(Call(os.system, "touch mark"))))
    model.set_parameters(str(saved))
    edited(saved, put("policy.pth", content))
    with pytest.raises(ConfigError, match=r'"policy\.pth" holds something else than tensors') as caught:
        model.set_parameters(str(saved))
    assert str(caught.value).startswith(str(saved)) and "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not (saved.parent / "mark").exists()


@pytest.mark.parametrize(
    "edit",
    [
        put("policy.pth", pth([1])),
        put("policy.pth", b"not torch's"),
        put("policy.pth", pth({"log_std": th.zeros(3)})),
        put("policy.optimizer.pth", pth({"state": 3})),
        lambda data, files: files.pop("policy.pth"),
        lambda data, files: files.pop("data"),
    ],
    ids=["a list", "junk", "other names", "no optimizer's", "no policy", "no data"],
)
def test_set_parameters_of_a_damaged_file_is_one_line(edit: Edit, saved: pathlib.Path) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(Constant(8), group_kind="window").set_parameters(str(edited(saved, edit)))
    assert str(saved) in str(caught.value) and "\n" not in str(caught.value)


def test_torch_says_nothing_of_its_own_about_a_file(saved: pathlib.Path, recwarn: pytest.WarningsRecorder) -> None:
    """A pickle of another protocol among the weights: torch would warn, with a line of its source."""
    edited(saved, put("policy.pth", pickle.dumps(Call(os.system, "touch mark"), protocol=4)))
    with pytest.raises(ConfigError):
        GRPO.load(saved, device="cpu")
    assert not [warning for warning in recwarn if "torch" in str(warning.filename)]


HUGE: dict[str, Edit] = {
    "layers": attribute("policy_kwargs", {"net_arch": [20_000, 20_000]}),
    "many layers": attribute("policy_kwargs", {"net_arch": [500] * 2000}),
    "heads": attribute("policy_kwargs", {"net_arch": {"pi": [30_000, 30_000], "vf": []}}),
    "in a pickle": attribute("policy_kwargs", entry({"net_arch": [30_000, 30_000], "activation_fn": th.nn.ReLU})),
    "actions": attribute("action_space", entry(spaces.Discrete(50_000_000))),
    "observations": attribute("observation_space", entry(spaces.Discrete(50_000_000))),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_network_that_the_file_cannot_hold_is_not_built(name: str, saved: pathlib.Path) -> None:
    edited(saved, HUGE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"describes networks of [\d,]+ bytes or more, but holds [\d,]+ bytes"):
        GRPO.load(saved, device="cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 500_000, "less than 500 MB"


def test_a_large_network_of_its_own_loads(saved: pathlib.Path) -> None:
    model = grpo(Constant(8), group_kind="window", policy_kwargs={"net_arch": [3000, 3000]})
    model.save(saved)
    assert GRPO.load(saved, device="cpu").policy_kwargs == {"net_arch": [3000, 3000]}


# --- files of other algorithms ----------------------------------------------------------------------------------------


def test_an_agent_of_ppo_goes_on_as_the_hybrid(tmp_path: pathlib.Path) -> None:
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0, device="cpu").learn(64)
    model.save(tmp_path / "ppo")
    with pytest.raises(ConfigError, match=r"saved by SB3's PPO or one of its kind.*value_head=True"):
        GRPO.load(tmp_path / "ppo")
    loaded = GRPO.load(
        tmp_path / "ppo", env=make_vec_env("CartPole-v1", 2), value_head=True, group_size=2, n_steps=32, device="cpu"
    )
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])
    assert loaded.learn(64, reset_num_timesteps=False).num_timesteps == 128


def test_an_agent_of_an_off_policy_algorithm(tmp_path: pathlib.Path) -> None:
    DQN("MlpPolicy", "CartPole-v1", device="cpu").save(tmp_path / "dqn")
    with pytest.raises(ConfigError, match="was not saved by GRPO"):
        GRPO.load(tmp_path / "dqn", custom_objects={"train_freq": None})


# --- a run's folder ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run of cartpole, untrained, whose model.zip makes a file when its payload is executed."""
    recipe = load_recipe("cartpole", ["training.episodes=1"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    env = build_env(recipe)
    build_agent(recipe, env).save(folder / "model.zip")
    env.close()
    edited(folder / "model.zip", attribute("payload", entry(Call(os.system, f"touch {tmp_path}/mark"))))
    return folder


def test_the_command_line_asks_for_the_users_word(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'grpo-rl: {run}/model.zip was not loaded, for it would execute code: entry "payload"')
    assert error.endswith("On this command line: --trust.\n")
    assert main(["play", str(run), "--gif", str(run / "x.gif")]) == 2
    assert not (run.parent / "mark").exists()
    assert main(["evaluate", str(run), "--trust"]) == 0
    assert (run.parent / "mark").exists()


def test_code_that_a_recipe_names_never_comes_from_the_agents_file(run: pathlib.Path) -> None:
    """policy_class and policy_kwargs are the recipe's; those of the file are not read."""
    edited(run / "model.zip", lambda data, files: data.pop("payload"))
    code = entry(Call(os.system, f"touch {run.parent}/mark"))
    edited(run / "model.zip", attribute("policy_kwargs", code))
    recipe, agent = open_run(run)
    assert agent.policy_kwargs == {key: value for key, value in recipe.model.items() if key != "policy"}
    assert not (run.parent / "mark").exists()
    own = load_recipe("gated", ["training.steps=64"])
    env = build_env(own)
    build_agent(own, env).save(run / "gated.zip")
    env.close()
    edited(run / "gated.zip", attribute("policy_kwargs", code))
    assert load_agent(own, run / "gated.zip").policy_kwargs["features_extractor_class"].__name__ == "GatedExtractor"
    assert not (run.parent / "mark").exists()


def test_sb3s_own_algorithms_in_a_run_are_checked_too(run: pathlib.Path) -> None:
    recipe = make_recipe({"class": "stable_baselines3:PPO", "environment": {"id": "CartPole-v1"}}, "x")
    PPO("MlpPolicy", "CartPole-v1", device="cpu", clip_range=lambda progress: 0.2).save(run / "ppo.zip")
    with pytest.raises(UntrustedError, match='entry "clip_range" runs a function'):
        load_agent(recipe, run / "ppo.zip")
    assert type(load_agent(recipe, run / "ppo.zip", trust=True)) is PPO
