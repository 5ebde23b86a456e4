"""What an objective needs beside the policy: a reference, a critic, process rewards."""

from __future__ import annotations

import dataclasses
from typing import Any

from tepo.config import Recipe
from tepo.evaluate.session import AUTOCAST, Session
from tepo.objectives.segments import SegmentAdvantage
from tepo.policy import Policy, load_model
from tepo.policy.head import Head
from tepo.rewards.steps import load_process_reward
from tepo.train.credit import ProcessScorer
from tepo.train.critic import Critic


def reference_policy(recipe: Recipe, session: Session) -> Policy | None:
    """The policy before training, if a term needs it: the model without its adapter, or a frozen second copy."""
    if not recipe.objective.build().needs_reference:
        return None
    policy = session.policy
    if recipe.model.lora:
        return AdapterOff(policy)
    model, tokenizer = load_model(recipe.model, trainable=False)
    model.to(policy.device)  # type: ignore[arg-type]
    model.requires_grad_(False)
    return Policy(model, tokenizer, recipe.rollout.temperature, AUTOCAST[recipe.model.dtype])


def critic(recipe: Recipe, session: Session) -> Critic | None:
    """A critic of the policy, if the objective reads its values."""
    if "values" not in recipe.objective.build().needs:
        return None
    config = recipe.trainer
    rate = config.critic_learning_rate or 10 * config.learning_rate
    return Critic(session.policy, rate, config.betas)


def process_scorer(recipe: Recipe, session: Session) -> ProcessScorer | None:
    """What fills in process rewards, if the objective reads them."""
    advantage, name = recipe.objective.build().advantage, recipe.reward.process
    if not isinstance(advantage, SegmentAdvantage):
        return None
    name = recipe.data.name if name == "auto" else name
    return ProcessScorer(name, load_process_reward(name), advantage, session.decode)


class AdapterOff(Policy):
    """The policy of a model with its adapter switched off."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model, policy.tokenizer, policy.temperature, policy.autocast)

    @property
    def head(self) -> Head:
        head = super().head
        return dataclasses.replace(head, layer=getattr(head.layer, "base_layer", head.layer))

    def score(self, *args: Any, **kwargs: Any) -> Any:
        adapted: Any = self.model
        with adapted.disable_adapter():
            return super().score(*args, **kwargs)
