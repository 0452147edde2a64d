"""What text-vs-ppo measures beside its runs: parts of the score, and at three sizes costs and reward per CPU second.

Agents take turns in one process with one thread, and CPU time is counted, so that other work on the machine weighs on
all alike. Memory is measured in a process of its own for each number: `python experiments/text_vs_ppo.py AGENT SIZE`.
"""

import copy
import inspect
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.lab.records import Run, Table
from grpo_rl.lab.study import load_study
from grpo_rl.recipes import load_object
from grpo_rl.text.toy import teach, tiny_llama

HERE = Path(__file__).parent
REPLIES = HERE.parent / "envs" / "replies.py"
AGENTS = ("grpo", "ppo-head", "ppo-critic")
SIZES = {"0.3M": (128, 2), "3M": (320, 3), "20M": (640, 5)}
"""Width and layers of the Llamas."""
LEARNING = {"0.3M": (450, 40, 3), "3M": (300, 25, 2), "20M": (150, 8, 1)}
"""Of `gains`: steps in which the base is taught, rollouts, and seeds."""
HELD_OUT, TENTHS, ROUNDS, REPLY, CALLS = 300, 10, 3, 6, 30


# --- scores ---------------------------------------------------------------------------------------------------------


def scores() -> Table:
    """The parts of the score after equal tokens, and after the CPU seconds that the fastest agent takes for them."""
    study, found = load_study(HERE / "text-vs-ppo.yaml"), {name: [] for name in AGENTS}  # type: ignore[var-annotated]
    for seed in study.seeds:
        for name in AGENTS:
            agent, recipe = agent_of(name, seed)
            agent.learn(recipe.training.steps, course := Course(recipe.training.steps))
            found[name].append(course.rows)
    curves = {name: np.array(rows) for name, rows in found.items()}  # (seeds, 1 + TENTHS, CPU s and the scores)
    equal = min(float(curve[:, -1, 0].mean()) for curve in curves.values())
    rows: list[list[Any]] = [["before", "", *map(float, curves["grpo"][:, 0, 1:].mean(axis=0)), None]]
    for name, curve in curves.items():
        rows.append([name, "equal tokens", *map(float, curve[:, -1, 1:].mean(axis=0)), float(curve[:, -1, 0].mean())])
    for name, curve in curves.items():
        rows.append([name, "equal CPU seconds", *map(float, at_seconds(curve, equal)), equal])
    return Table(
        "The parts of the score",
        ["agent", "after", "total", "quality", "fluency", "diversity", "distinct-2", "CPU s"],
        rows,
        f"Means over {len(study.seeds)} seeds of {HELD_OUT} sampled replies to held-out prompts. Evaluations are a"
        " tenth of a run apart; scores at equal CPU seconds are interpolated between them. distinct-2 is no reward:"
        " different pairs of words over all pairs, in all replies.",
    )


def at_seconds(curve: np.ndarray, seconds: float) -> np.ndarray:
    """Scores (K,), mean over seeds, on curves (seeds, evaluations, 1 + K) whose first column is CPU seconds."""
    return np.array([[np.interp(seconds, run[:, 0], column) for column in run.T[1:]] for run in curve]).mean(axis=0)


