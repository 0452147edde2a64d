"""Generation: a prompt read once for its group samples what each row alone would, with exact probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th
from tiny_models import tiny

from grpo_rl.policies.causal_lm import CausalLM
from grpo_rl.text.generation import Generation, generate, inverse_cdf
from grpo_rl.text.tokenizing import left_pad

PROMPTS = [[3, 4, 5], [7], [2, 3, 4, 5, 6, 7, 8, 9], [11, 12]]
FAMILIES = ["gpt2", "llama", "qwen", "gemma"]
SHARP = {"temperature": 0.6, "top_k": 8, "top_p": 0.9}


def lm(family: str = "llama", dropout: float = 0.0, **settings: Any) -> CausalLM:
    return CausalLM(tiny(family, dropout=dropout), **settings)


def sampled(model: CausalLM, prompts: Any = PROMPTS, members: int = 3, tokens: int = 10, **settings: Any) -> Generation:
    settings = {"seeds": np.arange(len(prompts) * members), "eos_ids": (1, 6)} | settings
    return generate(model, prompts, members, tokens, **settings)


def rows_of(prompts: list[list[int]], said: Generation, members: int) -> tuple[dict[str, th.Tensor], th.Tensor]:
    """The completions as the update sees them."""
    ids, seen = map(th.as_tensor, left_pad(prompts, 0))
    length = max(map(len, said.ids))
    tokens, trained = th.zeros(len(said.ids), length, dtype=th.long), th.zeros(len(said.ids), length, dtype=th.bool)
    for n, row in enumerate(said.ids):
        tokens[n, : len(row)], trained[n, : len(row)] = th.tensor(row), True
    of = th.arange(len(said.ids)) // members
    rows = {"prompts": ids, "prompt_mask": seen, "prompt_of": of, "tokens": tokens, "trained": trained}
    return rows, tokens[trained]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [True, False])
def test_ratio_is_1_before_the_first_update(family: str, share: bool) -> None:
    """T = 0.6, top-k and top-p, dropout 0.1 in the model: what was sampled is what the update computes."""
    model = lm(family, dropout=0.1, share_prefix=share, **SHARP)
    model.train(True)  # dropout stays off
    said = sampled(model, **SHARP)
    rows, targets = rows_of(PROMPTS, said, 3)
    log_prob, entropy = model.log_probs(model.trained_states(rows), targets)
    th.testing.assert_close(
        (log_prob - th.as_tensor(np.concatenate(said.log_probs))).exp(), th.ones(len(targets)), rtol=0, atol=2e-5
    )
    th.testing.assert_close(entropy, th.as_tensor(np.concatenate(said.entropies)), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_row_is_the_row_alone(family: str) -> None:
    model = lm(family)
    together = sampled(model, members=1)
    for p, prompt in enumerate(PROMPTS):
        alone = sampled(model, [prompt], 1, seeds=[p])
        assert alone.ids[0] == together.ids[p]
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[p], rtol=0, atol=1e-5)
    rows, targets = rows_of(PROMPTS, together, 1)
    batched, _ = model.log_probs(model.trained_states(rows), targets)
    single = []
    for p, prompt in enumerate(PROMPTS):
        ids = th.tensor([prompt + together.ids[p]])
        logits = model.lm(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        single.append(logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1))
    th.testing.assert_close(batched, th.cat(single), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_is_the_prompt_repeated(family: str) -> None:
    model = lm(family)
    shared = sampled(model, members=3)
    repeated = sampled(model, [p for p in PROMPTS for _ in range(3)], 1)
    assert shared.ids == repeated.ids
    for a, b in zip(shared.log_probs, repeated.log_probs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert (shared.finished == repeated.finished).all()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen"])
def test_sharing_the_prompt_in_the_update_leaves_every_gradient(family: str) -> None:
    model = lm(family)
    rows, targets = rows_of(PROMPTS, sampled(model, members=3), 3)
    gradients = []
    for share in (True, False):
        model.share_prefix = share
        assert model._shares(4, 12, 8, rows["tokens"].shape[1] - 1) == share
        model.zero_grad()
        log_prob, _ = model.log_probs(model.trained_states(rows), targets)
        (log_prob * th.linspace(-1, 1, len(log_prob))).sum().backward()
        gradients.append(th.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert gradients[0].norm() > 1
    th.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)


def test_a_rows_sample_depends_on_its_seed_alone() -> None:
    """Other batches, other orders, other neighbours: the same tokens."""
    model = lm()
    whole = sampled(model, seeds=np.arange(100, 112))
    in_pieces = sampled(model, seeds=np.arange(100, 112), rows_at_once=1)
    assert whole.ids == in_pieces.ids
    backwards = sampled(model, PROMPTS[::-1], 3, seeds=np.arange(100, 112).reshape(4, 3)[::-1].ravel())
    assert [backwards.ids[(3 - n // 3) * 3 + n % 3] for n in range(12)] == whole.ids
    assert sampled(model, seeds=np.full(12, 5)).ids[0] == sampled(model, seeds=np.full(12, 5)).ids[1]


def test_tokens_come_as_often_as_their_probability() -> None:
    """3000 first tokens of one prompt at T = 0.7: every frequency is within 4 standard errors of its probability."""
    model = lm()
    said = sampled(model, [[3, 4, 5]], 3000, 1, seeds=np.arange(3000), temperature=0.7, rows_at_once=3000)
    p = (model.lm(input_ids=th.tensor([[3, 4, 5]])).logits[0, -1] / 0.7).softmax(-1).detach().numpy()
    frequency = np.bincount([ids[0] for ids in said.ids], minlength=26) / 3000
    assert (np.abs(frequency - p) < 4 * np.sqrt(p * (1 - p) / 3000) + 1e-3).all()


def test_inverse_cdf_by_hand() -> None:
    """p = (1/8, 0, 3/8, 1/2): [0, 1/8) is the first token's, [1/8, 1/2) the third's, the rest the fourth's."""
    p = th.tensor([[0.125, 0.0, 0.375, 0.5]]).expand(6, 4)
    uniform = th.tensor([0.0, 0.1249, 0.125, 0.4999, 0.5, 1 - 2**-53], dtype=th.float64)
    for block in (1, 2, 3, 256):
        assert inverse_cdf(p, uniform, block).tolist() == [0, 0, 2, 2, 3, 3]
    assert inverse_cdf(th.tensor([[0.0, 1.0, 0.0]]), th.tensor([1 - 2**-53], dtype=th.float64), 2).tolist() == [1]


