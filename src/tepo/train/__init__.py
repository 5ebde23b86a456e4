"""Training: the loop, one optimizer step, checkpoints, the run folder."""

from tepo.train.trainer import Trainer, train

__all__ = ["Trainer", "train"]
