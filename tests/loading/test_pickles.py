"""What a pickle would do is told without doing it, in every way in which a pickle can say it."""

import collections
import os
import pathlib
import pickle
import pickletools
from typing import Any

import cloudpickle
import numpy as np
import pytest

from grpo_rl.loading.pickles import MAX_KEY, UnreadableError, trace


class Call:
    """Pickled as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def words(data: bytes) -> list[str]:
    return [str(step) for step in trace(data)]


SYSTEM = f"{os.system.__module__}.system"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_named_with_its_arguments_and_not_made(protocol: int, tmp_path: pathlib.Path) -> None:
    command = f"touch {tmp_path}/x"
    data = pickle.dumps({"a": [Call(os.system, command)]}, protocol)
    shown = repr(command) if len(repr(command)) < 80 else f"{command!r:.77}…"
    assert words(data) == [f"imports {SYSTEM}", f"calls {SYSTEM}({shown})"]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cposix\nsystem\n(S'x'\ntR.",  # REDUCE
        b"(S'x'\niposix\nsystem\n.",  # INST
        b"(cposix\nsystem\nS'x'\no.",  # OBJ
        b"cposix\nsystem\n(S'x'\nt\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x01x\x85R.",  # STACK_GLOBAL
        b"\x80\x04\x8c\x06system\x94\x8c\x05posixh\x00\x93\x8c\x01x\x85R.",  # its names from the memo
        b"cposix\nsystem\n0cposix\nsystem\n(S'x'\ntR.",  # named before, and thrown away
    ],
)
def test_every_way_to_call(data: bytes) -> None:
    assert words(data)[-1] == "calls posix.system('x')"
    assert words(data)[0] == "imports posix.system"


def test_calls_with_named_arguments_and_of_what_was_made() -> None:
    # NEWOBJ_EX: posix.system(*('x',), **{})
    assert words(b"cposix\nsystem\n(S'x'\nt}\x92.")[-1] == "calls posix.system(…)"
    # functools.partial(posix.system)('x')
    data = b"cfunctools\npartial\n(cposix\nsystem\ntR(S'x'\ntR."
    assert words(data)[-2:] == ["calls functools.partial(posix.system)", "calls functools.partial(…)('x')"]


def test_changes_tell_made_objects_from_classes() -> None:
    queue = trace(pickle.dumps(collections.deque([1], 3)))
    assert [(str(step), step.made) for step in queue if step.action == "changes"] == [
        ("changes collections.deque", True)
    ]
    # (None, {'forward': 1}) as the state of a class: sets its attribute
    named = trace(b"ctorch.nn\nReLU\n(N(dS'forward'\nI1\nstb.")
    assert [(str(step), step.made) for step in named if step.action == "changes"] == [("changes torch.nn.ReLU", False)]


def test_functions_are_calls_of_cloudpickle() -> None:
    assert any(step.module == "cloudpickle.cloudpickle" for step in trace(cloudpickle.dumps(lambda progress: progress)))


def test_plain_data_has_no_steps() -> None:
    data: Any = [None, True, 1, -1, 10**30, 1.5, "ü", b"b", (1, (2,)), {"a": {1: 2}}, {3}, frozenset([4])]
    for protocol in (4, 5):
        assert words(pickle.dumps(data, protocol)) == []


def test_numpy_is_read_in_all_its_forms() -> None:
    for array in (np.zeros(3), np.zeros((4, 4))[::2, ::2], np.zeros((2, 3, 4)).transpose(2, 0, 1), np.float32(1)):
        assert all(step.module.startswith("numpy") for step in trace(pickle.dumps(array)))


def nested(depth: int) -> bytes:
    """((((), ()), ((), ())), …): `depth` doublings, each by two references to the one before."""
    return b")q\x00" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(depth))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "exhausted"),
        (b"(lp0\n", "exhausted"),
        (b".", "empty"),
        (b"0.", "nothing to take away"),
        (b"l.", "IndexError"),
        (b"h\x07.", "KeyError"),
        (b"\xff.", "opcode"),
        (b"Psomewhere\n.", "outside of it"),  # a persistent id
        (b"\x82\x01.", "outside of it"),  # an extension code
        (b"\x97.", "outside of it"),  # an out-of-band buffer
        (b"N(tR.", "no name"),
        (b"NNb.", "has none"),
        (b"cos path\nx\n(tR.", "proper name"),
        (b"I1\nI2\n\x93.", "proper name"),
        (b"}" + nested(40) + b"Ns.", "short tuple"),  # hash() would take 2^40 steps
        (b"\x8f(" + nested(40) + b"\x90.", "short tuple"),
        (b"(" + nested(40) + b"\x91.", "short tuple"),
        (b"(" + nested(40) + b"Nd.", "short tuple"),
        (b"}((lI1\ntNs.", "short tuple"),
        (b"Nr\xff\xff\xff\xff.", "out of reach"),  # Python would make a memo of 4 billion places
    ],
    ids=range(20),
)
def test_what_cannot_be_followed_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        trace(data)


def test_a_short_tuple_may_be_a_key_and_size_is_counted_in_leaves() -> None:
    assert words(pickle.dumps({(1, "a"): 2})) == []
    assert words(pickle.dumps({tuple(range(MAX_KEY - 1)): 2})) == []  # and one for the tuple itself
    with pytest.raises(UnreadableError, match="short tuple"):
        trace(pickle.dumps({tuple(range(MAX_KEY)): 2}))


def test_a_long_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_rl.loading.pickles.MAX_OPERATIONS", 10)
    with pytest.raises(UnreadableError, match="more than 10 operations"):
        trace(b"N0" * 10 + b"N.")


def test_every_operation_of_pickle_is_known() -> None:
    """What a new Python adds is refused until it is added here."""
    outside = {"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
    assert len(pickletools.opcodes) == 68
    assert outside < {opcode.name for opcode in pickletools.opcodes}
