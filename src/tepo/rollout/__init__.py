"""Generating responses."""

from tepo.rollout.engine import Engine, Response, Sampling
from tepo.rollout.open import check_engine, open_engine
from tepo.rollout.transformers import TransformersEngine

__all__ = ["Engine", "Response", "Sampling", "TransformersEngine", "check_engine", "open_engine"]
