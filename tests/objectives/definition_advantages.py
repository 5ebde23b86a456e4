"""The advantages a second time, straight from the specification: plain Python, one response at a time."""

from __future__ import annotations

import math


def standardized(values: list[float], epsilon: float = 1e-6) -> list[float]:
    """(v - mean) / (std + epsilon), ddof 1; 0 where all are equal up to rounding, or there is but one."""
    mean = sum(values) / len(values)
    if max(values) - min(values) <= 1e-12 * max(abs(value) for value in values):
        return [0.0] * len(values)
    return [
        (v - mean) / (math.sqrt(sum((u - mean) ** 2 for u in values) / (len(values) - 1)) + epsilon) for v in values
    ]


def share_of_entropy(entropies: list[float], success: bool, a1: float, a2: float, reward: float) -> list[float]:
    """Rewards of the successes, or of the failures, that share d = `len(entropies)` times a2 among them."""
    weights = [entropy if success else 1 / entropy for entropy in entropies]
    bonuses = [a2 * len(weights) * weight / sum(weights) for weight in weights]
    return [a1 * reward + bonus if success else -a1 - bonus for bonus in bonuses]


def gtpo_rewards(
    rewards: list[float], entropies: list[list[float]], a1: float = 1.0, a2: float = 0.1
) -> list[list[float]]:
    """Token rewards of one group (2508.04349): position by position, among those still alive there."""
    shaped_rewards = [[0.0] * len(row) for row in entropies]
    for success in (True, False):
        side = [i for i, reward in enumerate(rewards) if (reward > 0) == success]
        for t in range(max((len(entropies[i]) for i in side), default=0)):
            alive = [i for i in side if t < len(entropies[i])]
            for i in alive:
                at_t = share_of_entropy([entropies[k][t] for k in alive], success, a1, a2, rewards[i])
                shaped_rewards[i][t] = at_t[alive.index(i)]
    return shaped_rewards


def gtpo(rewards: list[float], entropies: list[list[float]], a1: float = 1.0, a2: float = 0.1) -> list[list[float]]:
    """Token advantages of one group: the token rewards of the successes and of the failures, each standardized."""
    values = gtpo_rewards(rewards, entropies, a1, a2)
    advantages = [[0.0] * len(row) for row in entropies]
    for success in (True, False):
        places = [(i, t) for i, row in enumerate(values) if (rewards[i] > 0) == success for t in range(len(row))]
        if places:
            for (i, t), a in zip(places, standardized([values[i][t] for i, t in places]), strict=True):
                advantages[i][t] = a
    return advantages


def grpo_s(rewards: list[float], entropies: list[list[float]], a1: float = 1.0, a2: float = 0.1) -> list[float]:
    """Response advantages of one group, by the mean entropies of its responses."""
    means = [sum(row) / len(row) for row in entropies]
    advantages = [0.0] * len(rewards)
    for success in (True, False):
        side = [i for i, reward in enumerate(rewards) if (reward > 0) == success]
        values = [share_of_entropy([means[k] for k in side], success, a1, a2, rewards[i])[side.index(i)] for i in side]
        for i, a in zip(side, standardized(values) if side else [], strict=True):
            advantages[i] = a
    return advantages


def leave_one_out(rewards: list[float]) -> list[float]:
    """R_i less the mean of the others."""
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


def gae(
    rewards: list[list[float]], values: list[list[float]], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns of each response from the rewards of its tokens, as the sum that defines them (GAE)."""
    advantages = []
    for r, v in zip(rewards, values, strict=True):
        after = [*v, 0.0][1:]
        delta = [reward + gamma * following - value for reward, following, value in zip(r, after, v, strict=True)]
        sums = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]
        advantages.append(sums)
    returns = [[a + value for a, value in zip(row, v, strict=True)] for row, v in zip(advantages, values, strict=True)]
    return advantages, returns


def whitened(rows: list[list[float]]) -> list[list[float]]:
    """Less the mean over all tokens, divided by the root of their variance (ddof 1) + 1e-8."""
    flat = [value for row in rows for value in row]
    mean = sum(flat) / len(flat)
    spread = math.sqrt(sum((value - mean) ** 2 for value in flat) / (len(flat) - 1) + 1e-8)
    return [[(value - mean) / spread for value in row] for row in rows]


def prpo(rewards: list[float], process: list[list[float]]) -> list[list[float]]:
    """Token advantages of one group: (process reward - 1/2) / sqrt(1/24) + R - mean R."""
    mean = sum(rewards) / len(rewards)
    return [[(p - 0.5) * math.sqrt(24) + r - mean for p in row] for r, row in zip(rewards, process, strict=True)]


def best_and_worst(rewards: list[float]) -> list[int]:
    """+1 for the first of the highest rewards of a group, -1 for the first of the lowest, 0 where they are equal."""
    signs = [0] * len(rewards)
    if max(rewards) > min(rewards):
        signs[rewards.index(max(rewards))] = 1
        signs[rewards.index(min(rewards))] = -1
    return signs
