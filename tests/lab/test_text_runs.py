"""Recipes of language models: what is built, how it is evaluated, what a person reads afterwards."""

import io

import numpy as np
import pytest
from test_resume import Presses, the_same

from grpo_rl.cli import main
from grpo_rl.errors import ConfigError
from grpo_rl.lab.build import build_agent, build_env, env_maker, load_agent, make_env
from grpo_rl.lab.completions import converse, table
from grpo_rl.lab.health import examine, read_log
from grpo_rl.lab.plots import read_progress
from grpo_rl.lab.run import evaluate, evaluate_run, resume_run, train_run
from grpo_rl.lab.training import RunStopped
from grpo_rl.recipes import load_recipe
from grpo_rl.text import Conversation, PromptEnv, PromptVecEnv, TurnVecEnv, char_tokenizer
from grpo_rl.text.tasks import Prompt
from grpo_rl.text.tokenizing import Encoder

SHORT = ["training.steps=64", "training.episodes=3", "optimization.n_epochs=1", "optimization.n_steps=16"]
SHORT += ["optimization.batch_size=null"]


@pytest.fixture(autouse=True)
def untaught(tmp_path, monkeypatch):
    """Base models that know nothing will do."""
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("grpo_rl.text.toy.teach", lambda *arguments: None)


def test_a_text_recipe_trains_on_one_set_and_is_evaluated_on_the_other():
    recipe = load_recipe("reversal")
    env = build_env(recipe)
    assert isinstance(env, PromptVecEnv)
    held_out = env_maker(recipe.environment)()
    assert isinstance(held_out, PromptEnv)
    trained, other = ({task.source[row].text for row in range(50)} for task in (env.task, held_out))
    assert not trained & other


def test_the_dataset_of_an_evaluation_is_read_once():
    make = env_maker(load_recipe("reversal").environment)
    first, second = make(), make()
    assert first.source.rows is second.source.rows and first is not second


def test_a_dialogue_is_built_and_evaluated_in_whole_conversations():
    recipe = load_recipe("dialogue")
    assert isinstance(build_env(recipe), TurnVecEnv)
    assert isinstance(make_env(recipe.environment), Conversation)

    class Halving:
        """Guesses the middle of what the conversation leaves possible, and reads it from the ids."""

        def predict(self, texts, deterministic):
            return [str(self.guess(text)) for text in texts], None

        def guess(self, text):
            tokenizer = char_tokenizer("01234567-?<>=")
            low, high, number = 0, 7, ""
            for character in tokenizer.decode(list(text.ids)).partition("?")[2]:
                if character in "<>":
                    low, high = (int(number) + 1, high) if character == ">" else (low, int(number) - 1)
                number = number + character if character.isdigit() else ""
            return (low + high) // 2

    played = evaluate(Halving(), env_maker(recipe.environment), 10, True, seed=0)
    assert (played.lengths <= 4).all()
    np.testing.assert_allclose(played.returns, 1 - (played.lengths - 1) / 4)


def test_a_run_leaves_completions_to_read_and_a_model_that_loads(tmp_path):
    said = []
    recipe = load_recipe("reversal", SHORT)
    run = train_run(recipe, tmp_path / "runs", said.append)
    text = (run / "completions.md").read_text(encoding="utf-8")
    assert text.startswith("## ") and "| prompt | completion | reward |" in text and ">`" in text
    rewards = [row["reward"] for row in read_log(run) if "reward" in row]
    shown = [float(line.split()[-1]) for line in said if "steps  mean reward " in line]
    assert shown and set(shown) <= {round(reward, 3) for reward in rewards}, "of the rollout, not of the last 100"
    assert read_progress(run)[1].tolist() == rewards
    assert any("episodes, sampled actions: 0.000 ± 0.000" in line for line in said)
    assert any("completions to read" in line for line in said) and not any("GIF" in line for line in said)
    assert (run / "curve.png").is_file() and (run / "evaluation.json").is_file()
    assert examine(run).settings["advantage_scale"] == "group", "as the agent's own monitor has it"
    again = evaluate_run(run, load_agent(recipe, run / "model.zip"), recipe, said.append)
    assert again["mode"]["returns"] == [0.0] * 3


