"""Returns, group baselines and advantages: pure functions of tensors, fp32 throughout.

Axes: buffers are (T, N). A column holds *segments* one after another: runs of steps, each from a root to its end.

- `ends` (T, N) bool: the segment ends AFTER this step. `tails` (T, N): the value beyond that end (0 if terminated).
- `group` (T, N) int64: the root that the step's segment started from, any integers. `age` (T, N) int64: steps since it.
- `mask` (T, N) bool: False for rows that do not count (frozen, dropped). What they hold is not read; it may be NaN.

Where we deviate from the GRPO paper (arXiv 2402.03300): credit is each step's reward-to-go, not one outcome per member
(`outcome_returns` gives that form), and members are compared at equal age only, among those still alive there: counting
the dead as 0 rewards the sole survivor. Equal returns in a group give advantage exactly 0, however their mean rounds.
"""

from typing import Literal

import torch as th
from torch import Tensor

from grpo_rl.errors import ConfigError, did_you_mean

Baseline = Literal["leave_one_out", "mean", "weighted"]
Scale = Literal["none", "group", "batch"]
Compression = Literal["tanh", "layer_norm"]
BASELINES = ("leave_one_out", "mean", "weighted")
SCALES = ("none", "group", "batch")
COMPRESSIONS = ("tanh", "layer_norm")


# --- masked statistics ------------------------------------------------------------------------------------------------
def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the entries where `mask` is True: the denominator is their number. 0 when there is none. Scalar."""
    return x.mean() if mask is None else th.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def masked_std(x: Tensor, mask: Tensor | None = None, correction: int = 1) -> Tensor:
    """Standard deviation where `mask` is True: denominator their number − `correction` (1: sample, 0: population).

    0 when there are no more than `correction` entries, and exactly 0 when all are equal. Scalar.
    """
    return _deviations(x, mask, correction)[1]


def masked_standardize(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """(x − mean)/(std + eps) where `mask` is True, with the sample std: SB3 PPO's `normalize_advantage`.

    A single entry is left unchanged, because it has no std; equal entries become exactly 0; masked entries become 0.
    """
    deviation, std, count = _deviations(x, mask, correction=1)
    kept = x if mask is None else th.where(mask, x, 0)
    return th.where(count > 1, deviation / (std + eps), kept)


def weighted_standardize(x: Tensor, weight: Tensor, eps: float = 1e-8) -> Tensor:
    """(x − Σwx/Σw)/(std + eps) over rows (M,), with the std weighted alike: `masked_standardize` for equal weights.

    The variance is Σw(x − mean)²/Σw, divided by 1 − Σ(w/Σw)², which is (M − 1)/M for equal ones. With importance
    weights these are the moments under the policy that the weights stand for. Equal entries become exactly 0.
    """
    share = weight / weight.sum()
    shifted = x - x.amin()
    deviation = shifted - (share * shifted).sum()
    deviation = th.where(shifted.amax() > 0, deviation, 0)  # the shares need not sum to 1 exactly
    variance = (share * deviation.square()).sum() / (1 - share.square().sum()).clamp(min=1e-6)
    return deviation / (variance.sqrt() + eps)


def _deviations(x: Tensor, mask: Tensor | None, correction: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x − mean, std, count), measured from the smallest entry: equal entries deviate by exactly 0, not by an ulp."""
    if mask is None:
        mask = th.ones_like(x, dtype=th.bool)
    if x.numel() == 0:
        return x, x.new_zeros(()), x.new_zeros(())
    count = mask.sum()
    shifted = th.where(mask, x - th.where(mask, x, th.inf).amin(), 0)
    deviation = th.where(mask, shifted - shifted.sum() / count.clamp(min=1), 0)
    variance = deviation.square().sum() / (count - correction).clamp(min=1)
    return deviation, th.where(count > correction, variance, 0).sqrt(), count


