"""Generating responses."""

from tepo.rollout.engine import Engine, Response, Sampling
from tepo.rollout.transformers import TransformersEngine

__all__ = ["Engine", "Response", "Sampling", "TransformersEngine"]
