"""Log-probabilities and entropies of tokens from hidden states, without ever holding all logits.

log π(a) = z_a − logsumexp(z) with z = hidden · weightᵀ / temperature, in chunks of rows: memory does not grow with
rows × vocabulary, neither forward nor backward (each chunk's logits are computed again there). Everything after the
matrix product is fp32.
"""

from typing import Any

import torch as th
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""Logits held at a time when `chunk` is None: 16 MiB in fp32, whatever the vocabulary."""
FLOOR = -1e4
"""Stands for log 0 where it is multiplied by 0."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log π(target) and the entropy of π for each row, with the gradient of both.

    π is the distribution that is sampled from: softmax(z / temperature) within the `top_k` and `top_p` candidates. The
    target always counts as a candidate, so that its log-probability stays finite when an update has moved it out.

    Args:
        hidden: (…, D) hidden states, any float type; the logits (…, V) themselves with `weight` None.
        weight: (V, D) of the language-model head, or None.
        targets: (…) int64 token ids.
        temperature: above 0.
        bias: (V,) of the head.
        top_k: candidates kept, the most likely ones; 0: all.
        top_p: the smallest set of most likely candidates with at least this probability, as `transformers`; 1: all.
        chunk: rows whose logits are held at once. None: as many as CHUNK_ELEMENTS allow.

    Returns:
        Log-probabilities (…) and entropies (…) in nats, fp32.
    """
    shape = targets.shape
    rows = hidden.reshape(-1, hidden.shape[-1])
    vocabulary = hidden.shape[-1] if weight is None else len(weight)
    chunk = chunk or max(CHUNK_ELEMENTS // vocabulary, 1)
    with th.autocast(hidden.device.type, enabled=False):
        log_prob, entropy = _TokenLogProbs.apply(
            rows, weight, bias, targets.reshape(-1), temperature, top_k, top_p, chunk
        )
    return log_prob.reshape(shape), entropy.reshape(shape)


def candidate_logits(logits: Tensor, top_k: int = 0, top_p: float = 1.0, keep: Tensor | None = None) -> Tensor:
    """Logits (M, V) with −inf outside the candidates; `keep` (M,) are ids that always stay.

    Ties with the last candidate stay too. First top_k, then top_p among what is left, as in `transformers`.
    """
    kept = None
    if 0 < top_k < logits.shape[-1]:
        kept = logits >= logits.topk(top_k, dim=-1).values[..., -1:]
    if top_p < 1:
        inside = logits if kept is None else logits.masked_fill(~kept, -th.inf)
        ordered, order = inside.sort(dim=-1, descending=True)
        probability = ordered.softmax(dim=-1)
        chosen = probability.cumsum(dim=-1) - probability < top_p  # what comes before does not reach top_p yet
        nucleus = th.zeros_like(chosen).scatter_(-1, order, chosen)
        kept = nucleus if kept is None else kept & nucleus
    if kept is None:
        return logits
    if keep is not None:
        kept = kept.scatter(-1, keep.unsqueeze(-1), True)
    return logits.masked_fill(~kept, -th.inf)


def entropy_of(log_p: Tensor) -> Tensor:
    """−Σ p log p (M,) of log-probabilities (M, V); −inf counts as 0."""
    return -th.einsum("mv,mv->m", log_p.exp(), log_p.clamp(min=FLOOR))


class _TokenLogProbs(th.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.settings = temperature, top_k, top_p, chunk
        ctx.save_for_backward(hidden, weight, bias, targets)
        log_prob = hidden.new_empty(len(hidden), dtype=th.float32)
        entropy = th.empty_like(log_prob)
        for first in range(0, len(hidden), chunk):
            part = slice(first, first + chunk)
            log_p = _log_softmax(hidden[part], weight, bias, targets[part], *ctx.settings[:3])
            log_prob[part] = log_p.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
            entropy[part] = entropy_of(log_p)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> Any:
        """∂logπ(a)/∂z = onehot(a) − p and ∂H/∂z = −p · (log p + H), both divided by the temperature."""
        hidden, weight, bias, targets = ctx.saved_tensors
        temperature, top_k, top_p, chunk = ctx.settings
        entropy_counts = bool(grad_entropy.any())  # an entropy that is only logged has a gradient of zeros
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = th.empty_like(hidden) if needs_hidden else None
        grad_weight = th.zeros_like(weight, dtype=th.float32) if needs_weight else None
        grad_bias = th.zeros_like(bias, dtype=th.float32) if needs_bias else None
        for first in range(0, len(hidden), chunk):
            part = slice(first, first + chunk)
            p = _log_softmax(hidden[part], weight, bias, targets[part], temperature, top_k, top_p)
            on_log_prob, on_entropy = grad_log_prob[part].unsqueeze(-1), grad_entropy[part].unsqueeze(-1)
            if entropy_counts:
                log_p = p.clamp(min=FLOOR)
                grad = p.exp_()
                grad.mul_(log_p.add_(entropy_of(log_p).unsqueeze(-1)).mul_(-on_entropy).sub_(on_log_prob))
            else:
                grad = p.exp_().mul_(-on_log_prob)
            grad.scatter_add_(-1, targets[part].unsqueeze(-1), on_log_prob).div_(temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            if weight is None:
                if grad_hidden is not None:
                    grad_hidden[part] = grad.to(hidden.dtype)
                continue
            if grad_hidden is not None:
                grad_hidden[part] = grad.to(weight.dtype) @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[part].float())
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _log_softmax(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor:
    """log p (m, V), fp32; −inf outside the candidates."""
    logits = hidden if weight is None else th.nn.functional.linear(hidden.to(weight.dtype), weight, bias)
    logits = logits.float()
    logits = logits if temperature == 1 else logits / temperature
    return candidate_logits(logits, top_k, top_p, targets).log_softmax(dim=-1)
