"""Runs that survive: ctrl-C, kill -9 at any moment, an error, and `resume` afterwards."""

import contextlib
import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch as th

from grpo_rl.checkpoint import checkpoint_steps, save_checkpoint
from grpo_rl.errors import ConfigError
from grpo_rl.lab import run as lab_run
from grpo_rl.lab import training
from grpo_rl.lab.build import CHECKPOINT, build_agent, build_env, open_run
from grpo_rl.lab.logs import open_logs
from grpo_rl.lab.run import resume_run, train_run
from grpo_rl.lab.training import Checkpoints, RunStopped, Stop
from grpo_rl.recipes import make_recipe


def recipe(steps=600, **optimization):
    settings = {"group_size": 4, "n_steps": 16, "n_epochs": 1} | optimization
    return make_recipe(
        {
            "environment": {"id": "CartPole-v1"},
            "training": {"steps": steps, "episodes": 1},
            "optimization": settings,
            "resources": {"threads": 1},
        },
        "test",
    )


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(lab_run, "film", lambda *_, **__: "not now")
    monkeypatch.setattr(lab_run, "curve", lambda *_: None)


def parameters(run):
    """The run's agent, optimizer included, as bits."""
    leaves = th.utils._pytree.tree_leaves(open_run(run)[1].get_parameters())
    return [leaf.numpy().tobytes() if isinstance(leaf, th.Tensor) else leaf for leaf in leaves]


def rows(run):
    """What progress.csv says of each step count, times apart."""
    with (run / "progress.csv").open(newline="") as file:
        found = [*csv.DictReader(file)]
    names = ("time/fps", "time/time_elapsed", "time/iterations")
    return [{key: value for key, value in sorted(row.items()) if key not in names} for row in found]


def the_same(run, whole):
    assert parameters(run) == parameters(whole)
    assert rows(run) == rows(whole)
    assert json.loads((run / "evaluation.json").read_text()) == json.loads((whole / "evaluation.json").read_text())


class Presses:
    """Presses ctrl-C (or kills softly) at the n-th line of progress; again and again if told so."""

    def __init__(self, number=signal.SIGINT, times=1):
        self.number, self.times, self.said = number, times, []

    def __call__(self, line):
        self.said.append(line)
        if "steps  mean " in line and len(self.said) >= 5:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
                time.sleep(0.01)  # Python hears signals between two steps of its own
            self.times = 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_iteration_and_resume_goes_on_as_if_nothing_had_been(number, tmp_path, capfd):
    whole = train_run(recipe(), tmp_path / "whole", say=lambda line: None)
    before = signal.getsignal(number)
    with pytest.raises(RunStopped, match=r"^stopped after \d+ of 600 steps; go on: grpo-rl resume ") as stop:
        train_run(recipe(), tmp_path / "runs", say=Presses(number))
    assert isinstance(stop.value.__cause__, KeyboardInterrupt), "exit status 130"
    assert signal.getsignal(number) is before
    assert "stopping after this iteration, with a checkpoint; once more stops at once" in capfd.readouterr().err
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "model.zip").exists()
    stopped_at = checkpoint_steps(run / CHECKPOINT)
    said = []
    assert open_run(run, say=said.append)[1].num_timesteps == stopped_at
    assert said == [f"{run / CHECKPOINT}, after {stopped_at:,} of 600 steps"]
    resume_run(run, say=said.append)
    assert f"on from {stopped_at:,} of 600 steps" in said[1]
    the_same(run, whole)
    assert len(list(run.glob("events.out.tfevents*"))) == 2


def test_the_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(
        RunStopped, match=r"stopped at once, after \d+ steps; the last checkpoint is of \d+ steps, \d+ s old"
    ):
        train_run(recipe(), tmp_path, say=Presses(times=2))
    (run,) = tmp_path.iterdir()
    whole = train_run(recipe(), tmp_path / "whole", say=lambda line: None)
    the_same(resume_run(run, say=lambda line: None), whole)


