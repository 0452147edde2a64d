"""`grpo-rl`: train, resume, evaluate, play, plot, list, doctor, bench. Each command imports what it needs when it runs.

A user's mistake is one line on stderr and exit status 2; a run that stopped early has 1, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from grpo_rl import __version__
from grpo_rl.errors import ConfigError, GRPOError, UntrustedError, did_you_mean

_EXAMPLES = """\
examples:
  grpo-rl train cartpole                                   half a minute on one core
  grpo-rl train hopper --seed 3 optimization.learning_rate=1e-4
  grpo-rl train --config my.yaml --steps 2e5
  grpo-rl evaluate runs/hopper-3-20260131-120000
  grpo-rl doctor Hopper-v5                                 can it be forked? does rendering work?
"""
_COMMANDS = {
    "train": (
        "train an agent from a recipe",
        """\
examples:
  grpo-rl train hopper
  grpo-rl train hopper --seed 3 --steps 3e5
  grpo-rl train hopper optimization.learning_rate=1e-4 'optimization.clip_range={start: 0.3, end: 0.1}'
  grpo-rl train --config my.yaml environment.kwargs.gravity=-5
  grpo-rl train hopper --print-config > my.yaml            a recipe of your own to start from
""",
    ),
    "resume": (
        "go on with a run that was stopped, as if it had never stopped",
        """\
examples:
  grpo-rl resume runs/hopper-0-20260131-120000             from its checkpoint, bit for bit where the env allows it
  grpo-rl resume runs/hopper-0-20260131-120000 --steps 1e6   train on, up to so many steps in all
""",
    ),
    "evaluate": (
        "play fresh episodes with a trained agent and report its returns",
        "examples:\n  grpo-rl evaluate runs/hopper-0-20260131-120000 --episodes 100\n",
    ),
    "play": (
        "watch a trained agent, in a window or as a GIF",
        """\
examples:
  grpo-rl play runs/hopper-0-20260131-120000               a window; without a display, a GIF in the run's folder
  grpo-rl play runs/hopper-0-20260131-120000 --gif hopper.gif
""",
    ),
    "plot": (
        "draw learning curves of runs into a PNG",
        "examples:\n  grpo-rl plot runs/hopper-*\n  grpo-rl plot runs/a runs/b --out compare.png\n",
    ),
    "list": (
        "list the recipes, and their scores where they were measured",
        "examples:\n  grpo-rl list\n  grpo-rl list --markdown      the table of agents/README.md\n",
    ),
    "doctor": (
        "say how a run was, or how an environment would be forked; report versions, rendering and GPUs",
        """\
examples:
  grpo-rl doctor
  grpo-rl doctor Hopper-v5
  grpo-rl doctor runs/hopper-0-20260131-120000             exit status 0: healthy; 1: there were findings
""",
    ),
    "bench": (
        "run what is missing of a study and write its report",
        """\
examples:
  grpo-rl bench mujoco-hybrid --jobs 4                     experiments/mujoco-hybrid.yaml
  grpo-rl bench my-study.yaml --out results                a study of your own; stop and start it as you like
  grpo-rl bench mujoco-hybrid --report                     only the report, from the runs that are there
