"""The peer of text-vs-trl: TRL's trainer gets our settings and stops where we stop, and one of its updates is ours."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from tiny_models import tiny, tokenizer

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError
from grpo_rl.lab.records import Run
from grpo_rl.lab.study import load_study, run_once
from grpo_rl.recipes import load_object, shipped
from grpo_rl.text import PromptEnv

TRL = load_object(f"{shipped() / 'experiments' / 'trl_peer.py'}:TRL")
installed = pytest.mark.skipif(
    find_spec("trl") is None, reason="TRL is not installed: pip install -c constraints.txt trl"
)


def total(completion_ids, **columns):
    """The sum of the ids: hardly ever two completions get the same."""
    return [float(sum(ids)) for ids in completion_ids]


def agent(cls, **settings):
    """On two prompts, four completions each, of up to 4 tokens; by SGD, whose updates show the gradients."""
    env = PromptEnv(["abc", "defg"], total, tokenizer(), max_new_tokens=4)
    policy = {"model": tiny, "optimizer_class": th.optim.SGD, "optimizer_kwargs": {}}
    defaults = {"group_size": 4, "n_steps": 8, "learning_rate": 0.1, "n_epochs": 2, "max_grad_norm": 1e9}
    return cls("CausalLMPolicy", env, policy_kwargs=policy, seed=0, device="cpu", **(defaults | settings))


# --------------------------------------------------------------------------------------------------------- without TRL


class Trainer:
    """Stands for TRL's: samples two tokens a completion for ever, until its callback says stop."""

    made: "list[Trainer]" = []  # noqa: RUF012

    def __init__(self, *, args, train_dataset, reward_funcs, callbacks, optimizers, **given):
        self.args, self.rows, self.rewards, self.given = args, train_dataset, reward_funcs, given
        self.callback, (self.optimizer, self.schedule) = callbacks[0], optimizers
        self.rates, self.steps = [], 0
        self.made.append(self)

    def remove_callback(self, kind):
        assert kind.__name__ == "PrinterCallback"

    def train(self):
        control, n = SimpleNamespace(should_training_stop=False), self.args.generation_batch_size
        columns = {key: [self.rows[0][key]] * n for key in self.rows[0] if key != "prompt"}
        while not control.should_training_stop:
            for reward in self.rewards:
                reward(prompts=["abc"] * n, completions=["ab"] * n, completion_ids=[[4, 5]] * n, **columns)
            for _ in range(self.args.num_iterations):
                self.steps += 1
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.step()
                self.schedule.step()
                self.callback.on_step_end(self.args, SimpleNamespace(global_step=self.steps), control)


@pytest.fixture
def stub(monkeypatch):
    """A `trl` and a `datasets` that do nothing; the trainers that were made."""
    trl, datasets = ModuleType("trl"), ModuleType("datasets")
    trl.GRPOTrainer = Trainer
    trl.GRPOConfig = lambda **given: SimpleNamespace(
        **given, steps_per_generation=given["generation_batch_size"] // given["per_device_train_batch_size"]
    )
    datasets.Dataset = SimpleNamespace(from_list=list)
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(Trainer, "made", [])
    return Trainer.made


class Steps(BaseCallback):
    """Timesteps at which callbacks were called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        self.seen.append(self.num_timesteps)
        return True


def test_tokens_are_counted_and_the_rate_falls_with_them(stub):
    """8 completions of 2 tokens a rollout: 16, 32, 48; 40 are asked for, so the third rollout is the last."""
    steps = Steps()
    agent(TRL, learning_rate=lambda left: 0.1 * left).learn(40, steps)
    assert steps.seen == [16, 32, 48]
    # Two epochs each at what is left after the rollout: 1 − 16/40, 1 − 32/40 and nothing.
    assert stub[0].rates == pytest.approx([0.06, 0.06, 0.02, 0.02, 0, 0])


def test_trl_gets_the_same_settings(stub):
    agent(TRL, batch_size=4, micro_batch_size=2, clip_range=0.3, loss_type="bnpo").learn(1)
    args = stub[0].args
    assert (args.num_generations, args.generation_batch_size, args.num_iterations) == (4, 8, 2)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 4
    assert args.per_device_train_batch_size == 2
    assert (args.epsilon, args.loss_type, args.scale_rewards, args.beta) == (0.3, "bnpo", "group", 0.0)
    assert (args.max_completion_length, args.temperature, args.seed) == (4, 1.0, 0)
    assert stub[0].steps == 4, "two optimiser steps in each of two epochs"
    assert [row["prompt"] for row in stub[0].rows] == ["abc", "defg"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"kl_coef": 0.1}, "kl_coef=0.1: the TRL peer trains with 0.0 only"), ({"loss_type": "rloo"}, 'loss_type="rloo"')],
)
def test_what_is_not_compared_is_refused(stub, settings, message):
    with pytest.raises(ConfigError, match=message):
        agent(TRL, **settings).learn(1)


def test_without_trl_the_way_to_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ConfigError, match="the peer needs TRL: pip install -c"):
        agent(TRL).learn(1)


def test_a_study_evaluates_the_peer_as_it_evaluates_us(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path))
    monkeypatch.setattr("grpo_rl.text.toy.teach", lambda *arguments: None)  # a base model that knows nothing will do
    study = load_study("text-vs-trl")
    study.tasks["reversal"]["training"] = {"steps": 1000}
    study.evaluation.every, study.evaluation.episodes = 500, 3
    rows = run_once(study, Run("reversal", "trl", 1))
    assert [row.step for row in rows] == [0, 500, 1000]
    assert {row.agent for row in rows} == {"trl"}
    assert len(stub) == 1


# ------------------------------------------------------------------------------------------------------------- with TRL


@installed
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_an_update_of_trl_is_an_update_of_ours(loss_type, tmp_path):
    """TRL is given the completions that we sampled; two epochs of SGD then end at the same weights."""
    ours, theirs = (agent(cls, loss_type=loss_type, advantage_scale="group") for cls in (GRPO, TRL))
    before = th.nn.utils.parameters_to_vector(ours.policy.parameters()).detach()
    ours.learn(1)
    buffer = ours.rollout_buffer
    said = {}
    for n, ids in enumerate(buffer.tokens):
        said.setdefault(tuple(buffer.prompts[buffer.prompt_of[n]]), []).append(ids)
    end, callback = theirs._setup_learn(1, None)
    trainer = theirs.trainer(end, callback, str(tmp_path))

    def sample(prompt_ids, *given):
        left = {prompt: list(ids) for prompt, ids in said.items()}
        return [left[tuple(ids)].pop(0) for ids in prompt_ids], None

    trainer._generate_single_turn = sample
    trainer.train()
    assert theirs.num_timesteps == ours.num_timesteps == sum(map(len, buffer.tokens))
    moved = [th.nn.utils.parameters_to_vector(model.policy.parameters()).detach() - before for model in (ours, theirs)]
    assert moved[0].abs().max() > 1e-4
    th.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-6)


@installed
def test_the_peer_learns_with_trl():
    model = agent(TRL).learn(60)
    assert model.num_timesteps >= 60
    assert isinstance(model.predict("abc")[0], str)
    assert np.isfinite(th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().numpy()).all()