# --- returns ----------------------------------------------------------------------------------------------------------
def reward_to_go(rewards: Tensor, ends: Tensor, tails: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + γ·(tails_t where the segment ends, else R_{t+1}), computed backwards inside each segment.

    Args:
        rewards: (T, N) reward of each step.
        ends: (T, N) bool. Every column is cut at T-1: set `ends[-1] = True`, and `tails[-1]` to what lies beyond.
        tails: (T, N) value beyond an end, before discounting; not read elsewhere.
        gamma: Discount per step, 0 … 1.

    Returns:
        (T, N) float32.

    Raises:
        ConfigError: The shapes differ, or some column is left open at T-1.
    """
    _check_segments(rewards, ends, tails)
    rewards, tails = rewards.float(), tails.float()
    returns = th.empty_like(rewards)
    beyond = tails[-1]
    for t in range(len(rewards) - 1, -1, -1):
        beyond = rewards[t] + gamma * th.where(ends[t], tails[t], beyond)
        returns[t] = beyond
    return returns


def gae(
    rewards: Tensor,
    values: Tensor,
    ends: Tensor,
    tails: Tensor,
    gamma: float,
    lam: float,
    behaviour_ratio: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), cut at every end.

    δ_t = r_t + γ·(tails_t where the segment ends, else V_{t+1}) − V_t;  A_t = δ_t + γλ·A_{t+1} within the segment.

    Of steps that another policy took, q_t = `behaviour_ratio` corrects for what came after them, as V-trace does
    (arXiv 1802.01561, ρ̄ = c̄ = 1): A_t = δ_t + γλ·min(1, q_{t+1})·A_{t+1}, and the value's target is
    V_t + min(1, q_t)·A_t. The action at t itself is left to the ratio of the loss.

    Args:
        rewards, values, ends, tails: (T, N), as in `reward_to_go`; at a time limit `tails` is V(true next obs).
        gamma: Discount per step, 0 … 1.
        lam: λ, 0 (one step) … 1 (whole segment).
        behaviour_ratio: (T, N) π/μ of each action, with π the policy to judge and μ the one that acted. None: they are
            the same.

    Returns:
        advantages (T, N) and returns (T, N), the value's targets, advantages + values unless q < 1; float32.

    Raises:
        ConfigError: The shapes differ, or some column is left open at T-1.
    """
    _check_segments(rewards, ends, tails, values)
    rewards, values, tails = rewards.float(), values.float(), tails.float()
    next_values = th.where(ends, tails, values.roll(-1, dims=0))
    deltas = rewards + gamma * next_values - values
    advantages = th.empty_like(deltas)
    trace = None if behaviour_ratio is None else behaviour_ratio.float().clamp(max=1)
    later = th.zeros_like(deltas[-1])
    for t in range(len(deltas) - 1, -1, -1):
        advantages[t] = deltas[t] + gamma * lam * th.where(ends[t], 0, later)
        later = advantages[t] if trace is None else trace[t] * advantages[t]
    return advantages, (advantages if trace is None else trace * advantages) + values


def alive_tail(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """r̄/(1 − γ), with r̄ the mean reward over `mask`: what lies beyond a cut for a member still alive, without a critic.

    Scalar float32, 0 when γ = 1. It is the same for every member, so that only being alive or dead tells them apart.
    """
    mean = masked_mean(rewards.float(), mask)
    return mean / (1 - gamma) if gamma < 1 else th.zeros_like(mean)


def outcome_returns(returns: Tensor, ends: Tensor) -> Tensor:
    """Outcome credit: every step gets the return at the first step of its segment. (T, N) in, (T, N) float32 out."""
    _check_shapes(returns, ends)
    rows = th.arange(len(returns), device=returns.device).unsqueeze(1)
    first_row = th.where(_starts(ends), rows, 0).cummax(dim=0).values
    return returns.float().gather(0, first_row)


def segment_lengths(ends: Tensor, mask: Tensor) -> Tensor:
    """Counted steps in the segment that each step belongs to: (T, N) int64, 0 where `mask` is False."""
    _check_shapes(ends, mask)
    segment = _starts(ends).long().cumsum(dim=0) - 1
    lengths = th.zeros_like(segment).scatter_add_(0, segment, mask.long()).gather(0, segment)
    return th.where(mask, lengths, 0)


def _starts(ends: Tensor) -> Tensor:
    """(T, N) bool: the step is the first of its segment."""
    return th.cat([th.ones_like(ends[:1]), ends[:-1]])


# --- baselines and advantages -----------------------------------------------------------------------------------------
def group_baseline(
    returns: Tensor,
    group: Tensor,
    age: Tensor,
    mask: Tensor,
    kind: Baseline = "leave_one_out",
    weights: Tensor | None = None,
) -> Tensor:
    """What the others got: a step is compared with steps of its own group at its own age, where `mask` is True.

    - "leave_one_out": mean of the other members' returns (RLOO, arXiv 2402.14740). The policy gradient is unbiased.
    - "mean": mean of all n members, itself included (GRPO). The gradient is (1 − 1/n) of the unbiased one.
    - "weighted": Σ w·R / Σ w over all members (OPO, arXiv 2505.23585, with w = segment length).

    A step without an alive sibling is compared with the steps of other groups alive at its age (their weighted mean for
    "weighted"); without any of those, with itself, so that its advantage is 0.

    Args:
        returns: (T, N) returns.
        group, age, mask: (T, N), see the module. Rows of a group may lie anywhere, several members in one column.
        kind: See above.
        weights: (T, N) positive weights, for "weighted" only.

    Returns:
        (T, N) float32, 0 where `mask` is False.

    Raises:
        ConfigError: Unknown kind, weights missing or superfluous, or shapes that differ.
    """
    _check_name("baseline", kind, BASELINES)
    if (kind == "weighted") != (weights is not None):
        given = "no weights" if weights is None else "weights"
        raise ConfigError(
            f'baseline "{kind}" came with {given}: "weighted" needs weights (T, N), the others take none.'
        )
    _check_shapes(returns, group, age, mask, *([] if weights is None else [weights]))
    value, cell, age = returns[mask].float(), _cells(group[mask], age[mask]), age[mask]
    weight = th.ones_like(value) if weights is None else weights[mask].float()

    # Sums are taken of differences to a member of the sum, so that equal returns have exactly their own value as mean.
    count, lowest = _total(th.ones_like(value), cell), _lowest(value, cell)
    above = value - lowest
    if kind == "leave_one_out":
        siblings = lowest + (_total(above, cell) - above) / (count - 1).clamp(min=1)
    else:
        siblings = lowest + _total(weight * above, cell) / _total(weight, cell)

    floor = _lowest(value, age)
    surplus = weight * (value - floor)
    rest = _total(weight, age) - weight  # at this age without the step itself; its whole group, where this is read
    others = floor + (_total(surplus, age) - surplus) / rest
    has_others = _total(th.ones_like(value), age) > count
    baseline = th.where(count > 1, siblings, th.where(has_others, others, value))
    return _unpack(baseline, mask)


def group_advantages(
    returns: Tensor,
    group: Tensor,
    age: Tensor,
    mask: Tensor,
    *,
    baseline: Baseline = "leave_one_out",
    baseline_discount: float = 1.0,
    scale: Scale = "none",
    weights: Tensor | None = None,
) -> Tensor:
    """Group-relative advantage A = R − baseline_discount · baseline, then scaled.

    - scale "none": as it is (Dr. GRPO, RLOO).
    - scale "group": GRPO's z-score (R − mean)/(std + 1e-4) among members alive at the same age, sample std, as TRL (the
      paper leaves it open). The centre is the mean with itself for either baseline: R − leave-one-out is the same times
      n/(n−1), with n members alive. Equal returns have advantage 0, and so has a step without an alive sibling.
    - scale "batch": (A − mean)/(std + 1e-8) over all counted steps, sample std: SB3's normalisation, once a batch.

    Args:
        returns, group, age, mask, baseline, weights: See `group_baseline`.
        baseline_discount: 0 … 1. Below 1, (1 − discount)·baseline stays in. Leave-one-out is then still unbiased, as it
            does not depend on the step's own action, but noisier: a group of equal returns moves the policy too.
        scale: See above.

    Returns:
        (T, N) float32, 0 where `mask` is False.

    Raises:
        ConfigError: As `group_baseline`; and scale "group" with a discounted or weighted baseline, where a group of
            nearly equal returns has an advantage without bound.
    """
    _check_name("scale", scale, SCALES)
    if scale == "group":
        if baseline == "weighted" or baseline_discount != 1.0:
            raise ConfigError(
                f'scale "group" centres on the mean; got baseline "{baseline}", baseline_discount {baseline_discount}. '
                'Use baseline "leave_one_out" or "mean" with baseline_discount 1, or another scale.'
            )
        _check_name("baseline", baseline, BASELINES)
        _check_shapes(returns, group, age, mask)
        return _unpack(_z_scores(returns[mask].float(), _cells(group[mask], age[mask])), mask)
    expected = group_baseline(returns, group, age, mask, baseline, weights)
    advantages = th.where(mask, returns.float() - baseline_discount * expected, 0)
    return masked_standardize(advantages, mask) if scale == "batch" else advantages


def moving_average(previous: Tensor, returns: Tensor, age: Tensor, mask: Tensor, momentum: float = 0.9) -> Tensor:
    """The next table of mean return by age: momentum · previous + (1 − momentum) · this batch's mean at that age.

    The table grows with the oldest age seen. An age seen for the first time takes the batch's mean there; an age that
    this batch lacks keeps its value, or, in a gap of a growing table, takes the mean of the whole batch.

    Args:
        previous: (A,) the last table; `th.zeros(0)` at first.
        returns, age, mask: (T, N).
        momentum: 0 … 1.

    Returns:
        (max(A, oldest age + 1),) float32, always finite for finite returns. `previous` is not changed.
    """
    _check_shapes(returns, age, mask)
    value, age = returns[mask].float(), age[mask]
    if value.numel() == 0:
        return previous.float().clone()
    known = len(previous)
    size = max(known, int(age.max()) + 1)
    count = th.bincount(age, minlength=size)
    mean = value.new_zeros(size).index_add_(0, age, value) / count.clamp(min=1)
    table = value.mean().repeat(size)
    table[:known] = previous
    weight = th.where(th.arange(size, device=age.device) < known, momentum, 0.0)
    return th.where(count > 0, weight * table + (1 - weight) * mean, table)


def lookup(table: Tensor, age: Tensor) -> Tensor:
    """Baseline (T, N) from a table (A,) by age: ages beyond it read its last entry, an empty table reads as 0."""
    if len(table) == 0:
        return th.zeros(age.shape, device=age.device)
    return table[age.clamp(max=len(table) - 1)]


def compress(advantages: Tensor, mask: Tensor, kind: Compression | None) -> Tensor:
    """Tame large advantages: "tanh" of each, or "layer_norm", (A − mean)/sqrt(var + 1e-5) over all counted steps.

    The variance is the population's; None changes nothing. (T, N) in, (T, N) float32 out, 0 where `mask` is False.

    Raises:
        ConfigError: Unknown kind.
    """
    _check_shapes(advantages, mask)
    advantages = th.where(mask, advantages.float(), 0)
    if kind is None:
        return advantages
    _check_name("compression", kind, COMPRESSIONS)
    if kind == "tanh":
        return advantages.tanh()
    deviation, std, _ = _deviations(advantages, mask, correction=0)
    return deviation / (std.square() + 1e-5).sqrt()


def has_sibling(group: Tensor, age: Tensor, mask: Tensor) -> Tensor:
    """(T, N) bool: another member of the step's group is alive at its age, where `mask` is True."""
    _check_shapes(group, age, mask)
    cell = _cells(group[mask], age[mask])
    return _unpack(_total(th.ones(cell.shape, device=cell.device), cell) > 1, mask)


def mix(group_advantages: Tensor, gae_advantages: Tensor, weight: float | Tensor) -> Tensor:
    """(1 − weight) · GAE + weight · group-relative: weight 0 is PPO's advantage, 1 is GRPO's. (T, N)."""
    return (1 - weight) * gae_advantages + weight * group_advantages


# --- cells: the steps of one group at one age, packed as rows (M,) ----------------------------------------------------
def _cells(group: Tensor, age: Tensor) -> Tensor:
    """(M,) number of the (group, age) cell of each row, 0 … cells-1."""
    group = th.unique(group, return_inverse=True)[1]
    ages = age.max() + 1 if age.numel() else 1
    return th.unique(group * ages + age, return_inverse=True)[1]


def _total(x: Tensor, key: Tensor) -> Tensor:
    """(M,) sum of x over the rows with the same key."""
    return x.new_zeros(_size(key)).index_add_(0, key, x)[key]


def _lowest(x: Tensor, key: Tensor) -> Tensor:
    """(M,) smallest x among the rows with the same key."""
    return x.new_full((_size(key),), th.inf).scatter_reduce_(0, key, x, "amin")[key]


def _size(key: Tensor) -> int:
    return int(key.max()) + 1 if key.numel() else 0


def _z_scores(value: Tensor, cell: Tensor) -> Tensor:
    """(M,) (value − mean)/(sample std + 1e-4) within each cell; exactly 0 in a cell of one or of equal values."""
    count = _total(th.ones_like(value), cell)
    above = value - _lowest(value, cell)
    deviation = above - _total(above, cell) / count
    std = (_total(deviation.square(), cell) / (count - 1).clamp(min=1)).sqrt()
    return deviation / (std + 1e-4)


def _unpack(rows: Tensor, mask: Tensor) -> Tensor:
    """Rows (M,) back to (T, N), 0 where `mask` is False."""
    return rows.new_zeros(mask.shape).masked_scatter_(mask, rows)


# --- checks -----------------------------------------------------------------------------------------------------------
def _check_name(what: str, name: str, valid: tuple[str, ...]) -> None:
    if name not in valid:
        raise ConfigError(f'unknown {what} "{name}": {did_you_mean(name, valid)}')


def _check_shapes(first: Tensor, *rest: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (first, *rest)]
    if first.dim() != 2 or len(set(shapes)) > 1:
        raise ConfigError(f"expected tensors of one shape (T, N), got {', '.join(map(str, shapes))}.")


def _check_segments(rewards: Tensor, ends: Tensor, tails: Tensor, *rest: Tensor) -> None:
    _check_shapes(rewards, ends, tails, *rest)
    if not bool(ends[-1].all()):
        open_columns = (~ends[-1]).nonzero().flatten().tolist()
        raise ConfigError(
            f"columns {open_columns} are open at the last row: the buffer cuts every segment there. "
            "Set ends[-1] = True and put what lies beyond into tails[-1]."
        )