""",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parsers()
    if words and not words[0].startswith("-") and words[0] not in commands:
        parser.error(f'unknown command "{words[0]}": {did_you_mean(words[0], commands)}')
    if not words:
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(words)
    if options.command is None:
        parser.error(f'unknown option "{words[0]}": {did_you_mean(words[0], ["--help", "--version"])}')
    try:
        if options.command == "train":
            # Settings may stand between options, where argparse does not look for them.
            options.words += [word for word in rest if not word.startswith("-")]
            rest = [word for word in rest if word.startswith("-")]
        if rest:
            known = [name for action in commands[options.command]._actions for name in action.option_strings]
            raise ConfigError(f'unknown option or argument "{rest[0]}": {did_you_mean(rest[0], known)}')
        return int(globals()[f"_{options.command}"](options) or 0)
    except UntrustedError as error:
        print(f"grpo-rl: {error} On this command line: --trust.", file=sys.stderr)
        return 2
    except GRPOError as error:
        print(f"grpo-rl: {error}", file=sys.stderr)
        return 130 if isinstance(error.__cause__, KeyboardInterrupt) else 2 if isinstance(error, ConfigError) else 1
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        print(f"grpo-rl: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("grpo-rl: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage, which --help gives."""
        self.exit(2, f"grpo-rl: {message} (see {self.prog} --help)\n")


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    kind: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(
        prog="grpo-rl", description="Group Relative Policy Optimization for control.", epilog=_EXAMPLES, **kind
    )
    parser.add_argument("--version", action="version", version=__version__)
    group = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    commands: dict[str, _Parser] = {
        name: group.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=examples, **kind)
        for name, (text, examples) in _COMMANDS.items()
    }
    train = commands["train"]
    train.add_argument(
        "words", nargs="*", metavar="RECIPE section.key=value", help="a recipe of `grpo-rl list`; settings"
    )
    train.add_argument("--config", metavar="FILE", help="a YAML recipe of your own instead of RECIPE")
    train.add_argument("--seed", help="short for training.seed=…")
    train.add_argument("--steps", help="short for training.steps=…")
    train.add_argument("--wandb", metavar="PROJECT", help="short for training.wandb=…: log to Weights & Biases too")
    train.add_argument("--out", default="runs", metavar="DIR", help="where the run's folder is made (default: runs)")
    train.add_argument("--print-config", action="store_true", help="print the whole recipe, with all options, and stop")
    resume = commands["resume"]
    resume.add_argument("run", metavar="RUN", help="a folder that train made")
    resume.add_argument("--steps", type=_steps, help="in all, where it should be more than was planned")
    evaluate = commands["evaluate"]
    evaluate.add_argument("run", metavar="RUN", help="a folder that train made")
    evaluate.add_argument("--episodes", type=int, help="of each kind: mode and sampled actions (default: the recipe's)")
    play = commands["play"]
    play.add_argument("run", metavar="RUN", help="a folder that train made")
    play.add_argument("--gif", metavar="FILE", help="record an episode into FILE instead of opening a window")
    for command in (evaluate, play):
        command.add_argument("--trust", action="store_true", help="let the run's model file execute the code in it")
    plot = commands["plot"]
    plot.add_argument("runs", nargs="+", metavar="RUN", help="folders that train made")
    plot.add_argument("--out", default="curves.png", metavar="FILE", help="the PNG (default: curves.png)")
    commands["list"].add_argument("--markdown", action="store_true", help="as a Markdown table")
    commands["doctor"].add_argument(
        "env", nargs="?", metavar="ENV_ID|RUN", help="a Gymnasium id to probe, or a run's folder"
    )
    bench = commands["bench"]
    bench.add_argument("study", metavar="STUDY", help="a name in experiments/, or a YAML file")
    bench.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time (default: one per core)")
    bench.add_argument("--out", metavar="DIR", help="of the results (default: results/<name> next to the study)")
    bench.add_argument("--report", action="store_true", help="start no run, only write the report")
    return parser, commands


def _steps(text: str) -> int:
    """A whole number of steps, 1e6 too; argparse reports what is none."""
    number = float(text)
    if number != int(number) or number < 1:
        raise ValueError
    return int(number)


def _train(options: argparse.Namespace) -> None:
    from grpo_rl.recipes import load_recipe, names

    overrides = [word for word in options.words if "=" in word]
    given = [word for word in options.words if "=" not in word] + ([options.config] if options.config else [])
    if len(given) != 1:
        raise ConfigError(
            f"expected one recipe, got {' and '.join(given) or 'none'}; recipes: {', '.join(names())}, or --config FILE"
        )
    overrides += [
        f"training.{key}={value}" for key in ("seed", "steps", "wandb") if (value := getattr(options, key)) is not None
    ]
    recipe = load_recipe(Path(options.config) if options.config else given[0], overrides)
    if options.print_config:
        from grpo_rl.lab.template import template

        print(template(recipe), end="")
        return
    from grpo_rl.lab.run import train_run

    train_run(recipe, Path(options.out))


def _resume(options: argparse.Namespace) -> None:
    from grpo_rl.lab.run import resume_run

    resume_run(Path(options.run), options.steps)


