"""What text-vs-ppo computes from its numbers, and that its functions run, on the smallest model."""

import numpy as np

from grpo_rl.lab.records import Table
from grpo_rl.lab.study import load_study
from grpo_rl.recipes import PACKAGE, load_object

ROOT = PACKAGE.parent
MEASURES, PAGE = ROOT / "experiments" / "text_vs_ppo.py", ROOT / "docs" / "make_text_vs_ppo.py"


def test_scores_at_equal_seconds_are_interpolated_by_seed():
    """At 3 s the first run is half-way from 0 to 1, the second a quarter of the way from 0 to 2: (0.5 + 0.5) / 2."""
    curves = np.array([[[2.0, 0.0], [4.0, 1.0]], [[2.0, 0.0], [6.0, 2.0]]])
    assert load_object(f"{MEASURES}:at_seconds")(curves, 3.0).tolist() == [0.5]


def test_a_change_is_in_per_cent_of_the_rival():
    columns = ["model", "agent", "peak", "CPU s an iteration", "reply, CPU ms", "with its values, CPU ms"]
    found = Table("", columns, [["3M", "grpo", 60.0, 2.0, 8.0, None], ["3M", "ppo-head", 90.0, 3.0, 9.0, 10.0]])
    change = load_object(f"{PAGE}:change")
    assert change(found, "3M", "ppo-head", "peak") == "−33 %"
    assert change(found, "3M", "ppo-head", "CPU s an iteration") == "+50 %", "3 s hold 1.5 iterations of 2 s"
    assert change(found, "3M", "ppo-head", "reply, CPU ms") == "−20 %", "8 ms beside 10 ms with values"
    assert change(found, "20M", "ppo-head", "peak") == change(None, "3M", "ppo-head", "peak") == "–"


def test_agents_are_told_apart_by_their_value_functions_only():
    study = load_study("text-vs-ppo")
    shared = [{**agent, "optimization": dict(agent["optimization"])} for agent in study.agents.values()]
    for agent in shared:
        for name in ("group_size", "value_head", "gae_lambda", "vf_coef", "learning_rate", "n_epochs"):
            agent["optimization"].pop(name, None)
    assert [agent["optimization"] for agent in shared] == [{}, {}, {}]
    assert study.tasks["replies"]["optimization"]["n_steps"] % study.agents["grpo"]["optimization"]["group_size"] == 0


def test_a_reply_has_a_value_for_each_of_its_tokens():
    """Of the head, and of the critic, which has a cache of its own; none where they are not asked."""
    agent_of, reply = (load_object(f"{MEASURES}:{name}") for name in ("agent_of", "reply"))
    for name in ("ppo-head", "ppo-critic"):
        policy = agent_of(name, 0, "0.3M")[0].policy
        policy.value_net.weight.data.normal_()
        values = reply(policy, True)
        assert len(values) == 6
        assert len(set(values)) > 1
    assert reply(policy, False) == []
