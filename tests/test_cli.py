"""The command line as a person meets it: what works, what is refused, and a wheel that needs no checkout."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_rl.cli import main
from grpo_rl.lab.film import offscreen_backends
from grpo_rl.recipes import names, shipped

SHORT = ["training.episodes=2", "optimization.n_steps=32", "optimization.n_epochs=1"]


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run of a few hundred steps."""
    out = tmp_path_factory.mktemp("runs")
    assert main(["train", "cartpole", *SHORT, "--steps", "3e2", "--seed", "7", "--out", str(out)]) == 0
    return next(out.iterdir())


# ---------------------------------------------------------------------------------------------------------------- train


def test_train_leaves_everything_that_it_promises(run):
    found = {path.name for path in run.iterdir()}
    assert {"model.zip", "recipe.yaml", "progress.csv", "curve.png", "evaluation.json", "versions.json"} <= found
    assert any(name.startswith("events.out.tfevents") for name in found)
    assert "checkpoint.safetensors" in found, "so that more steps can follow"
    assert run.name.startswith("cartpole-7-")
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert [len(evaluation[kind]["returns"]) for kind in ("mode", "sampled")] == [2, 2]
    assert "torch" in json.loads((run / "versions.json").read_text())
    assert "seed: 7" in (run / "recipe.yaml").read_text()


def test_settings_may_stand_anywhere(capsys):
    line = [
        "train",
        "hopper",
        "training.episodes=3",
        "--seed",
        "4",
        "optimization.learning_rate=1e-4",
        "--print-config",
    ]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "learning_rate: 0.0001" in printed
    assert "seed: 4" in printed
    assert "episodes: 3" in printed


def test_a_recipe_of_ones_own(tmp_path, capsys, monkeypatch):
    (tmp_path / "my.yaml").write_text("environment: {id: CartPole-v1}\ntraining: {steps: 5}")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "my.yaml", "training.steps=9", "--print-config"]) == 0
    assert "steps: 9" in capsys.readouterr().out


STOPPING = """
from gymnasium.envs.classic_control import CartPoleEnv

class Stopping(CartPoleEnv):
    count = 0

    def step(self, action):
        Stopping.count += 1
        if Stopping.count == 900:  # the probe of forks makes some hundred
            raise {error}
        return super().step(action)
"""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [("KeyboardInterrupt", 130, "stopped at once, after"), ("ValueError('broken motor')", 1, "broken motor")],
)
def test_a_run_that_stops_early_keeps_its_agent(tmp_path, capsys, error, status, said):
    (tmp_path / "stopping.py").write_text(STOPPING.format(error=error))
    (tmp_path / "stopping.yaml").write_text(
        "environment: {class: stopping.py:Stopping}\ntraining: {steps: 1000, episodes: 1}\n"
        "optimization: {group_size: 4, n_steps: 16, n_epochs: 1, value_head: true}"
    )
    assert main(["train", "--config", str(tmp_path / "stopping.yaml"), "--out", str(tmp_path / "runs")]) == status
    message = capsys.readouterr().err
    assert said in message
    assert len(message.strip().splitlines()) == 1
    run = next((tmp_path / "runs").iterdir())
    assert f"go on: grpo-rl resume {run}" in message
    assert (run / "curve.png").is_file()
    capsys.readouterr()
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'checkpoint.safetensors'}, after ")
    assert main(["resume", str(run), "--steps", "5e2"]) == 0, "the error is gone: it counted its calls"
    assert (run / "model.zip").is_file()


def test_an_agent_with_code_of_ones_own_is_loaded_by_another_process(tmp_path):
    line = ["train", "auxiliary", "--steps", "64", "optimization.n_steps=8", "optimization.n_epochs=1"]
    assert main([*line, "training.episodes=1", "--out", str(tmp_path)]) == 0
    run = next(tmp_path.iterdir())
    done = python("-W", "error::UserWarning", "-m", "grpo_rl.cli", "evaluate", str(run), "--episodes", "1")
    assert "1 episodes, mode actions" in done.stdout, done.stderr


# ----------------------------------------------------------------------------------------------------------- afterwards


def test_evaluate(run, capsys):
    assert main(["evaluate", str(run), "--episodes", "3"]) == 0
    assert "3 episodes, mode actions" in capsys.readouterr().out


