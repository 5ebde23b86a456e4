"""The objectives a second time, straight from the specification: plain Python, one response and one token at a time."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from definition_settings import PAIRS, Settings, Token


@dataclass(frozen=True)
class Counts:
    """What losses are divided by: tokens, those of shared prefixes among them, responses and groups with a token."""

    tokens: int
    shared: int
    sequences: int
    groups: int


def kl(estimator: str, token: Token, target_logp: float) -> float:
    """Estimate of KL(pi || target) at one token."""
    d = target_logp - token.logp
    return {
        "abs": abs(d),
        "k1": -d,
        "k2": 0.5 * d**2,
        "k3": math.exp(d) - d - 1,
        "exact": token.exact_kl,
    }[estimator]


def power_mean(values: list[float], p: float) -> float:
    """((1/n) sum v^p)^(1/p); p = 0: the geometric mean. Loses its digits where |p| is tiny."""
    if p == 0:
        return float(math.prod(value ** (1 / len(values)) for value in values))
    return float((sum(value**p for value in values) / len(values)) ** (1 / p))


def ratio(s: Settings, response: list[Token], token: Token) -> float:
    """The importance ratio of one token."""
    if s.ratio == "none":
        return 1.0
    if s.ratio == "token":
        return math.exp(token.logp - token.old_logp)
    if s.ratio in ("sequence", "hoelder"):
        power = 0 if s.ratio == "sequence" else s.p
        return power_mean([math.exp(t.logp - t.old_logp) for t in response], power)
    frozen = power_mean([math.exp(t.frozen_logp - t.old_logp) for t in response], 0)
    return frozen * math.exp(token.logp) / math.exp(token.frozen_logp)


def frozen_ratio(s: Settings, response: list[Token], token: Token) -> float:
    """sg of the importance ratio of one token."""
    copies = [dataclasses.replace(t, logp=t.frozen_logp) for t in response]
    return ratio(s, copies, copies[next(i for i, t in enumerate(response) if t is token)])


def sign(x: float) -> int:
    """-1, 0 or 1."""
    return (x > 0) - (x < 0)


def clip(x: float, low: float, high: float) -> float:
    """The nearest number between low and high."""
    return min(max(x, low), high)


def mean_logp(response: list[Token]) -> float:
    """Of a response; ORPO takes it for less than 0, where the odds are not infinite."""
    return min(sum(token.logp for token in response) / len(response), -1e-6)


def pair_utility(s: Settings, chosen: list[Token], rejected: list[Token]) -> float:
    """What a pair is worth: -softplus(-x) is log sigmoid(x)."""
    if s.surrogate == "dpo":
        margins = [sum(t.logp - t.ref_logp for t in response) for response in (chosen, rejected)]
        return -math.log1p(math.exp(-s.beta * (margins[0] - margins[1])))
    odds = [mean_logp(response) - math.log(-math.expm1(mean_logp(response))) for response in (chosen, rejected)]
    log_p = sum(token.logp for token in chosen) / len(chosen)
    return log_p - s.beta * math.log1p(math.exp(odds[1] - odds[0]))


def rejected_of(responses: list[list[Token]], groups: list[int], i: int) -> list[Token] | None:
    """The response that response i is preferred to; None where i is not a chosen one."""
    if responses[i][0].advantage <= 0:
        return None
    return next(r for r, group in zip(responses, groups, strict=True) if group == groups[i] and r[0].advantage < 0)


def surrogate(s: Settings, response: list[Token], token: Token) -> float:
    """What one token contributes to J, before its weight."""
    a = token.advantage
    low, high = 1 - s.clip_low, 1 + s.clip_high
    if s.surrogate == "prefix_and_rest" and token.shared:  # SKPO: PPO's clip on the prefix
        r = ratio(s, response, token)
        return min(r * a, clip(r, 1 - s.prefix_clip_low, 1 + s.prefix_clip_high) * a)
    if s.surrogate == "score":  # GPG, REINFORCE: A log pi
        return a * token.logp
    if s.surrogate in ("weight", "prefix_and_rest"):  # CISPO: sg(clip(r)) A log pi
        return clip(frozen_ratio(s, response, token), low, high) * a * token.logp
    if s.surrogate == "gate":  # SAPO: (4/tau) sigmoid(tau (r - 1)) A
        tau = s.tau if a > 0 else s.tau_negative
        return 4 / tau * a / (1 + math.exp(-tau * (ratio(s, response, token) - 1)))
    if s.surrogate == "log_clip":  # GMPO: exp(mean_t l_it) A
        bounded = []
        for t in response:
            log_r, sgn = math.log(ratio(s, response, t)), sign(t.advantage)
            bounded.append(sgn * min(sgn * log_r, sgn * clip(log_r, -s.clip_low, s.clip_high)))
        return math.exp(sum(bounded) / len(bounded)) * a
    if s.surrogate == "power_clip":  # HoelderPO, token variant: the mean of the ratios that PPO's minimum takes
        ratios = []
        for t in response:
            r = ratio(s, response, t)
            ratios.append(max(r, low) if t.advantage < 0 else min(r, high))
        return power_mean(ratios, s.power) * a
    if s.surrogate == "entropy":  # EM-FT: - H
        return -token.entropy
    r = ratio(s, response, token)
    if s.surrogate == "none":
        return r * a
    value = min(r * a, clip(r, low, high) * a)
    if s.dual_clip is not None and a < 0:
        value = max(value, s.dual_clip * a)
    return value


def weight(s: Settings, response: list[Token], token: Token, counts: Counts) -> float:
    """What one token of a response is multiplied with."""
    if s.aggregate == "token_mean":
        return 1 / counts.tokens
    if s.aggregate == "sequence_mean":
        return 1 / counts.sequences / len(response)
    if s.aggregate == "sequence_sum":
        return 1 / counts.sequences
    if s.aggregate == "group_mean":
        return 1 / counts.groups
    if s.aggregate == "level_mean" and token.shared:
        return s.prefix_share / counts.shared
    if s.aggregate == "level_mean":
        return (1 - s.prefix_share) / (counts.tokens - counts.shared)
    return 1 / counts.sequences / s.length_normalizer


def in_mask(token: Token, entropy_test: str) -> bool:
    """M: the advantage is positive and the entropy falls."""
    if token.advantage <= 0:
        return False
    return token.entropy < token.old_entropy if entropy_test == "measured" else token.entropy_direction < 0


def in_step(s: Settings, responses: list[list[Token]]) -> list[list[Token]]:
    """The tokens that the loss and its denominators know of, with A' = A + min(alpha sg(H), |A| / kappa)."""
    if s.selection == "entropy":
        responses = [[token for token in response if token.selected] for response in responses]
    if s.alpha is not None:
        responses = [[dataclasses.replace(t, advantage=shaped(s, t)) for t in response] for response in responses]
    return [response for response in responses if response]


