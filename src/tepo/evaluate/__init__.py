"""Measuring accuracy on held-out problems."""

from tepo.evaluate.accuracy import Accuracy, evaluate
from tepo.evaluate.compare import compare_evaluations
from tepo.evaluate.metrics import majority, mean_interval, pass_at_k

__all__ = ["Accuracy", "compare_evaluations", "evaluate", "majority", "mean_interval", "pass_at_k"]