def test_a_finished_run_says_so_and_trains_on_with_more_steps(tmp_path):
    run = train_run(recipe(300), tmp_path, say=lambda line: None)
    steps, said = checkpoint_steps(run / CHECKPOINT), []
    resume_run(run, say=said.append)
    assert said == [f"{run} is finished: {steps} steps of 300; grpo-rl resume {run} --steps N trains on, up to N"]
    with pytest.raises(ConfigError, match=f"has made {steps} steps, expected more"):
        resume_run(run, steps=steps)
    said.clear()
    resume_run(run, steps=600, say=said.append)
    assert said[0] == "600 steps where 300 were planned: schedules over progress change their course"
    assert open_run(run)[0].training.steps == 600
    # Nothing here depends on progress, so it is the run of 600 steps.
    the_same(run, train_run(recipe(600), tmp_path / "whole", say=lambda line: None))


def test_ten_checkpoints_and_ten_lines(tmp_path):
    plan = recipe(400, n_steps=10, value_head=True, group_kind="window")
    env, said, saved = build_env(plan), [], []

    class Noting(Checkpoints):
        def save(self):
            saved.append(self.model.num_timesteps)
            return super().save()

    build_agent(plan, env).learn(400, callback=Noting(tmp_path, 400, said.append, Stop(), said.append))
    env.close()
    # A rollout is 10 steps of 4 envs = 40 steps, and every 40 of 400 steps are due: at the start, then each rollout.
    assert saved == list(range(0, 401, 40))
    assert len(said) == 10
    assert said[0].split()[:2] == ["10%", "40"]
    assert said[-1].split()[:2] == ["100%", "400"]
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT], "no draft is left"


def test_logs_go_on_after_the_rows_of_the_checkpoint(tmp_path):
    whole = "a,time/total_timesteps,b\n1,10,\n2,20,5\n,20,5\n3,30,6\n4,4"  # the last row was cut
    (tmp_path / "progress.csv").write_text(whole)
    logger = open_logs(tmp_path, after=20)
    logger.record("time/total_timesteps", 30)
    logger.record("c", 7)
    logger.dump(30)
    logger.close()
    assert (tmp_path / "progress.csv").read_text() == "a,time/total_timesteps,b,c\n1,10,,\n2,20,5,\n,30,,7\n"


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    with pytest.raises(ConfigError, match="is no run"):
        resume_run(tmp_path / "none")
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    with pytest.raises(ConfigError, match=f"no checkpoint {tmp_path / CHECKPOINT}"):
        resume_run(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"junk")
    with pytest.raises(ConfigError, match="it is damaged"):
        resume_run(tmp_path)


