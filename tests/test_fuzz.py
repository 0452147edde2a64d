"""Recipes, files and environments that nobody wrote with care: each gets a clear error, none hangs or writes.

`tests/fuzz/targets.py` says what must hold, and runs the same under a coverage-guided fuzzer; inputs that it has found
are in FOUND.
"""

import base64
import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv

from grpo_rl import GRPO
from grpo_rl.checkpoint import write_file
from grpo_rl.codec import decode, encode
from grpo_rl.errors import ConfigError, GRPOError
from grpo_rl.groups.make import make_group_env
from grpo_rl.lab.run import train_run
from grpo_rl.recipes import Recipe, load_recipe, names, parameters, shipped
from tests.fuzz import targets
from tests.loading.test_archive import edited, entry
from tests.loading.test_pickles import nested
from tests.probe_envs import Constant, Probe, box, grpo

pytestmark = pytest.mark.filterwarnings("ignore")


def fuzz(examples: int) -> Callable[[Any], Any]:
    """So many inputs, the same in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# --- recipes ----------------------------------------------------------------------------------------------------------

BILLION_LAUGHS = "a0: &a0 [lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
MERGED_LAUGHS = "a0: &a0 {b: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 20))
ENV = "environment: {id: CartPole-v1}\n"
FOUND = [
    BILLION_LAUGHS,
    MERGED_LAUGHS,
    "a: " + "[" * 90_000,
    "a: " + "{b: " * 60 + "}" * 60,
    "a: [" + "x, " * 12_000 + "]",
    "a: " + "x" * 300_000,
    "training: &a {steps: *a}",
    "training: &a [*a]",
    "training: {<<: &a {<<: *a}}",
    "training: {steps: .inf}",
    "training: {steps: .nan}",
    "training: {steps: 1e400}",
    f"training: {{seed: {10**22}}}\n{ENV}",
    "training: {seed: -1}\n" + ENV,
    "training: {seed: 1e300}\n" + ENV,
    "description: 2001-99-99",
    "training: {steps: 0x_}",
    "training: {steps: " + "9" * 5000 + "}",
    "optimization: {learning_rate: " + "9" * 400 + "}\n" + ENV,
    "optimization: {clip_range: {points: [[a, b]]}}\n" + ENV,
    'training: {"a\\nb": 1}',
    'environment: {id: "a\\nb"}',
    "training: {5: 1}",
    "? [1, 2]\n: 3",
    "description: " + "x" * 100_000 + "\ntraining: [" + "y" * 100_000 + "]",
    "x: !!python/object/apply:os.system ['touch mark']",
    "environment: {id: CartPole-v1, wrappers: [5]}",
    "environment: {id: CartPole-v1, wrappers: [{a: 1}]}",
    "environment: {id: CartPole-v1, kwargs: {a: '3e-4', b: '1.5', c: '1_0.e+3'}}",
    "environment: ../../../../../etc/passwd",
    "name: ../../x\n" + ENV,
    "name: {a: 1}\n" + ENV,
    "\x00",
    "=",
]


@pytest.mark.parametrize("text", FOUND, ids=range(len(FOUND)))
def test_recipes_that_were_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    targets.recipe(text.encode())
    assert not list(tmp_path.iterdir())


def test_a_recipe_says_what_is_too_much(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for text, message in {
        BILLION_LAUGHS: "its aliases (*name) counted in, it holds more than 10,000 values",
        MERGED_LAUGHS: "its aliases (*name) counted in, it holds more than 10,000 values",
        "training: &a {steps: *a}": "an alias (*name) within what it stands for",
        "a: " + "[" * 90_000: "nested deeper than settings are (50)",
        "a: " + "{b: " * 60 + "}" * 60: "nested deeper than settings are (50)",
        "a: " + "x" * 300_000: "300,003 characters are more than settings take (100,000)",
        "training: {steps: .inf}": "training.steps: expected int, got inf",
        "description: 2001-99-99": "not valid YAML: month must be in 1..12",
        "training: {seed: -1}\n" + ENV: "training.seed: expected 0 to 2147483647, got -1",
        "name: ../../x\n" + ENV: "name: expected up to 100 characters that a folder may have in its name, not / ",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_recipe(path)
        assert message in str(caught.value)


texts = st.text(st.characters(codec="utf-8"), max_size=30)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), texts, st.just(10**400), st.dates(), st.binary(max_size=5)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3), max_leaves=8
)


@fuzz(120)
@given(st.text(st.characters(codec="utf-8") | st.sampled_from("{}[]&*!|>:-?#,'\"\n \t%@`"), max_size=80))
@example("&a [&b *a]")
def test_any_text_as_a_recipe(text: str) -> None:
    targets.recipe(text.encode())


@cache
def shipped_texts() -> list[bytes]:
    return [(shipped() / "agents" / f"{name}.yaml").read_bytes() for name in names()]


@fuzz(80)
@given(st.data())
def test_shipped_recipes_with_bytes_changed(data: st.DataObject) -> None:
    targets.recipe(mutated(data, data.draw(st.sampled_from(shipped_texts()))))


@fuzz(100)
@given(st.data())
def test_shipped_recipes_with_values_changed(data: st.DataObject) -> None:
    recipe = yaml.safe_load(data.draw(st.sampled_from(shipped_texts())))
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from([None, *recipe]))
        place = recipe[section] if isinstance(recipe.get(section), dict) else recipe
        known = [*parameters(GRPO)] if section == "optimization" else [*map(str, place)]
        key = data.draw(st.sampled_from([*known, "name", "x"]) | scalars)
        place[key] = data.draw(values)
    targets.recipe(yaml.safe_dump(recipe, allow_unicode=True).encode())


@fuzz(100)
@given(
    st.sampled_from(["training", "environment", "model", "optimization", "resources", ""]),
    st.sampled_from([".", ".steps", ".kwargs.x", ".learning_rate", ".net_arch", "..", ".policy", ".n_groups"]) | texts,
    texts | values.map(repr),
)
def test_overrides(section: str, key: str, value: str) -> None:
    targets.override(f"{section}{key}={value}".encode())


@pytest.mark.parametrize("name", ["../../x", "a/b", "/tmp/x", "..\\x", "a\0b", "a\nb", "", "x" * 300, "C:x"])
def test_a_run_is_made_in_its_folder_or_not_at_all(name: str, tmp_path: Path) -> None:
    recipe = load_recipe("cartpole", ["training.steps=64"])
    inside = tmp_path / "a" / "b" / "runs"
    hostile = Recipe(**(vars(recipe) | {"name": name}))
    with pytest.raises(ConfigError, match="name: expected"):
        train_run(hostile, inside, say=lambda line: None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# --- files ------------------------------------------------------------------------------------------------------------


def mutated(data: st.DataObject, content: bytes) -> bytes:
    """`content` with bytes flipped, cut, put in, or put twice; as many as three changes."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(changed) - 1, 0)))
        kind = data.draw(st.sampled_from(["flip", "flip", "cut", "insert", "remove", "twice", "number"]))
        if kind == "flip" and changed:
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del changed[at:]
        elif kind == "insert":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif kind == "remove":
            del changed[at : at + data.draw(st.integers(1, 64))]
        elif kind == "twice":
            changed[at:at] = changed[at : at + data.draw(st.integers(1, 64))]
        elif kind == "number":
            changed[at : at + 4] = struct.pack("<I", data.draw(st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1])))
    return bytes(changed)


