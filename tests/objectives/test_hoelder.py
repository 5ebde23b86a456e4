"""The power mean of HoelderPO against 80-digit arithmetic, and far from where its exponents are harmless."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from tepo.objectives import Objective, TokenBatch, get_objective
from tepo.objectives.ratios import log_power_mean

POWERS = [-2, -1, -1e-6, 0, 1e-9, 1e-4, 0.5, 1, 2]
NAMES = ["hoelder", "hoelder_token"]
UNBOUNDED = {"clip_low": 1.0, "clip_high": math.inf}

LOG_RATIOS = {
    "small": [3e-3, -1e-3, 2e-3, 5e-4, -4e-3],
    "moderate": [0.3, -0.2, 0.05, 0.7, -0.6, 0.11],
    "around the switch": [1.3, -0.7, 0.2, -0.9],
    "one outlier": [0.01, -0.02, 30.0, 0.03],
    "one outlier down": [0.01, -0.02, -30.0, 0.03],
    "one token": [0.4],
    "equal": [0.25, 0.25, 0.25],
    "equal and far": [-300.0, -300.0],
    "both ways": [30.0, -30.0, 1.0],
    "far both ways": [300.0, -300.0, 2.0, -1.0],
}


def batch_of(rows: list[list[float]], advantages: list[float], dtype: torch.dtype) -> tuple[Tensor, TokenBatch]:
    """Responses with these log-ratios, old log-probs 0; the leaf [S, T] and the batch."""
    width = max(len(row) for row in rows)
    padded = [row + [0.0] * (width - len(row)) for row in rows]
    leaf = torch.tensor(padded, dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    old, a = torch.zeros_like(leaf), torch.tensor(advantages, dtype=dtype)
    return leaf, TokenBatch.from_padded(leaf, old, mask, advantages=a)


def exact(log_ratios: list[float], p: float) -> tuple[mpmath.mpf, list[mpmath.mpf]]:
    """log rho_p and its gradient in each log-ratio, r_t^p / sum r^p, with 80 digits."""
    with mpmath.workdps(80):
        values, power = [mpmath.mpf(x) for x in log_ratios], mpmath.mpf(p)
        if p == 0:
            return mpmath.fsum(values) / len(values), [mpmath.mpf(1) / len(values)] * len(values)
        powers = [mpmath.exp(power * x) for x in values]
        total = mpmath.fsum(powers)
        return mpmath.log(total / len(values)) / power, [x / total for x in powers]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("log_ratios", LOG_RATIOS.values(), ids=LOG_RATIOS)
def test_ratio_equals_exact_arithmetic(log_ratios: list[float], p: float, dtype: torch.dtype) -> None:
    """log rho to a few roundings of the largest log-ratio, whatever the size of p; its share of each token too."""
    as_stored = torch.tensor(log_ratios, dtype=dtype).tolist()
    expected, shares = exact(as_stored, p)
    leaf, batch = batch_of([log_ratios], [1.0], dtype)
    log_rho = get_objective("hoelder", p=p).ratio(batch)
    (gradient,) = torch.autograd.grad(log_rho[0], leaf)
    unit = torch.finfo(dtype).eps * max(abs(x) for x in as_stored)
    assert log_rho.eq(log_rho[0]).all()
    assert abs(float(log_rho[0].item() - expected)) <= 4 * unit
    tolerance = 8 * torch.finfo(dtype).eps * (1 + abs(p) * max(abs(x) for x in as_stored))
    assert gradient[0].tolist() == pytest.approx([float(share) for share in shares], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("p", [-1e-4, -1e-6, -1e-9, 1e-11, 1e-9, 1e-6, 1e-4])
def test_tiny_p_moves_the_mean_by_half_p_times_the_variance(p: float) -> None:
    """log rho_p = mean + p var/2 + O(p^2): those digits are there where log(mean r^p)/p has lost them.

    The log-ratios are such that their mean is exactly 0.
    """
    log_ratios = [0.5, -0.5, 0.25, -0.25]
    _, batch = batch_of([log_ratios], [1.0], torch.float64)
    log_rho = get_objective("hoelder", p=p).ratio(batch)[0].item()
    expected, _ = exact(log_ratios, p)
    assert log_rho == pytest.approx(float(expected), rel=1e-10, abs=1e-16)
    assert log_rho == pytest.approx(p * 0.15625 / 2, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("p", [1e-20, -1e-29, 1e-31, -1e-38, 1e-40, 1e-46, 1e-300, -5e-324])
def test_p_beyond_the_precision_of_anything_is_p_0(name: str, dtype: torch.dtype, p: float) -> None:
    """1/p overflows and p itself is 0 in float32; neither may show."""
    losses, gradients = [], []
    for power in (p, 0):
        leaf, batch = batch_of([[0.1, -0.12, 0.05], [0.02], [0.1, -3.0]], [1.0, -1.0, 2.0], dtype)
        loss = get_objective(name, p=power)(batch).loss
        loss.backward()
        assert leaf.grad is not None
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(losses[0], losses[1], rtol=4 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [{}, UNBOUNDED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("p", POWERS)
def test_extreme_log_ratios_are_finite_and_right(
    name: str, clip: dict[str, float], dtype: torch.dtype, p: float
) -> None:
    """+-30 and +-300 in all mixtures and either sign of the advantage; the ratio is held at e^40."""
    patterns = [[30.0], [-30.0], [300.0], [-300.0], [300.0, -300.0], [30.0, 0.1, -30.0], [300.0, 300.0], [-300.0, 0.2],
                [300.0, 0.0, 0.1], [-300.0, -300.0, -299.0], [-30.0] * 5 + [30.0]]  # fmt: skip
    objective = get_objective(name, p=p, **clip)
    for a in (1.0, -1.0):
        for pattern in patterns:
            leaf, batch = batch_of([pattern, [0.1, -0.1]], [a, 1.0], dtype)
            out = objective(batch)
            out.loss.backward()
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()
            expected = [bounded_ratio(objective, x, p, y) * y for x, y in ((pattern, a), ([0.1, -0.1], 1.0))]
            unit = torch.finfo(dtype).eps * sum(map(abs, expected))
            assert out.loss.item() == pytest.approx(-sum(expected) / 2, rel=0, abs=2e3 * unit)
            assert all(math.isfinite(value) for value in out.metrics.values())


def bounded_ratio(objective: Objective, log_ratios: list[float], p: float, advantage: float) -> float:
    """The ratio that counts, by the definitions, held at e^40."""
    surrogate = objective.surrogate
    low, high = 1 - mpmath.mpf(surrogate.low), 1 + mpmath.mpf(surrogate.high)  # type: ignore[attr-defined]

    def bounded(ratio: mpmath.mpf) -> mpmath.mpf:
        return min(ratio, high) if advantage >= 0 else max(ratio, low)

    with mpmath.workdps(80):
        if objective.name == "hoelder":
            held = min(exact(log_ratios, p)[0], mpmath.mpf(40))
            return float(bounded(mpmath.exp(held)))
        ratios = [bounded(mpmath.exp(mpmath.mpf(x))) for x in log_ratios]
        log_mean = exact([mpmath.log(ratio) for ratio in ratios], p)[0]
        return float(mpmath.exp(min(log_mean, mpmath.mpf(40))))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", POWERS)
def test_empty_sequence_counts_nowhere(name: str, p: float) -> None:
    """Not inf, not NaN: no gradient, and the loss of the other responses alone."""
    objective = get_objective(name, p=p)
    rows, advantages = [[0.1, -0.1, 0.3], [], [-0.4, 0.05]], [1.0, 2.0, -1.0]
    leaf, batch = batch_of(rows, advantages, torch.float64)
    with torch.autograd.detect_anomaly(check_nan=True):  # nor in a gradient that goes nowhere
        loss = objective(batch).loss
        loss.backward()
    assert log_power_mean(batch, batch.logp, p)[1] == 0
    other_leaf, other = batch_of([rows[0], rows[2]], [1.0, -1.0], torch.float64)
    other_loss = objective(other).loss
    other_loss.backward()
    assert leaf.grad is not None
    assert other_leaf.grad is not None
    assert loss.equal(other_loss)
    assert leaf.grad[[0, 2]].equal(other_leaf.grad)
    assert leaf.grad[1].eq(0).all()
    nothing = objective(batch.select(torch.tensor([1])))
    assert nothing.loss == 0
    assert all(math.isfinite(value) for value in nothing.metrics.values())


@pytest.mark.parametrize("p", [-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])
def test_the_mean_rises_with_p_between_the_extremes(p: float) -> None:
    """min r <= rho_p <= rho_q <= max r for p < q; p = -1, 1 and 2 as they are known."""
    values = [0.5, 1.25, 2.0]
    _, batch = batch_of([[math.log(value) for value in values]], [1.0], torch.float64)
    rho = get_objective("hoelder", p=p).ratio(batch)[0].exp().item()
    above = get_objective("hoelder", p=p + 0.25).ratio(batch)[0].exp().item()
    assert min(values) < rho < above < max(values)
    known = {-1.0: 3 / (2 + 0.8 + 0.5), 0.0: 1.25 ** (1 / 3), 1.0: 1.25, 2.0: math.sqrt((0.25 + 1.5625 + 4) / 3)}
    assert rho == pytest.approx(known.get(p, rho), rel=1e-14)