def test_inverse_cdf_is_the_plain_one() -> None:
    th.manual_seed(0)
    p = (3 * th.randn(500, 1000)).softmax(-1)
    uniform = th.rand(500, dtype=th.float64)
    below = p.double().cumsum(-1)
    plain = th.searchsorted(below, uniform[:, None] * below[:, -1:], right=True).squeeze(-1)
    assert th.equal(inverse_cdf(p, uniform), plain)


def test_only_candidates_are_sampled() -> None:
    model = lm()
    said = sampled(model, [[3, 4, 5]], 500, 1, top_k=3, rows_at_once=500)
    best = model.lm(input_ids=th.tensor([[3, 4, 5]])).logits[0, -1].topk(3).indices.tolist()
    assert {ids[0] for ids in said.ids} == set(best)


def test_without_seeds_it_is_greedy() -> None:
    model = lm()
    said = sampled(model, members=1, seeds=None)
    for prompt, ids in zip(PROMPTS, said.ids, strict=True):
        logits = model.lm(input_ids=th.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids


def test_ends_of_a_row() -> None:
    """Several EOS ids, none, a stop, and the limit: the end is the last id, `finished` tells it from the limit."""
    model = lm()
    said = sampled(model, eos_ids=(1, 6, 9), tokens=20)
    for ids, finished in zip(said.ids, said.finished, strict=True):
        assert not set(ids[:-1]) & {1, 6, 9}
        assert finished == (ids[-1] in (1, 6, 9))
        assert finished or len(ids) == 20
    assert 0 < said.finished.sum() < 12
    endless = sampled(model, eos_ids=(), tokens=5)
    assert not endless.finished.any()
    assert {len(ids) for ids in endless.ids} == {5}
    stopped = sampled(model, eos_ids=(), tokens=5, stop=lambda ids: len(ids) == 2)
    assert stopped.finished.all()
    assert stopped.ids == [ids[:2] for ids in endless.ids]


def test_lengths_of_log_probs_and_entropies_are_those_of_the_ids() -> None:
    said = sampled(lm())
    assert [len(ids) for ids in said.ids] == [len(x) for x in said.log_probs] == [len(x) for x in said.entropies]
    assert all(x.dtype == np.float32 for x in said.log_probs)
    assert all((x <= 0).all() for x in said.log_probs) and all((x >= 0).all() for x in said.entropies)


class Counting(CausalLM):
    """Counts the tokens that the model reads."""

    read = 0

    def hidden(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.read += ids.numel()
        return super().hidden(ids, *args, **kwargs)


def test_a_prompt_is_read_once_and_finished_rows_leave() -> None:
    """Two prompts of 8 for 2 × 4 rows are 16 tokens read; then each row reads what it said, but for its last token."""
    model = Counting(tiny())
    said = sampled(model, [PROMPTS[2], PROMPTS[2][::-1]], 4, 12, eos_ids=(1, 6, 9))
    assert len({len(ids) for ids in said.ids}) > 1
    assert model.read == 16 + sum(len(ids) - 1 for ids in said.ids)
