"""State trees as JSON and arrays: what comes back is the same to the bit, and a file can name nothing that runs."""

import collections
import dataclasses
import enum
import json
import math
import struct
import typing

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.codec import NoCodec, decode, encode
from grpo_rl.errors import ConfigError
from grpo_rl.forks.snapshot import capture, restore


def again(tree, live=None):
    """Through JSON text and back."""
    text, arrays = encode(tree)
    return decode(json.dumps(json.loads(text)), arrays, live)


def same(a, b):
    """Equal in type and to the bit; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


KEYS = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.tuples(st.integers(), st.booleans()))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.just("$array")
)
TREES = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.lists(part, max_size=3),
        st.lists(part, max_size=3).map(tuple),
        st.lists(part, max_size=3).map(lambda items: collections.deque(items, 5)),
        st.dictionaries(KEYS, part, max_size=3),
        st.dictionaries(st.sampled_from(["$tuple", "$array", "a"]), part, max_size=2),
    ),
    max_leaves=12,
)


@given(TREES)
@settings(max_examples=150, deadline=None)
def test_plain_values_come_back_as_they_were(tree):
    assert same(again(tree), tree)


ARRAYS = [
    np.array([5e-324, -0.0, np.inf, np.nan, 1 / 3]),
    np.array(2.5, np.float16),
    np.array([True, False]),
    np.array([2**64 - 1], np.uint64),
    np.zeros((0, 3), np.int16),
    np.arange(24, dtype=">i4").reshape(2, 3, 4),
    np.array([[b"S", b"F"]], "S1"),
    np.array(["é", "longer"]),
    np.array([1 + 2j], np.complex64),
    np.arange(6.0)[::2],
]


@pytest.mark.parametrize("array", ARRAYS, ids=[f"{array.dtype}{array.shape}" for array in ARRAYS])
def test_arrays_keep_dtype_shape_and_bits(array):
    found = again(array)
    assert same(found, array)
    assert found.flags.writeable and not np.shares_memory(found, array)


def test_an_array_by_columns_stays_one():
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert again(array).flags.f_contiguous
    assert np.array_equal(again(array), array)


@pytest.mark.parametrize(
    "value", [np.float32(1 / 3), np.float64(np.nan), np.int8(-3), np.uint64(2**64 - 1), np.bool_(1)]
)
def test_numpy_numbers_keep_their_type(value):
    assert same(again(value), value)


def test_equal_arrays_are_kept_once():
    arrays = encode([np.arange(3), np.arange(3), np.arange(3.0)])[1]
    assert len(arrays) == 2


@pytest.mark.parametrize("tensor", [th.tensor(2.0), th.ones(2, 3, dtype=th.bfloat16), th.arange(3)], ids=str)
def test_tensors(tensor):
    found = again(tensor)
    assert found.dtype == tensor.dtype and th.equal(found, tensor)


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_a_generator_goes_on_where_it_was(kind):
    generator = np.random.Generator(kind(3))
    generator.integers(10, size=3, dtype=np.int32)  # half a word is left over
    found = again(generator)
    assert np.array_equal(found.integers(10, size=5, dtype=np.int32), generator.integers(10, size=5, dtype=np.int32))
    assert found.random() == generator.random()


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_numpys_former_generator_goes_on_where_it_was(kind):
    generator = np.random.RandomState(kind(3))
    generator.standard_normal()  # the second of a pair is kept
    found = again(generator)
    assert type(found) is np.random.RandomState
    assert np.array_equal(found.standard_normal(700), generator.standard_normal(700)), "beyond its 624 words"
    assert np.array_equal(found.randint(10, size=5), generator.randint(10, size=5))


def test_numpys_global_generator_is_no_part_of_an_env():
    with pytest.raises(NoCodec, match=r"np_random is a numpy\.random\.mtrand\.RandomState"):
        encode({"np_random": np.random.mtrand._rand})


class Colour(enum.Enum):
    RED = 1


def test_names_are_read_only_where_the_reader_holds_what_they_mean():
    text, arrays = encode({"class": Colour, "member": Colour.RED, "function": math.sin})
    assert decode(text, arrays, [Colour, math.sin]) == {"class": Colour, "member": Colour.RED, "function": math.sin}
    with pytest.raises(ConfigError, match=r"names math:sin, which is not part of the environment here"):
        decode(text, arrays, [Colour])


class Point(typing.NamedTuple):
    x: float
    y: np.ndarray


@dataclasses.dataclass(frozen=True)
class Beside:
    """A class of this module, of which the reader holds no instance."""

    z: int

    def __post_init__(self):
        raise AssertionError("its constructor is not called")


def test_data_of_an_env_of_ones_own():
    beside = object.__new__(Beside)
    object.__setattr__(beside, "z", 3)
    text, arrays = encode([Point(1.0, np.arange(2)), beside])
    point, found = decode(text, arrays, live=[Point(0.0, np.zeros(0))])
    assert type(point) is Point and point.x == 1.0 and point.y.tolist() == [0, 1]
    assert type(found) is Beside and found.z == 3
    with pytest.raises(ConfigError, match="Point, which is not part of the environment here"):
        decode(text, arrays, live=[math.sin])


def test_a_circle_is_said():
    circle = []
    circle.append(circle)
    with pytest.raises(NoCodec, match="in a circle"):
        encode(circle)
    assert decode(*encode({"a": 1}), live=circle) == {"a": 1}


def test_what_has_no_form_is_named_with_its_place():
    with pytest.raises(NoCodec, match=r"^env\[0\]\['x'\] is a builtins.object$"):
        encode({"env": [{"x": object(), 1: 2}]})
    with pytest.raises(NoCodec, match="a is an array of object"):
        encode({"a": np.array([object()])})


MUJOCO = (
    "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedPendulum InvertedDoublePendulum Pusher Reacher Swimmer"
    " Walker2d"
).split()
OTHERS = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"]


@pytest.mark.parametrize("env_id", [f"{name}-v5" for name in MUJOCO] + OTHERS)
def test_an_env_goes_on_exactly_from_a_snapshot_that_was_written(env_id):
    original, other = gym.make(env_id), gym.make(env_id)
    original.reset(seed=0)
    other.reset(seed=1)
    original.action_space.seed(0)
    for _ in range(12):  # contacts, islands and constraints are there, which are not written
        if any(original.step(original.action_space.sample())[2:4]):
            original.reset()
    restore(other, again(capture(original), live=capture(other)))
    for _ in range(60):
        action = original.action_space.sample()
        left, right = original.step(action), other.step(action)
        assert np.asarray(left[0]).tobytes() == np.asarray(right[0]).tobytes()
        assert left[1:4] == right[1:4]
        if left[2] or left[3]:
            assert np.asarray(original.reset()[0]).tobytes() == np.asarray(other.reset()[0]).tobytes()
    original.close()
    other.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[" * 100_000,
        '{"$unknown": 1}',
        '{"$array": "9", "type": "<f8", "shape": [1]}',
        '{"$array": "0", "type": "<f8", "shape": [1000000000000]}',
        '{"$array": "0", "type": "<f8", "shape": ["x"]}',
        '{"$array": "0", "type": "|O", "shape": [2]}',
        '{"$array": "0", "type": "<i4", "shape": [2]}',
        '{"$array": ["0"], "type": "<f8", "shape": [2]}',
        '{"$record": "Popen", "fields": {}}',
        '{"$record": "Snapshot", "fields": {"x": 1}}',
        '{"$record": "Snapshot", "fields": [1]}',
        '{"$rng": {"bit_generator": "Generator"}}',
        '{"$rng": {"bit_generator": "PCG64", "state": {"state": -1, "inc": 1}}}',
        '{"$random_state": {"bit_generator": "MT19937", "state": {"key": [1, 2], "pos": 1}}}',
        '{"$random_state": {"bit_generator": "MT19937", "state": {"pos": 625}, "has_gauss": 0, "gauss": 0.0}}',
        '{"$handle": "os:system"}',
        '{"$enum": "os:system", "member": "x"}',
        '{"$enum": "re:RegexFlag", "member": "x"}',
        '{"$plain": "subprocess:Popen", "attributes": []}',
        '{"$tuple": 3}',
        '{"$set": [[]]}',
        '{"$random": [3, [1], null]}',
        '{"$random": {"$tuple": [3, {"$tuple": [1, 2]}, null]}}',
        '{"$torch_rng": "0", "device": "cpu"}',
        '{"$torch_rng": "0", "device": "meta"}',
        '{"$torch_rng": "1", "device": "cpu"}',
        '{"$space": "os:system", "rngs": []}',
        '{"$dict": [[1]]}',
        '{"$deque": [], "most": "x"}',
        '{"$number": "x", "type": "<f8"}',
        "1" * 5000,
    ],
    ids=lambda text: text[:40],
)
def test_a_hostile_text_is_one_clear_error(text):
    with pytest.raises(ConfigError):
        decode(text, {"0": np.zeros(2)})