class Course(BaseCallback):
    """Scores sampled replies to held-out prompts before training and at every tenth of it."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.rows = steps, []  # type: ignore[var-annotated]

    def _on_training_start(self) -> None:
        self.began, self.env = time.process_time(), load_object(f"{REPLIES}:Replies")(rows=HELD_OUT, data_seed=1)
        self._score()

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps >= len(self.rows) * self.steps / TENTHS:
            self._score()

    def _on_training_end(self) -> None:
        self._score()

    def _on_step(self) -> bool:
        return True

    def _score(self) -> None:
        if len(self.rows) > TENTHS:
            return
        paused, state = time.process_time(), np.random.get_state()
        np.random.seed(1_000_000 + len(self.rows))
        rows = [self.env.source[i] for i in range(HELD_OUT)]
        said = self.model.predict([row.text for row in rows])[0]  # type: ignore[arg-type]
        np.random.set_state(state)
        matrix = self.env.rewards(rows, said, [()] * HELD_OUT)
        total = self.env.rewards.weighted(matrix).mean()
        distinct = load_object(f"{REPLIES}:distinct")(said)
        self.rows.append([paused - self.began, total, *matrix.mean(axis=0), distinct])
        self.began += time.process_time() - paused


# --- costs ----------------------------------------------------------------------------------------------------------


def costs() -> Table:
    """Parameters, memory, CPU seconds an iteration and the latency of a reply at three sizes."""
    rows: list[list[Any]] = []
    for size in SIZES:
        agents = {name: agent_of(name, 0, size)[0] for name in AGENTS}
        seconds = iteration_seconds(agents)
        delays = latency(agents)
        for name, agent in agents.items():
            trained = sum(p.numel() for p in agent.policy.parameters() if p.requires_grad)
            call = [sys.executable, __file__, name, size]
            peak = float(subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()[-1])
            rows.append([size, name, trained, 16 * trained / 2**20, peak, seconds[name], *delays[name]])
    return Table(
        "Costs",
        [
            "model",
            "agent",
            "trained parameters",
            "parameters, gradients and Adam, MiB",
            "peak over the imports, MiB",
            "CPU s an iteration",
            "reply, CPU ms",
            "with its values, CPU ms",
        ],
        rows,
        "Random weights, 128 replies of up to 8 tokens an iteration, two passes of the update. Fourth column: 16"
        " bytes a parameter. Peak: resident memory of a process of its own that builds the agent and makes two"
        f" iterations, minus what its imports took. CPU seconds: medians of {ROUNDS} rounds by turns. Reply: {REPLY}"
        f" tokens for a prompt, medians of {CALLS} by turns; with its values: the value function reads each token as it"
        " is said.",
    )


def iteration_seconds(agents: dict[str, Any]) -> dict[str, float]:
    """CPU seconds of an iteration: medians of `ROUNDS` by turns, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in agents}
    for _ in range(1 + ROUNDS):
        for name, agent in agents.items():
            began = time.process_time()
            agent.learn(1, reset_num_timesteps=False)
            found[name].append(time.process_time() - began)
    return {name: median(times[1:]) for name, times in found.items()}


@th.no_grad()
def latency(agents: dict[str, Any]) -> dict[str, list[float | None]]:
    """CPU milliseconds of a reply by the policy alone, and with its value function in the path (None without one)."""
    cases = [(name, valued) for name, agent in agents.items() for valued in (False, True)[: 1 + agent.policy.has_value]]
    times: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
    for _ in range(2 + CALLS):
        for name, valued in cases:
            began = time.process_time()
            reply(agents[name].policy, valued)
            times[name, valued].append(1000 * (time.process_time() - began))
    return {
        name: [median(times[name, valued][2:]) if (name, valued) in times else None for valued in (False, True)]
        for name in agents
    }


def reply(policy: Any, valued: bool) -> list[float]:
    """Says `REPLY` tokens, the most likely ones, to one prompt; the value of each state if `valued`."""
    ids = th.tensor([policy.encoder.ids_of("ben cake : sure cake for ben . ann tea :")])
    lm, values = policy.backbone, []
    bodies = [lm.body] + ([policy.critic] if valued and policy.critic is not None else [])
    keyword = "cache" if "cache" in inspect.signature(lm.body.forward).parameters else "past_key_values"
    caches, seen = [lm.new_cache() for _ in bodies], 0
    for _ in range(REPLY):
        position = th.arange(seen, seen + ids.shape[1]).unsqueeze(0)
        states = [
            body(input_ids=ids, position_ids=position, use_cache=True, **{keyword: cache}).last_hidden_state[:, -1]
            for body, cache in zip(bodies, caches, strict=True)
        ]
        seen += ids.shape[1]
        if valued:
            values.append(policy.value_net(states[-1]).item())
        ids = lm.logits(states[0]).argmax(dim=-1, keepdim=True)
    return values