@cache
def agent() -> bytes:
    stream = io.BytesIO()
    grpo(Constant(8), group_kind="window").save(stream)
    return stream.getvalue()


@fuzz(50)
@given(st.data())
def test_an_agents_file_with_bytes_changed(data: st.DataObject) -> None:
    targets.archive(mutated(data, agent()))


@fuzz(40)
@given(st.data())
def test_an_agents_file_with_attributes_changed(data: st.DataObject) -> None:
    """The archive is whole, so that it is SB3 and the agent who meet what is in it."""
    key = data.draw(st.sampled_from(sorted(json.loads(zipfile.ZipFile(io.BytesIO(agent())).read("data")))) | texts)
    value = data.draw(
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | texts, st.lists, max_leaves=4)
        | values.map(entry)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.zip"
        path.write_bytes(agent())
        targets.archive(edited(path, lambda attributes, files: attributes.update({key: value})).read_bytes())


PICKLES = [b"cposix\nsystem\n(S'x'\ntR.", b"(S'x'\niposix\nsystem\n.", b"\x80\x04" + b"}" + nested(40) + b"Ns."]


@fuzz(200)
@given(st.data())
def test_pickles_with_bytes_changed(data: st.DataObject) -> None:
    attributes = json.loads(zipfile.ZipFile(io.BytesIO(agent())).read("data"))

    pickles = [base64.b64decode(item[":serialized:"]) for item in attributes.values() if ":serialized:" in str(item)]
    targets.pickled(mutated(data, data.draw(st.sampled_from([*pickles, *PICKLES]))))


@cache
def state() -> tuple[str, dict[str, np.ndarray]]:
    return encode(
        {
            "a": [1, 2.5, None, "x", b"yz", (1, 2), {3}, {4: "v"}],
            "array": np.arange(6.0).reshape(2, 3),
            "bytes": np.zeros(3, "S2"),
            "rng": np.random.default_rng(0),
            "number": np.float32(2),
        }
    )


@fuzz(200)
@given(st.data())
def test_a_checkpoints_state_with_characters_changed(data: st.DataObject) -> None:
    text, arrays = state()
    targets.checkpoint(mutated(data, text.encode()) + b"\0" + arrays["0"].tobytes())


FOUND_STATES = [
    '{"$tensor":"1","shape":[3],"bfloat16":false}',
    '{"$scalar":"1","type":",f8","shape":[]}',
    '{"$plain":"a\\nb","attributes":[]}',
]


@pytest.mark.parametrize("text", FOUND_STATES)
def test_states_that_were_found(text: str) -> None:
    targets.checkpoint(text.encode())