def test_plot(run, tmp_path):
    assert main(["plot", str(run), str(run), "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_play_records_a_gif_or_says_what_is_missing(run, tmp_path, capsys):
    status = main(["play", str(run), "--gif", str(tmp_path / "x.gif")])
    if status == 0:
        assert (tmp_path / "x.gif").read_bytes()[:3] == b"GIF"
    else:
        assert "no GIF: " in capsys.readouterr().out


def test_a_renderer_that_fails_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "recipe.yaml").write_text("environment: {id: Hopper-v5}")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "no-such-platform")
    from grpo_rl.lab.build import build_agent, build_env
    from grpo_rl.recipes import load_recipe

    recipe = load_recipe(tmp_path / "recipe.yaml")
    build_agent(recipe, build_env(recipe)).save(tmp_path / "model.zip")
    assert main(["play", str(tmp_path), "--gif", str(tmp_path / "x.gif")]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"{tmp_path / 'model.zip'}, 0 steps"
    assert "apt-get install" in printed.splitlines()[1]
    assert len(printed.strip().splitlines()) == 2


def test_list_shows_every_recipe(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in names())


def test_the_table_of_agents_is_current(capsys):
    main(["list", "--markdown"])
    readme = (shipped() / "agents" / "README.md").read_text(encoding="utf-8")
    assert readme.endswith(capsys.readouterr().out), "run: make tables"


def test_doctor(capsys):
    assert main(["doctor", "CartPole-v1"]) == 0
    printed = capsys.readouterr().out
    assert "CartPole-v1: exact forks" in printed
    assert all(f"GL, {backend}" in printed for backend in offscreen_backends())


def test_doctor_of_a_run(run, capsys):
    assert main(["doctor", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "reward_gap" in printed
    assert "healthy: " in printed
    assert (run / "health.png").is_file()


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian hopper", 'unknown command "trian": did you mean "train"?'),
        ("--sed", 'unknown option "--sed"'),
        ("train", "expected one recipe, got none; recipes: "),
        ("train hoper", 'unknown recipe "hoper": did you mean "hopper"?'),
        ("train hopper cartpole", "expected one recipe, got hopper and cartpole"),
        ("train hopper --sed 3", 'unknown option or argument "--sed": did you mean "--seed"?'),
        ("train hopper --seed x", "command line, training.seed: expected int, got 'x'"),
        ("train hopper optimization.lerning_rate=1", 'unknown key "lerning_rate": nearest: learning_rate'),
        ("train hopper environment.id=Hoper-v5", 'Gymnasium knows no "Hoper-v5": nearest: Hopper-v5'),
        ("train hopper optimization.group_kind=epoch", "group_kind='epoch' is unknown: valid: auto, episode, window"),
        ("train hopper optimization.group_size=1 optimization.value_head=false", "value_head"),
        ("train cartpole optimization.batch_size=1", "`batch_size` must be greater than 1"),
        ("train cartpole optimization.n_steps=-5", "n_steps=-5"),
        ("train --config none.yaml", "no file none.yaml"),
        ("evaluate runs/none", "runs/none is no run: expected a folder with a recipe.yaml"),
        ("resume runs/none", "runs/none is no run"),
        ("resume runs/none --steps 1.5", "invalid _steps value: '1.5'"),
        ("evaluate runs/none --episodes few", "invalid int value: 'few'"),
        ("play runs/none --gif x.gif", "runs/none is no run"),
        ("plot runs/none", "runs/none is no run"),
        ("doctor Hoper-v5", 'Gymnasium knows no "Hoper-v5"'),
        ("doctor runs/none", "no folder runs/none, and no environment of that name"),
        ("bench mujoco", 'unknown study "mujoco": did you mean "mujoco-hybrid"?'),
        ("bench mujoco-hybrid --jobs 0", "--jobs: expected 1 or more, got 0"),
        ("list hopper", 'unknown option or argument "hopper"'),
    ],
)
def test_a_mistake_is_one_line_and_status_2(line, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing was made"


# ----------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["", "train", "resume", "evaluate", "play", "plot", "list", "doctor", "bench"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert f"grpo-rl {command}" in capsys.readouterr().out.split("examples:")[1]


def test_a_damaged_agent_and_a_wrong_target_are_one_line(run, tmp_path, capsys):
    hurt = shutil.copytree(run, tmp_path / "hurt")
    (hurt / "model.zip").write_text("junk")
    for line, message in (
        (["evaluate", hurt], "model.zip is no zip-file, or a damaged one"),
        (["play", run, "--gif", tmp_path / "none" / "x.gif"], "there is no folder"),
        (["plot", run, "--out", tmp_path], "is a folder"),
    ):
        assert main([*map(str, line)]) == 2
        said = capsys.readouterr().err.strip()
        assert message in said
        assert len(said.splitlines()) == 1


def test_help_is_quick():
    def seconds() -> float:
        start = time.perf_counter()
        assert python("-m", "grpo_rl.cli", "--help").returncode == 0
        return time.perf_counter() - start

    # 0.05 s of one core here; the machine may be busy, so the best of three counts.
    assert min(seconds() for _ in range(3)) < 0.5
    heavy = "{'torch', 'numpy', 'gymnasium', 'stable_baselines3', 'yaml'}"
    done = python("-c", f"import sys, grpo_rl.cli; grpo_rl.cli.main([]); print({heavy} & set(sys.modules))")
    assert done.stdout.strip().endswith("set()")


# ---------------------------------------------------------------------------------------------------------------- wheel


@pytest.mark.slow
def test_the_wheel_trains_from_an_empty_folder(tmp_path):
    """Built from what is here, installed without its requirements, run where no checkout can be found."""
    if not (shipped() / "pyproject.toml").is_file():
        pytest.skip("needs a checkout")
    built = python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(shipped()))
    assert built.returncode == 0, built.stderr + built.stdout
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    wheel = str(next(tmp_path.glob("*.whl")))
    installed = python("-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(site), wheel)
    assert installed.returncode == 0, installed.stderr

    def installed_cli(*words: str) -> str:
        done = python("-m", "grpo_rl.cli", *words, cwd=empty, PYTHONPATH=str(site))
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(site) in python("-c", "import grpo_rl; print(grpo_rl.__file__)", cwd=empty, PYTHONPATH=str(site)).stdout
    assert all(f"\n{name} " in installed_cli("list") for name in names())
    installed_cli("train", "cartpole", *SHORT, "--steps", "300")
    made = next((empty / "runs").iterdir())
    assert (made / "model.zip").is_file()
    recipes = site / "grpo_rl" / "_recipes"
    assert (recipes / "experiments" / "mujoco-hybrid.yaml").is_file()
    assert not list(recipes.rglob("results"))
    assert (site / "grpo_rl" / "py.typed").is_file()
