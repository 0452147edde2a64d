"""What must hold for any bytes at all: they are read, or refused with a GRPOError of one short line.

`tests/test_fuzz.py` runs these with a few hundred inputs each. For a coverage-guided search, with `pip install
atheris` (Python 3.11):

    python -m tests.fuzz.targets recipe -max_total_time=120 CORPUS_FOLDER

The target is recipe, override, pickle, archive, checkpoint or checkpoint_file. The folder holds examples to start from
(agents/*.yaml, say) and collects inputs that reach new code. An exception is a finding; its input is left in crash-….
"""

import contextlib
import importlib
import io
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.errors import GRPOError
from grpo_rl.loading import inspect_zip
from grpo_rl.loading.parts import permitted
from grpo_rl.loading.pickles import UnreadableError, trace

MAX_MESSAGE = 2000


@contextlib.contextmanager
def refused_clearly() -> Iterator[None]:
    """Swallows a GRPOError with one short line; anything else is a finding."""
    message = "none"
    try:
        yield
    except GRPOError as error:
        message = str(error)
    assert 0 < len(message) <= MAX_MESSAGE, f"{len(message)} characters: {message[:200]}"
    assert "\n" not in message, repr(message)


def recipe(data: bytes) -> None:
    """The bytes as a recipe's file."""
    from grpo_rl.recipes import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(data)
        with refused_clearly():
            text = load_recipe(path).to_yaml()
            path.write_text(text, encoding="utf-8")
            assert load_recipe(path).to_yaml() == text  # what a run keeps is read back as it is
        assert [item.name for item in Path(folder).iterdir()] == ["recipe.yaml"]


def override(data: bytes) -> None:
    """The bytes as one section.key=value on the command line."""
    from grpo_rl.recipes import load_recipe

    with refused_clearly():
        load_recipe("cartpole", [data.decode(errors="replace")])


class _Inert:
    """Stands for whatever a pickle finds; does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Inert()

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def add(self, item: Any) -> None: ...


class _Watched(pickle.Unpickler):
    """Python's own machine, which tells what it would import and imports nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return _Inert


def pickled(data: bytes) -> None:
    """The bytes as a pickle: Python imports nothing that `trace` has not told."""
    try:
        steps = trace(data)
    except UnreadableError:
        return
    for step in steps:
        assert str(step)
        permitted(step)
    watched = _Watched(data)
    with contextlib.suppress(Exception):  # it has imported by then what it does
        watched.load()
    told = {(step.module, step.name) for step in steps if step.action == "imports"}
    assert watched.found <= told, watched.found - told


def archive(data: bytes) -> None:
    """The bytes as an agent's file."""
    from grpo_rl import GRPO

    with refused_clearly():
        inspect_zip(io.BytesIO(data))
        GRPO.load(io.BytesIO(data), device="cpu")


def checkpoint(data: bytes) -> None:
    """The bytes as a checkpoint's state: a JSON text, and after NUL bytes an array of bytes."""
    from grpo_rl.codec import decode

    text, _, rest = data.partition(b"\0")
    arrays = {"0": np.frombuffer(rest, np.uint8), "1": np.zeros((2, 3)), "2": np.zeros(0, np.float32)}
    with refused_clearly():
        decode(text.decode(errors="replace"), arrays)


def checkpoint_file(data: bytes) -> None:
    """The bytes as a checkpoint's file."""
    from grpo_rl.checkpoint import read_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(data)
        with refused_clearly():
            read_file(path)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "recipe": recipe,
    "override": override,
    "pickle": pickled,
    "archive": archive,
    "checkpoint": checkpoint,
    "checkpoint_file": checkpoint_file,
}


def main() -> None:
    """Runs one target under atheris."""
    import atheris

    name = sys.argv.pop(1)
    for module in [key for key in sys.modules if key.split(".")[0] in ("grpo_rl", "pickletools")]:
        del sys.modules[module]  # to be imported again, instrumented
    with atheris.instrument_imports(include=["grpo_rl", "pickletools", "tests.fuzz"]):
        targets = importlib.import_module("tests.fuzz.targets").TARGETS
        for used in ("recipes", "codec", "checkpoint"):
            importlib.import_module(f"grpo_rl.{used}")
    atheris.Setup(sys.argv, targets[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
