"""Runs logged to Weights & Biases, offline: what its files hold, where they are, and what happens when a run stops."""

import csv
import json
import re
import struct
import sys
from pathlib import Path

import pytest

from grpo_rl.cli import main

wandb = pytest.importorskip("wandb")

from grpo_rl.errors import ConfigError  # noqa: E402
from grpo_rl.lab.wandb_log import WandbWriter, require_wandb  # noqa: E402
from grpo_rl.recipes import load_recipe, shipped  # noqa: E402

SHORT = (
    "--steps 128 training.episodes=1 optimization.group_size=2 optimization.n_steps=32 optimization.n_epochs=1 "
    "optimization.batch_size=32"
).split()


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No network, and a home and a current folder in which every new file would be seen."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "MPLCONFIGDIR"):  # shared by all runs of a user
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setattr("grpo_rl.lab.run.film", lambda run, gif, trust=False: "left out here")
    yield
    wandb.teardown()  # it keeps the folders of its first run


def records(run: Path) -> list:
    """The records of a run's W&B file: a header of 7 bytes, then LevelDB's log format, blocks of 32 KiB with parts of
    records, each behind a checksum (4 bytes), a length (2) and a kind (1: whole, 2, 3: more follows, 4: the last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its other process writes the files: they are whole once it has ended
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    data, position, found, parts = path.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # the end of a block is padded
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(run: Path) -> list[dict[str, float]]:
    """What was logged, row by row; what W&B adds (_step, _runtime …) is left out."""
    rows = [record.history for record in records(run) if record.WhichOneof("record_type") == "history"]
    items = [{item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in rows]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in items]


def one(run: Path, kind: str):
    """The last record of a kind."""
    return [getattr(record, kind) for record in records(run) if record.WhichOneof("record_type") == kind][-1]


def test_a_run_is_logged_whole_and_leaves_nothing_elsewhere(tmp_path):
    assert main(["train", "cartpole", *SHORT, "--wandb", "tests", "--out", str(tmp_path / "runs")]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    with (run / "progress.csv").open(newline="") as file:
        progress = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    logged = history(run)
    assert len(logged) == len(progress) > 1
    for ours, theirs in zip(logged, progress, strict=True):
        assert ours.pop("global_step") == theirs["time/total_timesteps"]
        assert ours == pytest.approx(theirs), "the same names and numbers as in progress.csv"
    started = one(run, "run")
    assert (started.project, started.display_name) == ("tests", run.name)
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["training"] == {"steps": 128, "seed": 0, "episodes": 1, "wandb": "tests"}
    assert config["optimization"]["group_size"] == 2
    assert one(run, "exit").exit_code == 0
    assert list((tmp_path / "home").rglob("*")) == list((tmp_path / "here").rglob("*")) == []


def test_a_folder_that_was_logged_before_goes_on_under_the_same_id(tmp_path):
    for step in (10, 20):
        writer = WandbWriter(tmp_path / "runs" / "hopper-0", "tests", {"steps": step})
        writer.write({"a": 1}, {"a": None}, step)
        writer.close()
    first, second = (tmp_path / "runs" / "hopper-0" / "wandb").glob("offline-run-*/run-*.wandb")
    assert first.name == second.name, "they are named after the id"


def test_numbers_only_and_none_that_is_kept_from_wandb(tmp_path):
    writer = WandbWriter(tmp_path, "tests", {})
    values = {"a": 1, "b": 2.5, "c": "text", "d": object(), "e": 3}
    writer.write(values, dict.fromkeys(values) | {"b": ("tensorboard",), "e": ("stdout", "wandb")}, 7)
    writer.close()
    assert history(tmp_path) == [{"a": 1, "b": 2.5, "global_step": 7}]


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (ValueError("broken motor"), 1)])
def test_a_run_that_stops_early_is_whole_and_marked_as_failed(tmp_path, monkeypatch, error, status):
    def write(writer, values, excluded, step, kept=WandbWriter.write):
        if step == 192:
            raise error
        kept(writer, values, excluded, step)

    monkeypatch.setattr(WandbWriter, "write", write)
    line = ["train", "cartpole", *SHORT, "--steps", "1000", "--wandb", "tests", "--out", str(tmp_path / "runs")]
    assert main([*line, "optimization.group_kind=window"]) == status
    (run,) = (tmp_path / "runs").iterdir()
    # A rollout is 32 steps of 2 envs. Two are logged, after 64 and 128 steps; the third stops.
    assert [row["global_step"] for row in history(run)] == [64, 128]
    assert one(run, "exit").exit_code == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), wandb.Error("its process has died")])
def test_what_wandb_cannot_write_is_said_once_and_the_training_goes_on(tmp_path, monkeypatch, capsys, error):
    def log(run, numbers):
        raise error

    monkeypatch.setattr(wandb.Run, "log", log)
    assert main(["train", "cartpole", *SHORT, "--wandb", "tests", "--out", str(tmp_path / "runs")]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "Weights & Biases" in line]
    what = getattr(error, "strerror", None) or str(error)
    assert said == [f"Weights & Biases' log cannot be written: {what}; the training goes on without that log"]
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "evaluation.json").exists()


def test_a_run_that_is_resumed_goes_on_in_its_wandb_run(tmp_path, monkeypatch):
    def stop(writer, values, excluded, step):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WandbWriter, "write", stop)
        assert main(["train", "cartpole", *SHORT, "--wandb", "tests", "--out", str(tmp_path / "runs")]) == 130
    (run,) = (tmp_path / "runs").iterdir()
    assert main(["resume", str(run)]) == 0
    first, second = (run / "wandb").glob("offline-run-*/run-*.wandb")
    assert first.name == second.name


def test_without_the_package_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "cartpole", "--wandb", "tests", "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert "pip install 'grpo_rl[wandb]'" in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_who_does_not_ask_for_it_needs_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe = load_recipe("cartpole")
    require_wandb(recipe)
    assert "wandb" not in recipe.to_yaml()
    with pytest.raises(ConfigError, match="needs the package wandb"):
        require_wandb(load_recipe("cartpole", ["training.wandb=tests"]))


def test_a_start_that_fails_says_what_to_do(tmp_path, monkeypatch):
    def refused(**settings):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refused)
    with pytest.raises(ConfigError, match=r"does not start: No API key configured\. .*WANDB_MODE=offline"):
        WandbWriter(tmp_path, "tests", {})


@pytest.mark.slow
def test_the_callback_of_wandb_itself_works_as_the_guide_shows_it(tmp_path):
    """At the end W&B waits ten seconds for more of the TensorBoard files."""
    guide = (shipped() / "docs" / "guide.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import wandb.*?)```", guide, re.DOTALL)
    names = {}
    exec(code.replace("50_000", "256"), names)
    logged = history(tmp_path / "here")
    assert logged[-1]["global_step"] == names["model"].num_timesteps
    assert logged[-1]["group/groups"] >= 1
