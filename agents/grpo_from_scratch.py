"""GRPO in one file: CartPole without a critic, from groups of episodes that start in exactly the same state.

    python agents/grpo_from_scratch.py --steps 40000 --seed 0

The paper (arXiv 2402.03300) samples G answers to one question and compares them with each other. Here the question is a
start state: resets with one seed put G environments into it, bit for bit. What we change for control:

- credit is each step's reward-to-go, compared with the siblings that are still alive at the same step;
- the baseline leaves the member itself out (RLOO), and the scale is the minibatch's, as in PPO, not the group's;
- there is no KL to a reference policy: the policy starts from nothing that is worth staying close to.

Axes: T steps, P groups, G members of a group; M rows, the steps that were really played. Only torch and gymnasium are
used; tests/agents/test_grpo_from_scratch.py shows that the numbers are those of `grpo_rl`.
"""

import argparse
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence

GROUP_SIZE = 8  # G
ROLLOUT_STEPS = 1024  # groups are added to a rollout until it has so many steps
EPOCHS = 20
BATCH_SIZE = 256
GAMMA = 0.98
CLIP_RANGE = 0.2
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 0.5


class Group(NamedTuple):
    """G episodes from one start. `mask` is False where a member has ended; the other arrays are not read there."""

    obs: Tensor  # (T, G, D) float32
    actions: Tensor  # (T, G) int64
    logp: Tensor  # (T, G) float32, of the policy that acted
    rewards: Tensor  # (T, G) float64
    mask: Tensor  # (T, G) bool
    truncated: Tensor  # (T, G) bool, the time limit cut the episode after this step


# --- the policy -------------------------------------------------------------------------------------------------------
def make_policy(obs_dim: int, n_actions: int, hidden: int = 64) -> nn.Sequential:
    """Logits (…, A) of observations (…, D). Orthogonal weights; a small last layer makes the first policy uniform."""
    sizes, gains = (obs_dim, hidden, hidden, n_actions), (2**0.5, 2**0.5, 0.01)
    layers: list[nn.Module] = []
    for inputs, outputs, gain in zip(sizes, sizes[1:], gains, strict=False):
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# --- sampling ---------------------------------------------------------------------------------------------------------
@th.no_grad()
def play_group(envs: list[gym.Env], policy: nn.Module, seed: int) -> Group:
    """One episode in each of G envs, all from the state that a reset with `seed` gives."""
    obs = np.stack([env.reset(seed=seed)[0] for env in envs])
    assert (obs == obs[0]).all(), "members of a group start from exactly the same state"
    alive = np.ones(len(envs), dtype=bool)
    steps: list[tuple[Tensor, ...]] = []
    while alive.any():
        seen = th.tensor(obs)
        distribution = Categorical(logits=policy(seen))
        actions = distribution.sample()
        rewards, truncated, mask = np.zeros(len(envs)), np.zeros(len(envs), dtype=bool), alive.copy()
        for i in np.flatnonzero(alive):
            obs[i], rewards[i], terminated, truncated[i], _ = envs[i].step(actions[i].item())
            truncated[i] &= not terminated
            alive[i] = not (terminated or truncated[i])
        arrays = (th.tensor(array) for array in (rewards, mask, truncated))
        steps.append((seen, actions, distribution.log_prob(actions), *arrays))
    return Group(*map(th.stack, zip(*steps, strict=True)))


