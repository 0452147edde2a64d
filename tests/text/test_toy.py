"""Base models that are made on the spot: small, reproducible, kept."""

import numpy as np
import pytest
import torch as th

from grpo_rl.errors import ConfigError
from grpo_rl.text import base_model, char_tokenizer
from grpo_rl.text.toy import TOLD_APART, cache_dir, garble, tiny_llama


def examples(rng, n):
    return [(f"{word}>", word[::-1]) for word in ("".join(rng.choice(list("ab"), 2)) for _ in range(n))]


def answers(model, tokenizer, prompts):
    ids = th.tensor([tokenizer(prompt)["input_ids"] for prompt in prompts])
    with th.no_grad():
        for _ in range(3):
            ids = th.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return [tokenizer.decode(row[3:].tolist()) for row in ids]


def test_the_size_of_the_toy_base():
    """25 tokens: 25·128 embeddings, twice 4·128² attention + 3·128·256 MLP + 2·128 norms, and 128 of the last norm."""
    model = tiny_llama(char_tokenizer("abcdefghijklmnopqrstu>"))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 25 * 128 + 2 * (4 * 128**2 + 3 * 128 * 256 + 2 * 128) + 128 == 331_520
    assert not model.training


def test_a_random_model_is_its_seeds_and_nobody_elses():
    tokenizer = char_tokenizer("ab>")
    th.manual_seed(0)
    expected = th.rand(1)
    th.manual_seed(0)
    weights = [tiny_llama(tokenizer, hidden=16, seed=seed).lm_head.weight for seed in (1, 1, 2)]
    assert th.equal(weights[0], weights[1]) and not th.equal(weights[0], weights[2])
    assert th.rand(1) == expected


def test_it_learns_from_examples_and_is_kept(tmp_path):
    tokenizer = char_tokenizer("ab>")
    model = base_model(tokenizer, examples, steps=60, noise=0.0, batch_size=16, cache=tmp_path)
    assert answers(model, tokenizer, ["aa>", "ab>", "ba>"]) == ["aa<eos>", "ba<eos>", "ab<eos>"]

    def none(rng, n):
        assert n == TOLD_APART, "only the few that tell tasks apart are drawn"
        return examples(rng, n)

    again = base_model(tokenizer, none, steps=60, noise=0.0, batch_size=16, cache=tmp_path)
    assert all(th.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert again.lm_head.weight is again.model.embed_tokens.weight, "still tied"
    assert [path.name for path in tmp_path.iterdir()] == [next(tmp_path.iterdir()).name], "nothing half-made is left"


def test_making_it_says_so_and_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grpo_rl.text.toy.QUIET", 0.0)
    for said in (["making a base model, once: 2 steps", "base model: 0% of 2", "base model: 50% of 2"], []):
        base_model(char_tokenizer("ab>"), examples, steps=2, batch_size=2, cache=tmp_path)
        shown = capsys.readouterr()
        lines = shown.err.splitlines()
        assert len(lines) == len(said) and all(line.startswith(words) for line, words in zip(lines, said, strict=True))
        assert not shown.out


def test_on_a_terminal_there_is_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    base_model(char_tokenizer("ab>"), examples, steps=2, batch_size=2, cache=tmp_path)
    shown = capsys.readouterr().err
    assert "base model:   0%|" in shown and "0/2" in shown


def test_another_task_is_another_model(tmp_path):
    tokenizer = char_tokenizer("ab>")
    for settings in ({"steps": 1}, {"steps": 2}, {"steps": 1, "seed": 1}):
        base_model(tokenizer, examples, **{"batch_size": 2, "cache": tmp_path, **settings})
    assert len(list(tmp_path.iterdir())) == 3


def test_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("GRPO_RL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "grpo_rl"


def test_noise_changes_the_share_of_characters_that_it_says():
    """Half of 2 letters is drawn as it was: noise 0.4 leaves 1 - 0.4·½ = 0.8."""
    pairs = [("a" * 1000, "a" * 1000), ("b" * 1000, "b" * 1000)]
    assert garble(pairs, np.random.default_rng(0), 0.0) == pairs
    noisy = garble(pairs, np.random.default_rng(0), 0.4)
    assert [prompt for prompt, _ in noisy] == [prompt for prompt, _ in pairs]
    assert noisy[0][1].count("a") / 1000 == pytest.approx(0.8, abs=0.05)


def test_answers_must_be_able_to_end():
    tokenizer = char_tokenizer("ab>")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="needs an EOS token"):
        base_model(tokenizer, examples)
