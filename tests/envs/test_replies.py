"""The counter: three rewards by hand, prompts that fit them, and a distinct-n."""

import math

import numpy as np
import pytest

from grpo_rl import GRPO
from grpo_rl.recipes import PACKAGE, load_object
from grpo_rl.text.toy import tiny_llama

FILE = PACKAGE.parent / "envs" / "replies.py"


def of(name):
    return load_object(f"{FILE}:{name}")


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("here is tea ann", 1.0),
        ("here is tea", 0.5),
        ("sure tea for ben", 0.0),  # somebody else's
        ("tea cake for ann", 0.0),  # something else, too
        ("", 0.0),
    ],
)
def test_quality_serves_who_asked_with_what_was_asked_for(text, worth):
    assert of("quality")([text], name=["ann"], thing=["tea"]) == [worth]


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("sure tea for ann", 2 / 4),  # "sure" and "for" were said before
        ("here is tea ann", 1.0),
        ("tea tea", 1 / 2),
        ("", 0.0),
    ],
)
def test_diversity_counts_words_that_the_reply_before_did_not_have(text, worth):
    assert of("diversity")([text], before=["sure cake for ben"]) == [worth]


def test_likelihood_by_hand():
    """6 forms, 12 names, 10 things: 720 replies of 34 different words; 1 is added to each pair, so 35 to each first."""
    assert len(of("REPLIES")) == 720
    assert len(of("WORDS")) == 34
    steps = [
        (120 + 1) / (720 + 35),  # a reply begins with "sure"
        (12 + 1) / (120 + 35),  # sure → tea, for 12 names
        (12 + 1) / (72 + 35),  # tea → for; "tea" comes once in 6 forms for 12 names
        (10 + 1) / (120 + 35),  # for → ann, for 10 things
        (40 + 1) / (60 + 35),  # ann ends 4 of 6 forms, for 10 things
    ]
    assert of("likelihood")("sure tea for ann") == pytest.approx(sum(map(math.log, steps)) / 5)


def test_fluency_is_one_for_usual_replies_and_zero_for_words_that_never_meet():
    fluency, likelihood, replies = of("fluency"), of("likelihood"), of("REPLIES")
    usual, lowest = np.mean([likelihood(text) for text in replies]), -math.log(35)
    assert fluency(["now gets sure"]) == [0.0]
    (value,) = fluency(["tea for ann"])
    assert value == pytest.approx((likelihood("tea for ann") - lowest) / (usual - lowest))
    assert 0 < value < 1
    assert min(fluency(replies)) > 0.8
    assert fluency(["sure tea for ann"]) > fluency(["sure for tea ann"])


def test_distinct_n_by_hand():
    texts = ["a b c", "a b d"]  # pairs: ab bc ab bd
    assert of("distinct")(texts) == 3 / 4
    assert of("distinct")(texts, 1) == 4 / 6
    assert of("distinct")(["a"]) == 0.0


def test_the_teacher_serves_right_and_repeats_its_form():
    rng = np.random.default_rng(0)
    rows = [of("draw")(rng) for _ in range(400)]
    answers = [row["answer"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("name", "thing", "before")}
    assert of("quality")(answers, **columns) == [1.0] * 400
    assert all(row["prompt"].endswith(f" : {row['before']} . {row['name']} {row['thing']} :") for row in rows)
    again = np.mean([value < 1 for value in of("diversity")(answers, **columns)])
    assert abs(again - (0.7 + 0.3 / 6)) < 0.08, "the same form shares two words or more with the reply before"


def test_words_are_tokens_and_survive():
    tokenizer = of("tokenizer")()
    for text in (of("REPLIES")[0], of("draw")(np.random.default_rng(0))["prompt"]):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text.split())
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "settings", [{"group_size": 4}, {"group_size": 1, "value_head": True}, {"group_size": 1, "critic": "separate"}]
)
def test_critic_free_and_both_kinds_of_ppo_train_on_it(settings):
    critic = {"critic": settings.pop("critic")} if "critic" in settings else {}
    env = of("Replies")(rows=8)
    model = tiny_llama(of("tokenizer")(), hidden=16, layers=1)
    agent = GRPO(
        "CausalLMPolicy",
        env,
        n_steps=8,
        policy_kwargs={"model": model, **critic},
        device="cpu",
        seed=0,
        **({"value_head": True} if critic else {}),
        **settings,
    )
    agent.learn(64)
    assert agent.num_timesteps >= 64
    assert agent.env.reward_names == ("quality", "fluency", "diversity")
    assert agent.rollout_buffer.reward_matrix.shape == (8, 3)
    assert (agent.rollout_buffer.values is None) == (settings["group_size"] == 4)