# --- the advantage ----------------------------------------------------------------------------------------------------
def reward_to_go(rewards: Tensor, mask: Tensor, truncated: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + γ R_{t+1} inside each episode. (T, P, G) float64.

    Nothing follows a failure. An episode that the time limit cut goes on with the mean reward r̄ for ever, r̄/(1 − γ):
    the same for every member, so that only being alive or dead tells them apart.
    """
    rewards = th.where(mask, rewards, 0)
    tail = rewards.sum() / mask.sum() / (1 - gamma)
    returns = rewards + gamma * tail * truncated
    for t in reversed(range(len(returns) - 1)):
        returns[t] += gamma * returns[t + 1]  # 0 beyond an end
    return returns


def group_advantages(returns: Tensor, mask: Tensor) -> Tensor:
    """A_i = R_i − mean of the returns of the other members alive at the same step. (T, P, G) float64.

    A member that is alone in its group is compared with those of the other groups; alone in the world, it gets 0.
    """
    returns = th.where(mask, returns, 0)
    siblings, everyone = mask.sum(2, keepdim=True), mask.sum((1, 2), keepdim=True)
    of_siblings = (returns.sum(2, keepdim=True) - returns) / (siblings - 1).clamp(min=1)
    of_everyone = (returns.sum((1, 2), keepdim=True) - returns) / (everyone - 1).clamp(min=1)
    baseline = th.where(siblings > 1, of_siblings, th.where(everyone > 1, of_everyone, returns))
    return th.where(mask, returns - baseline, 0)


# --- the objective ----------------------------------------------------------------------------------------------------
def surrogate_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """−E[min(ρA, clip(ρ, 1 ± ε)A)] with ρ = π/π_old and A scaled to mean 0, std 1 over the rows (M,). Scalar."""
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (logp - old_logp).exp()
    return -th.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages).mean()


def update(policy: nn.Module, optimizer: th.optim.Optimizer, groups: list[Group]) -> None:
    """A few epochs of minibatches on one rollout."""
    obs, actions, logp, rewards, mask, truncated = (pad_sequence(list(arrays)) for arrays in zip(*groups, strict=True))
    returns = reward_to_go(rewards, mask, truncated, GAMMA)  # (T, P, G)
    # float64 up to here: members with equal returns must get 0, for the loss divides by the spread.
    rows = [obs[mask], actions[mask], logp[mask], group_advantages(returns, mask)[mask].float()]  # (M, …)
    for _ in range(EPOCHS):
        for index in th.randperm(len(rows[0])).tensor_split(max(len(rows[0]) // BATCH_SIZE, 1)):
            batch_obs, batch_actions, old_logp, advantages = (row[index] for row in rows)
            new_logp = Categorical(logits=policy(batch_obs)).log_prob(batch_actions)
            loss = surrogate_loss(new_logp, old_logp, advantages, CLIP_RANGE)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            optimizer.step()


# --- training ---------------------------------------------------------------------------------------------------------
def train(total_steps: int = 40_000, seed: int = 0, env_id: str = "CartPole-v1") -> nn.Module:
    """Trains a policy for at least `total_steps` env steps, those of all members counted."""
    th.manual_seed(seed)
    seeds = np.random.default_rng(seed)
    envs = [gym.make(env_id) for _ in range(GROUP_SIZE)]
    assert isinstance(envs[0].action_space, gym.spaces.Discrete), "actions are drawn from a categorical distribution"
    policy = make_policy(int(np.prod(envs[0].observation_space.shape or ())), int(envs[0].action_space.n))
    optimizer = th.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    steps = 0
    while steps < total_steps:
        groups: list[Group] = []
        while (sampled := sum(int(group.mask.sum()) for group in groups)) < ROLLOUT_STEPS:
            groups.append(play_group(envs, policy, seed=int(seeds.integers(2**31))))
        steps += sampled
        score = th.cat([group.rewards.sum(0) for group in groups]).mean()
        print(f"{steps:>7,} steps  {len(groups):>2} groups  mean return {score:6.1f}")
        update(policy, optimizer, groups)
    for env in envs:
        env.close()
    return policy


@th.no_grad()
def evaluate(policy: nn.Module, episodes: int = 20, seed: int = 1_000_000, env_id: str = "CartPole-v1") -> float:
    """Mean return of fresh episodes, always with the most likely action."""
    env, total = gym.make(env_id), 0.0
    for episode in range(episodes):
        obs, done = env.reset(seed=seed + episode)[0], False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(int(policy(th.tensor(obs)).argmax()))
            total, done = total + float(reward), terminated or truncated
    env.close()
    return total / episodes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on CartPole, in one file")
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    th.set_num_threads(1)  # small networks are fastest so
    trained = train(arguments.steps, arguments.seed)
    print(f"20 fresh episodes, most likely actions: mean return {evaluate(trained):.1f}")