def shaped(s: Settings, token: Token) -> float:
    """The advantage of one token with its share of the entropy."""
    if s.alpha is None:
        return token.advantage
    return token.advantage + min(s.alpha * token.frozen_entropy, abs(token.advantage) / s.kappa)


def covariances(s: Settings, responses: list[list[Token]]) -> list[float]:
    """(A - mean A)(logp - mean logp) of each token, with the means over all tokens of the step."""
    tokens = [token for response in responses for token in response]
    advantages = [shaped(s, token) for token in tokens]
    mean_a = sum(advantages) / max(len(tokens), 1)
    mean_logp = sum(token.frozen_logp for token in tokens) / max(len(tokens), 1)
    return [(a - mean_a) * (token.frozen_logp - mean_logp) for a, token in zip(advantages, tokens, strict=True)]


def is_clipped(s: Settings, response: list[Token], token: Token, margin: float) -> bool:
    """Whether PPO's minimum takes the clipped ratio; with a margin > 0 in doubt yes, with one < 0 in doubt no."""
    r, a = ratio(s, response, token), shaped(s, token)
    if a < 0:
        return r < 1 - s.clip_low + margin or (s.dual_clip is not None and r > s.dual_clip - margin)
    return a > 0 and r > 1 + s.clip_high - margin


def check_selection(s: Settings, responses: list[list[Token]]) -> None:
    """That `Token.selected` is a choice that the objective may make: ties may fall either way."""
    tokens = [token for response in responses for token in response]
    chosen, cov = [token.selected for token in tokens], covariances(s, responses)
    if s.selection is None or not tokens:
        assert not any(chosen)
        return
    exact = s.share * len(tokens)
    if s.selection == "drawn":

        def eligible(margin: float) -> list[bool]:
            clipped = [is_clipped(s, response, token, -margin) for response in responses for token in response]
            in_range = [s.cov_low - margin < c < s.cov_high + margin for c in cov]
            return [inside and not out for inside, out in zip(in_range, clipped, strict=True)]

        wanted = max(1, math.floor(exact + 1e-6))
        assert min(wanted, sum(eligible(-1e-9))) <= sum(chosen) <= min(wanted, sum(eligible(1e-9)))
        assert all(may for may, was in zip(eligible(1e-9), chosen, strict=True) if was)
        return
    values = cov if s.selection == "covariance" else [token.frozen_entropy for token in tokens]
    assert sum(chosen) == max(1, math.floor(exact + 1e-6) if s.selection == "covariance" else math.ceil(exact - 1e-6))
    lowest = min(value for value, was in zip(values, chosen, strict=True) if was)
    assert all(was or value <= lowest + 1e-9 for value, was in zip(values, chosen, strict=True))


