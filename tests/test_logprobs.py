"""Token log-probabilities in chunks, against the plain formula, by value, gradient and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch as th
from tiny_models import Largest

from grpo_rl.logprobs import candidate_logits, token_logprobs


def plain(hidden: Any, weight: Any, targets: Any, temperature: float = 1.0, bias: Any = None) -> Any:
    log_p = ((hidden @ weight.T + (0 if bias is None else bias)) / temperature).log_softmax(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def test_by_hand() -> None:
    """Logits (0, ln 3): p = (1/4, 3/4), H = ln 4 − (3/4) ln 3; at temperature 1/2 they are (0, ln 9): p = (.1, .9)."""
    hidden, weight = th.tensor([[1.0]]), th.tensor([[0.0], [math.log(3)]])
    log_prob, entropy = token_logprobs(hidden, weight, th.tensor([1]))
    assert log_prob.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert token_logprobs(hidden, weight, th.tensor([0]), 0.5)[0].item() == pytest.approx(math.log(0.1))


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_plain_formula(chunk: int | None, with_bias: bool) -> None:
    th.manual_seed(0)
    hidden, weight = th.randn(2, 7, 5, dtype=th.float32), th.randn(11, 5)
    bias = th.randn(11) if with_bias else None
    targets, on_log_prob, on_entropy = th.randint(11, (2, 7)), th.randn(2, 7), th.randn(2, 7)
    results = []
    for function in (plain, lambda h, w, t, T, b: token_logprobs(h, w, t, T, bias=b, chunk=chunk)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        h, w, b = leaves if with_bias else [*leaves, None]
        log_prob, entropy = function(h, w, targets, 0.6, b)
        gradients = th.autograd.grad((on_log_prob * log_prob + on_entropy * entropy).sum(), leaves)
        results.append((log_prob, entropy, *gradients))
    for expected, got in zip(*results, strict=True):
        th.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradient_within_candidates_by_finite_differences() -> None:
    """top_k and top_p leave 3 of 6 logits here, well apart from the others, so that none changes sides."""
    weight = th.eye(6, dtype=th.float32)
    hidden = th.tensor([[2.0, 1.7, 1.2, -1.0, -1.5, -2.0]]).requires_grad_()
    target = th.tensor([1])

    def value(h: th.Tensor) -> th.Tensor:
        log_prob, entropy = token_logprobs(h, weight, target, 0.7, top_k=4, top_p=0.95)
        return (log_prob + 0.5 * entropy).sum()

    (gradient,) = th.autograd.grad(value(hidden), hidden)
    step = 1e-2
    for i in range(6):
        ahead, behind = (hidden.detach().clone() for _ in range(2))
        ahead[0, i] += step
        behind[0, i] -= step
        assert gradient[0, i].item() == pytest.approx(((value(ahead) - value(behind)) / (2 * step)).item(), abs=2e-3)
    assert (gradient[0, 3:] == 0).all()


def test_candidates_by_hand() -> None:
    """p = (.5, .3, .15, .05). top_k=2 keeps the first two; top_p=.8 as well, .81 takes the third; `keep` adds one."""
    logits = th.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def kept(**settings: Any) -> list[int]:
        return candidate_logits(logits, **settings).isfinite().nonzero()[:, 1].tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.79) == [0, 1]
    assert kept(top_p=0.81) == [0, 1, 2]
    assert kept(top_p=1e-9) == [0], "never none"
    assert kept(top_k=2, top_p=0.6) == [0], "within the first two, .5/.8 is enough"
    assert kept(top_k=2, keep=th.tensor([3])) == [0, 1, 3]
    assert kept(top_k=9) == [0, 1, 2, 3]


def test_a_target_that_left_the_candidates_has_a_finite_log_probability() -> None:
    """Of (.5, .3, .2) with top_k=1, target 2 joins the first: .2/.7."""
    logits = th.tensor([[0.5, 0.3, 0.2]]).log()
    log_prob, _ = token_logprobs(logits, None, th.tensor([2]), top_k=1)
    assert log_prob.item() == pytest.approx(math.log(0.2 / 0.7))


def test_logits_may_be_given_themselves() -> None:
    th.manual_seed(0)
    logits = th.randn(4, 9, requires_grad=True)
    targets = th.randint(9, (4,))
    log_prob, _ = token_logprobs(logits, None, targets, chunk=3)
    expected = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    th.testing.assert_close(log_prob, expected)
    th.testing.assert_close(*(th.autograd.grad(x.sum(), logits)[0] for x in (log_prob, expected)))


def test_half_precision_states_give_fp32_log_probabilities() -> None:
    th.manual_seed(0)
    hidden, weight, targets = th.randn(6, 8), th.randn(50, 8), th.randint(50, (6,))
    exact, _ = token_logprobs(hidden.bfloat16().float(), weight, targets)
    with th.autocast("cpu", dtype=th.bfloat16):
        log_prob, entropy = token_logprobs(hidden.bfloat16(), weight, targets)
    assert log_prob.dtype == entropy.dtype == th.float32
    th.testing.assert_close(log_prob, exact, rtol=1e-6, atol=1e-6)


def test_no_tensor_of_rows_times_vocabulary_is_made_forward_or_backward() -> None:
    """512 rows at 1k and at 8k tokens: the largest tensor is a chunk's logits, or the head's own gradient (V, D)."""
    for vocabulary, chunk in ((1024, 64), (8192, 8)):
        hidden, weight = th.randn(512, 4, requires_grad=True), th.randn(vocabulary, 4, requires_grad=True)
        with Largest() as largest:
            log_prob, entropy = token_logprobs(hidden, weight, th.randint(vocabulary, (512,)), chunk=chunk)
            (log_prob + entropy).sum().backward()
        assert largest.elements == 64 * 1024