@pytest.mark.parametrize(
    "override",
    ["environment.wrappers=['gymnasium.wrappers:OrderEnforcing']", "environment.curriculum={difficulty: 0.5}"],
)
def test_what_texts_cannot_have_is_said(override):
    with pytest.raises(ConfigError, match=r"environment\.(wrappers|curriculum): not for texts"):
        build_env(load_recipe("reversal", [override]))


def test_an_argument_that_the_task_does_not_know():
    with pytest.raises(ConfigError, match=r"cannot make environment .*reversal.py:Reversal: .*lenght"):
        build_env(load_recipe("reversal", ["environment.kwargs.lenght=3"]))


def test_settings_reach_the_agent_of_texts():
    recipe = load_recipe("countdown", ["environment.kwargs.max_new_tokens=5", "optimization.group_size=4"])
    agent = build_agent(recipe, build_env(recipe))
    assert (agent.env.max_new_tokens, agent.group_size, agent.env.reward_names) == (5, 4, ("reached", "well_formed"))


def test_a_table_of_completions_by_hand():
    """Two prompts of two: the best and the worst of each, whatever is in them."""

    class Env:
        encoder = Encoder(char_tokenizer("ab|`\n"))

    prompts = [Prompt((3,), text, text, i, {}) for i, text in enumerate(("a|b", "line\nline"))]
    a, b, bar, tick, newline, eos = 3, 4, 5, 6, 7, 1
    ids = [[a, eos], [b, bar, tick], [newline], []]
    said = {"env": Env, "prompts": prompts, "completion_ids": ids, "rewards": [0.25, 1.0, np.nan, np.nan]}
    assert table(said, 1234).splitlines() == [
        "## 1,234 tokens",
        "",
        "| prompt | completion | reward |",
        "|---|---|---|",
        "| `a\\|b` | `b\\|ˋ` | 1 |",
        "| `a\\|b` | `a<eos>` | 0.25 |",
        "| `line⏎line` | `⏎` | nan |",
        "| `line⏎line` | (nothing) | nan |",
        "",
    ]


@pytest.mark.parametrize("name", ["reversal", "dialogue"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(name, tmp_path):
    """Prompts, abilities, sampled tokens and weights, bit for bit."""
    recipe = load_recipe(name, [*SHORT, "training.steps=1200", "environment.kwargs.grouping=ability"])
    whole = train_run(recipe, tmp_path / "whole", say=lambda line: None)
    with pytest.raises(RunStopped, match="go on: grpo-rl resume"):
        train_run(recipe, tmp_path / "runs", say=Presses())
    (run,) = (tmp_path / "runs").iterdir()
    the_same(resume_run(run, say=lambda line: None), whole)


def test_play_answers_what_is_typed(tmp_path, monkeypatch, capsys):
    recipe = load_recipe("reversal", SHORT)
    run = train_run(recipe, tmp_path / "runs", say=lambda line: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("abc>\nde>\n"))
    assert main(["play", str(run)]) == 0
    agent = load_agent(recipe, run / "model.zip")
    expected = [agent.predict(text, deterministic=True)[0] for text in ("abc>", "de>")]
    assert capsys.readouterr().out.splitlines()[1:] == ["type a prompt; end with ctrl-D", *expected]


def test_a_prompt_that_cannot_be_answered_does_not_end_the_conversation():
    class Agent:
        def predict(self, text, deterministic):
            if not text:
                raise ConfigError("the prompt is empty")
            return text[::-1], None

    said = []
    converse(Agent(), ["ab\n", "\n", "cd\n"], said.append)
    assert said[1:] == ["ba", "the prompt is empty", "dc"]