def value_error(clip_range: float | None, token: Token) -> float:
    """(V - R)^2; with a clip, no less than that of the value held near the old one."""
    square = (token.values - token.returns) ** 2
    if clip_range is None:
        return square
    held = clip(token.values, token.old_values - clip_range, token.old_values + clip_range)
    return max(square, (held - token.returns) ** 2)


def loss(s: Settings, responses: list[list[Token]], groups: list[int] | None = None) -> float:
    """L = -J + terms over the responses of one optimizer step; a response without tokens counts nowhere.

    groups: the prompt of each response, for objectives on pairs.
    """
    groups = [label for label, response in zip(groups or range(len(responses)), responses, strict=True) if response]
    responses = in_step(s, responses)
    tokens = [token for response in responses for token in response]
    if not tokens:
        return 0.0
    counts = Counts(len(tokens), sum(token.shared for token in tokens), len(responses), len(set(groups)))
    masked = 0
    total = mask_sum = 0.0
    for i, response in enumerate(responses):
        rejected = rejected_of(responses, groups, i) if s.surrogate in PAIRS else None
        if rejected:  # in equal parts at the tokens of the chosen response
            total -= weight(s, response, response[0], counts) * pair_utility(s, response, rejected)
        for token in response:
            w = weight(s, response, token, counts)
            if s.surrogate not in PAIRS and (s.selection != "drawn" or not token.selected):
                total -= w * surrogate(s, response, token)
            total += terms(s, token, w, len(tokens))
            if s.kl_mask is not None and in_mask(token, s.kl_mask["entropy_test"]):
                target = token.old_logp if s.kl_mask["target"] == "old" else token.ref_logp
                mask_sum += kl(s.kl_mask["estimator"], token, target)
                masked += 1
    if s.kl_mask is not None and masked:
        total += s.kl_mask["beta"] * mask_sum / (len(tokens) if s.kl_mask["normalizer"] == "tokens" else masked)
    return total


def terms(s: Settings, token: Token, w: float, num_tokens: int) -> float:
    """What the terms cost at one token, but for the KL mask."""
    total = 0.0
    if s.ref_kl is not None:
        total += w * s.ref_kl["beta"] * kl(s.ref_kl["estimator"], token, token.ref_logp)
    if s.entropy_bonus is not None:
        total -= s.entropy_bonus * token.entropy / num_tokens
    if s.cov_kl is not None and token.selected:
        total += s.cov_kl * abs(token.logp - token.old_logp) / num_tokens
    if s.adaptive_entropy is not None:
        total -= s.adaptive_entropy * token.top_entropy / num_tokens
    if s.policy_kl is not None:  # r - 1 - log r
        log_r = token.logp - token.old_logp
        total += s.policy_kl * (math.exp(log_r) - 1 - log_r) / num_tokens
    if s.value_loss is not None:
        total += s.value_loss["coefficient"] * 0.5 * value_error(s.value_loss["clip"], token) / num_tokens
    return total


def derivative(s: Settings, responses: list[list[Token]], groups: list[int] | None, token: Token, name: str) -> float:
    """Central difference of the loss in one value of one token."""
    step = 1e-5
    value = getattr(token, name)
    sides = []
    for moved in (value + step, value - step):
        setattr(token, name, moved)
        sides.append(loss(s, responses, groups))
    setattr(token, name, value)
    return (sides[0] - sides[1]) / (2 * step)


def distance_to_a_kink(s: Settings, responses: list[list[Token]]) -> float:
    """How far the nearest ratio is from a clip boundary, or log-ratio from the corner of |.|."""
    bounds = [1 - s.clip_low, 1 + s.clip_high, s.dual_clip or 1e9, 1 - s.prefix_clip_low, 1 + s.prefix_clip_high]
    if s.surrogate == "log_clip":
        bounds = [math.exp(-s.clip_low), math.exp(s.clip_high)]
    distances = [1.0]
    for response in in_step(s, responses):
        for token in response:
            if s.surrogate not in ("gate", "score", "none", "entropy", *PAIRS):
                distances += [abs(ratio(s, response, token) - bound) for bound in bounds]
            distances += [abs(token.logp - token.old_logp), abs(token.logp - token.ref_logp)]
            if s.value_loss is not None:
                drift, bound = token.values - token.old_values, s.value_loss["clip"] or 1e9
                distances.append(abs(abs(drift) - bound))
                distances.append(abs(token.values + token.old_values + clip(drift, -bound, bound) - 2 * token.returns))
    return min(distances)