def peak(name: str, size: str) -> float:
    """MiB that building an agent and two iterations add at most to a process with its imports. Linux only."""
    agent_of("grpo", 0, "0.3M")  # what is imported when it is used
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    agent = agent_of(name, 0, size)[0]
    for _ in range(2):
        agent.learn(1, reset_num_timesteps=False)
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    """MiB of this process, by the name that /proc/self/status has for it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


# --- gains ----------------------------------------------------------------------------------------------------------


def gains() -> Table:
    """Reward gained per CPU second of training at three sizes."""
    rows: list[list[Any]] = []
    for size, (steps, rollouts, seeds) in LEARNING.items():
        base, found = taught(size, steps), {name: [] for name in AGENTS}  # type: ignore[var-annotated]
        for seed in range(seeds):
            for name in AGENTS:
                agent, recipe = agent_of(name, seed, size, base)
                tokens = rollouts * recipe.optimization["n_steps"] * 5
                agent.learn(tokens, log := Rewards())
                found[name].append((log.means[0], float(np.mean(log.means[-3:])), log.seconds))
        for name, runs in found.items():
            first, last, seconds = (float(x) for x in np.mean(runs, axis=0))
            rows.append([size, name, seeds, first, last, seconds, 1000 * (last - first) / seconds])
    return Table(
        "Reward gained per CPU second",
        ["model", "agent", "seeds", "reward at first", "at last", "CPU s", "gained per 1,000 CPU s"],
        rows,
        "Mean reward of the replies that were trained on: of the first rollout, and of the last three. A base is taught"
        f" for each size, in {', '.join(f'{steps} ({size})' for size, (steps, *_) in LEARNING.items())} steps. The"
        " settings are those chosen at 0.3M, with learning rates divided by the model's width in units of 128.",
    )


class Rewards(BaseCallback):
    """Mean reward of each rollout, and the CPU seconds of all."""

    def _on_training_start(self) -> None:
        self.means, self.began = [], time.process_time()  # type: ignore[var-annotated]

    def _on_rollout_end(self) -> None:
        self.means.append(float(self.locals["rollout_buffer"].rewards.sum(axis=0).mean()))

    def _on_training_end(self) -> None:
        self.seconds = time.process_time() - self.began

    def _on_step(self) -> bool:
        return True


def taught(size: str, steps: int) -> Any:
    """A base of that size, taught as that of envs/replies.py."""
    tokenizer, examples, batch = (load_object(f"{REPLIES}:{name}") for name in ("tokenizer", "examples", "BATCH"))
    model, rng = tiny_llama(tokenizer(), *SIZES[size]), np.random.default_rng(0)
    teach(model, tokenizer(), lambda: examples(rng, batch), steps, 3e-3 if size == "0.3M" else 1e-3)
    return model.eval()


def agent_of(name: str, seed: int, size: str | None = None, model: Any = None) -> tuple[Any, Any]:
    """An agent of the study and its recipe; with a size, on a random Llama of that size, or on a copy of `model`."""
    recipe = load_study(HERE / "text-vs-ppo.yaml").recipe(Run("replies", name, seed))
    recipe.resources.threads = 1
    if size is not None:
        recipe.optimization["learning_rate"]["start"] *= SIZES["0.3M"][0] / SIZES[size][0]
        llama = tiny_llama(load_object(f"{REPLIES}:tokenizer")(), *SIZES[size]) if model is None else model
        recipe.model["model"] = copy.deepcopy(llama)
    return build_agent(recipe, build_env(recipe)), recipe


def main(arguments: Sequence[str]) -> None:
    th.set_num_threads(1)
    print(peak(*arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