@contextlib.contextmanager
def full_disk(size):
    """No file grows beyond `size` bytes: as on a full disk, writing raises an OSError."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("after", [None, 0])
def test_a_log_that_cannot_be_written_is_said_once_and_the_rest_goes_on(after, tmp_path, capfd):
    said = []
    logger = open_logs(tmp_path, after=after, say=said.append)
    with full_disk(1000):
        for step in range(30):
            logger.record("time/total_timesteps", step)
            logger.record("a", "x" * 50)
            logger.record("b", step / 3)
            logger.dump(step)
            time.sleep(0.002)  # TensorBoard writes in a thread of its own
        logger.close()
    assert sorted(line.partition(":")[0] for line in said) == [
        "TensorBoard's events cannot be written",
        "progress.csv cannot be written",
    ]
    assert capfd.readouterr().err == ""


def test_a_disk_that_is_full_from_the_start_on_lets_it_train(tmp_path):
    said = []
    with full_disk(1500), pytest.raises(RunStopped, match="no checkpoint of it: make room and train again") as stop:
        train_run(recipe(), tmp_path, say=said.append)
    assert str(stop.value).startswith("trained 6") and len(str(stop.value).splitlines()) == 1
    assert sum("progress.csv cannot be written" in line for line in said) <= 1
    (run,) = tmp_path.iterdir()
    assert not [path for path in run.iterdir() if path.name.startswith(".")], "no draft is left"
    assert not (run / "model.zip").exists()


def test_a_disk_that_is_full_after_the_last_step_is_one_line_and_resume_finishes(tmp_path, monkeypatch):
    whole = train_run(recipe(), tmp_path / "whole", say=lambda line: None)
    finish = lab_run._finish

    def finish_on_a_full_disk(*arguments):
        with full_disk(1000):
            finish(*arguments)

    monkeypatch.setattr(lab_run, "_finish", finish_on_a_full_disk)
    with pytest.raises(RunStopped, match=r"^trained \d+ steps, but .*; make room, then grpo-rl resume .* finishes it$"):
        train_run(recipe(), tmp_path / "runs", say=lambda line: None)
    (run,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in run.iterdir()} & {"model.zip", ".model.zip", ".model.zip.tmp"} == set()
    monkeypatch.setattr(lab_run, "_finish", finish)
    said = []
    the_same(resume_run(run, say=said.append), whole)
    assert said[0] == f"run: all of 600 steps are made, what follows the last one comes now, in {run}"


def test_a_recipe_that_was_edited_is_said(tmp_path):
    run, said = train_run(recipe(200), tmp_path, say=lambda line: None), []
    text = (run / "recipe.yaml").read_text()
    assert "n_epochs: 1" in text
    (run / "recipe.yaml").write_text(text.replace("n_epochs: 1", "n_epochs: 2"))
    resume_run(run, steps=400, say=said.append)
    edited = [line for line in said if "recipe.yaml" in line]
    assert edited == ["recipe.yaml is not what the run began with: optimization.n_epochs was 1, is 2"]
    (run / "recipe.yaml").write_text(text)
    said.clear()
    resume_run(run, steps=600, say=said.append)
    assert not [line for line in said if "recipe.yaml" in line]


def test_a_run_whose_numbers_overflow_says_what_to_change_before_it_goes_on(tmp_path):
    wild = recipe(200)
    wild.optimization |= {"learning_rate": 1e38, "max_grad_norm": 1e9}
    with pytest.raises(RunStopped, match="is not finite") as stop:
        train_run(wild, tmp_path, say=lambda line: None)
    (run,) = tmp_path.iterdir()
    assert f"first change in {run / 'recipe.yaml'} what is advised above" in str(stop.value)
    with pytest.raises(RunStopped, match="is not finite"):  # as it is, it comes to the same point
        resume_run(run, say=lambda line: None)
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("learning_rate: 1.0e+38", "learning_rate: 1.0e-4"))
    assert text != (run / "recipe.yaml").read_text()
    resume_run(run, say=lambda line: None)
    assert (run / "model.zip").exists()


def test_an_evaluation_without_its_checkpoint_is_no_finished_run(tmp_path):
    run = train_run(recipe(600), tmp_path, say=lambda line: None)
    with pytest.raises(RunStopped):
        train_run(recipe(600), tmp_path / "other", say=Presses())
    (other,) = (tmp_path / "other").iterdir()
    shutil.copy(other / CHECKPOINT, run / CHECKPOINT)
    done, said = checkpoint_steps(run / CHECKPOINT), []
    assert done < 600
    resume_run(run, say=said.append)
    assert said[0] == f"run: on from {done} of 600 steps, in {run}"
    assert checkpoint_steps(run / CHECKPOINT) >= 600


def test_a_checkpoint_of_another_run_is_refused_before_anything_else(tmp_path):
    with pytest.raises(RunStopped):
        train_run(recipe(), tmp_path, say=Presses())
    (run,) = tmp_path.iterdir()
    other = make_recipe({"environment": {"id": "Acrobot-v1"}, "training": {"steps": 9}}, "test")
    env = build_env(other)
    save_checkpoint(build_agent(other, env), run / CHECKPOINT)
    env.close()
    before, said = {path: path.read_bytes() for path in run.iterdir()}, []
    with pytest.raises(ConfigError) as error:
        resume_run(run, say=said.append)
    assert str(error.value) == (
        f"{run / CHECKPOINT}: the checkpoint's observation space is Box((6,), float32), here it is Box((4,), float32):"
        " build the model as it was"
    )
    assert said == []
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_commands_that_are_printed_can_be_pasted(tmp_path):
    said = []
    run = train_run(recipe(100), tmp_path / "my runs; $HOME", say=said.append)
    resume_run(run, say=said.append)
    assert shlex.split(said[-2].rpartition(": ")[2].partition("|")[0]) == ["grpo-rl", "evaluate", str(run)]
    assert shlex.split(said[-2])[-1] == str(run.parent)
    assert shlex.quote(str(run)) in said[-1].partition("; grpo-rl resume")[2]


@pytest.mark.slow
def test_another_process_goes_on_bit_for_bit(tmp_path):
    """Hopper, hybrid: stopped here, resumed by the command line in a process of its own."""
    plan = make_recipe(
        {
            "environment": {"id": "Hopper-v5"},
            "training": {"steps": 1200, "episodes": 1},
            "model": {"log_std_init": -1},
            "optimization": {
                **{"group_size": 4, "n_steps": 64, "n_epochs": 2, "value_head": True, "normalize_obs": True},
                "learning_rate": {"start": 1e-3, "end": 0},
            },
        },
        "test",
    )
    whole = train_run(plan, tmp_path / "whole", say=lambda line: None)
    with pytest.raises(RunStopped):
        train_run(plan, tmp_path / "runs", say=Presses())
    (run,) = (tmp_path / "runs").iterdir()
    line = [sys.executable, "-m", "grpo_rl.cli", "resume", str(run)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    the_same(run, whole)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_killed_at_random_times_it_is_still_the_same_run(tmp_path, monkeypatch):
    """kill -9, 20 times at most, each child going on from where the last one's checkpoint was."""
    monkeypatch.setattr(training, "PARTS", 10_000)  # a checkpoint before each rollout
    plan, quiet = recipe(2500, n_steps=8, value_head=True), lambda line: None
    begun = time.monotonic()
    whole = train_run(plan, tmp_path / "whole", say=quiet)
    longest = (time.monotonic() - begun) / 20  # of a child's life, however fast the machine is
    folder, rng, kills, run = tmp_path / "runs", np.random.default_rng(0), 0, None
    seen: set[int] = set()
    while run is None or not (run / "evaluation.json").is_file():
        child = os.fork()
        if child == 0:
            try:
                train_run(plan, folder, say=quiet) if run is None else resume_run(run, say=quiet)
            finally:
                os._exit(0)
        limit = time.monotonic() + (rng.uniform(0, longest) if kills < 20 else 60)
        while time.monotonic() < limit and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        else:
            if time.monotonic() >= limit:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
        found = [path for path in sorted(folder.glob("*")) if (path / CHECKPOINT).is_file()]
        run = found[0] if found else None
        if run is not None:
            seen.add(checkpoint_steps(run / CHECKPOINT))
            open_run(run)  # it loads each time
        assert kills < 100
    assert kills >= 10 and len(seen) >= 3, (kills, seen)
    the_same(run, whole)
    assert not Path(run, f".{CHECKPOINT}.tmp").exists()


def test_a_mean_return_before_the_first_episode_has_ended_is_a_dash(tmp_path):
    env = build_env(recipe())
    agent, said = build_agent(recipe(), env), []
    callback = Checkpoints(tmp_path, 600, said.append, Stop(), print)
    callback.model, callback._next = agent, 0
    for returns in ([], [2.0, 3.0]):
        agent.ep_info_buffer = [{"r": value} for value in returns]
        callback._next = 0
        callback._on_rollout_end()
    assert [line.split()[-1] for line in said] == ["–", "2.5"]
    env.close()