def _evaluate(options: argparse.Namespace) -> None:
    from grpo_rl.lab.build import open_run
    from grpo_rl.lab.run import evaluate_run

    recipe, agent = open_run(Path(options.run), options.trust, print)
    if options.episodes is not None:
        if options.episodes < 1:
            raise ConfigError(f"--episodes: expected 1 or more, got {options.episodes}")
        recipe.training.episodes = options.episodes
    evaluate_run(Path(options.run), agent, recipe)


def _play(options: argparse.Namespace) -> int:
    from grpo_rl.lab.build import open_run, read_run, talks
    from grpo_rl.lab.completions import converse
    from grpo_rl.lab.film import film, has_display, show

    run = Path(options.run)
    if options.gif is None and has_display() and not talks(read_run(run)):
        show(run, options.trust)
        return 0
    recipe, agent = open_run(run, options.trust, print)  # a mistake is reported here, not in the process that records
    if talks(recipe):
        converse(agent, sys.stdin, print)
        return 0
    gif = Path(options.gif) if options.gif else run / "episode.gif"
    _check_file(gif)
    reason = film(run, gif, options.trust)
    print(f"no GIF: {reason}" if reason else f"one episode: {gif}")
    return 1 if reason else 0


def _check_file(path: Path) -> None:
    """A mistake in where to write is said before the work is done."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"cannot write {path}: {what}; give a file in a folder that exists")


def _plot(options: argparse.Namespace) -> None:
    from grpo_rl.lab.plots import plot_runs, read_progress

    for run in options.runs:
        if not (Path(run) / "progress.csv").is_file():
            raise ConfigError(f"{run} is no run: expected a folder with a progress.csv, such as runs/hopper-0-…")
    _check_file(Path(options.out))
    plot_runs({Path(run).name: read_progress(Path(run)) for run in options.runs}, Path(options.out))
    print(options.out)


def _list(options: argparse.Namespace) -> None:
    from grpo_rl.lab.report import markdown_table, recipe_table

    table = recipe_table()
    if options.markdown:
        print("\n".join(markdown_table(table)))
        return
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\ntrain one: grpo-rl train NAME    see it: grpo-rl train NAME --print-config")


def _doctor(options: argparse.Namespace) -> int:
    if options.env and Path(options.env).is_dir():
        from grpo_rl.lab import health

        return health.report(Path(options.env))
    import torch

    from grpo_rl.forks.probe import probe_fork
    from grpo_rl.lab.film import offscreen_backends
    from grpo_rl.lab.run import LANGUAGE, versions
    from grpo_rl.recipes import check_env_id, shipped

    if options.env:
        path = "/" in options.env or "\\" in options.env
        where = (
            f"grpo-rl doctor: no folder {options.env}, and no environment of that name" if path else "grpo-rl doctor"
        )
        check_env_id(options.env, where)
    for name, value in versions(*LANGUAGE).items():
        print(f"{name:18} {value}")
    print(f"{'recipes':18} {shipped()}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"{'GPU':18} {', '.join(gpus) or 'none that torch can use; small policies are as fast without'}")
    code = "import mujoco; mujoco.GLContext(64, 64).make_current()"
    for backend in offscreen_backends():
        environment = os.environ | {"MUJOCO_GL": backend}
        works = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0
        print(f"{f'GL, {backend}':18} {'works off screen' if works else 'does not work'}")
    if not options.env:
        return 0
    report = probe_fork(options.env)
    print(f"{'forks':18} {report}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    from grpo_rl.lab.report import write_report
    from grpo_rl.lab.study import bench, finished, load_study

    if options.jobs < 1:
        raise ConfigError(f"--jobs: expected 1 or more, got {options.jobs}")
    study = load_study(options.study)
    folder = Path(options.out) if options.out else study.folder()
    rows = finished(study, folder) if options.report else bench(study, folder, options.jobs)
    missing = study.missing(rows, folder)
    if rows:
        note = f" (missing: {textwrap.shorten(', '.join(missing), 200, placeholder=' …')})" if missing else ""
        print(f"report: {write_report(study, rows, folder)}{note}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
