"""tepo: reinforcement learning from verifiable rewards with token-level policy optimization."""

__version__ = "0.1.0"
