"""Measuring accuracy on held-out problems."""

from tepo.evaluate.accuracy import Accuracy, evaluate
from tepo.evaluate.metrics import mean_interval, pass_at_k

__all__ = ["Accuracy", "evaluate", "mean_interval", "pass_at_k"]
