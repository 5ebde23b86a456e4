"""The model that is trained: loading and saving it, and the log-probs and entropies of response tokens."""

from tepo.policy.load import load_model
from tepo.policy.policy import Policy, TokenScores
from tepo.policy.row import Row
from tepo.policy.save import save_model

__all__ = ["Policy", "Row", "TokenScores", "load_model", "save_model"]