@pytest.mark.parametrize("place", [-1, 625, 10**9])
def test_a_place_beyond_a_generators_numbers_is_refused(place: int) -> None:
    """NumPy takes it, and the next random number ends the process with a segmentation fault."""
    text, arrays = encode(np.random.Generator(np.random.MT19937(0)))
    assert '"pos":623' in text
    with pytest.raises(ConfigError, match="beyond a generator's numbers"):
        decode(text.replace('"pos":623', f'"pos":{place}'), arrays)
    text, arrays = encode(np.random.Generator(np.random.Philox(0)))
    assert '"buffer_pos":4' in text
    with pytest.raises(ConfigError, match="beyond a generator's numbers"):
        decode(text.replace('"buffer_pos":4', f'"buffer_pos":{place}'), arrays)


@fuzz(60)
@given(st.data())
def test_a_checkpoint_with_bytes_changed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_file(Path(folder) / "x", *state())
        content = (Path(folder) / "x").read_bytes()
    targets.checkpoint_file(mutated(data, content))


# --- environments -----------------------------------------------------------------------------------------------------


class Odd(Probe):
    """An env that is in order until its third step (`late`), or its first reset, and then gives what it was told to."""

    observation_space: spaces.Space = box(2)

    def __init__(self, what: str, value: Any, late: bool = True) -> None:
        self.what, self.value, self.late, self.t = what, value, late, 0

    def _give(self, name: str, ordinary: Any) -> Any:
        return self.value if name == self.what and (self.t >= 3 or not self.late) else ordinary

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        late = self.t >= 3
        super().reset(seed=seed)
        info: Any = self._give("info", {})
        return (self.value if self.what == "reset" and late else self._give("obs", np.zeros(2, np.float32))), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.t += 1
        ordinary = {"obs": np.zeros(2, np.float32), "reward": 1.0, "end": self.t >= 5, "cut": False, "info": {}}
        return tuple(self._give(name, item) for name, item in ordinary.items())  # type: ignore[return-value]


def learn(what: str, value: Any, late: bool = True, grouping: str = "batch", **arguments: Any) -> Any:
    def make() -> gym.Env:
        return Odd(what, value, late)

    env = make_group_env(make, 1, 2) if grouping == "fork" else DummyVecEnv([make] * 2)
    return grpo(env, n_steps=16, batch_size=32, grouping=grouping, **arguments).learn(64)


nan, inf = float("nan"), float("inf")
REFUSED: dict[str, tuple[str, Any]] = {
    "nan": ("obs", np.array([0, nan], np.float32)),
    "inf": ("obs", np.array([inf, 0], np.float32)),
    "too large for float32": ("obs", np.array([1e300, 0])),
    "shape (3,)": ("obs", np.zeros(3, np.float32)),
    "shape (2, 2)": ("obs", np.zeros((2, 2), np.float32)),
    "text": ("obs", np.array(["a", "b"])),
    "object": ("obs", np.array([object(), None])),
    "None": ("obs", None),
    "a dict": ("obs", {"a": 1}),
    "reset to nan": ("reset", np.array([nan, nan], np.float32)),
    "reset to shape (3,)": ("reset", np.zeros(3, np.float32)),
    "reward nan": ("reward", nan),
    "reward inf": ("reward", -inf),
    "reward None": ("reward", None),
    "reward text": ("reward", "much"),
    "reward in a list": ("reward", [2.0]),
    "reward of two": ("reward", np.ones(2)),
    "info None": ("info", None),
    "info a list": ("info", [1]),
    "end an array": ("end", np.array([True, False])),
    "end text": ("end", np.array(["no", "yes"])),
}
HARMLESS: dict[str, tuple[str, Any]] = {
    "float64": ("obs", np.array([0.5, 1.0])),
    "a list": ("obs", [0.0, 1.0]),
    "whole numbers": ("obs", np.array([1, 2])),
    "large": ("obs", np.array([1e30, -1e30], np.float32)),
    "reward np.float32": ("reward", np.float32(2)),
    "reward a bool": ("reward", True),
    "reward large": ("reward", 1e30),
    "end np.bool_": ("end", np.bool_(True)),
    "end 1": ("end", 1),
    "end None": ("cut", None),
    "info with odd things": ("info", {"episode": None, "TimeLimit.truncated": "x"}),
}


@pytest.mark.parametrize("grouping", ["batch", "seed", "fork"])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_an_env_must_not_give_is_an_error_that_says_where(name: str, late: bool, grouping: str) -> None:
    with pytest.raises((GRPOError, ValueError, TypeError, AttributeError, IndexError)) as caught:
        learn(*REFUSED[name], late, grouping, value_head=grouping == "batch")
    said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert all(said)
    if late and not isinstance(caught.value, GRPOError):
        assert any("grpo_rl: raised by" in line for line in said)


@pytest.mark.parametrize("grouping", ["batch", "fork"])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_an_env_may_give_trains(name: str, grouping: str) -> None:
    model = learn(*HARMLESS[name], grouping=grouping)
    assert model.num_timesteps >= 64
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())
