"""The diagnosis of a run while it goes on: a finding is told once, and again only after it has been gone."""

from __future__ import annotations

from collections.abc import Mapping

from tepo.diagnosis.evidence import Evidence
from tepo.diagnosis.rules import diagnose


class Watch:
    """Looks at the end of every rollout; the rules read means of a few rollouts, so a look costs next to nothing."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._told: set[str] = set()

    def look(self) -> list[str]:
        """What is new. Before the first step: what the recipe and the data alone say."""
        found = diagnose(self.evidence)
        new = [finding.text for finding in found if finding.rule.name not in self._told]
        self._told = {finding.rule.name for finding in found}
        return new

    def step(self, metrics: Mapping[str, float]) -> list[str]:
        """One more step; what is new with it."""
        self.evidence.add(metrics)
        last = len(self.evidence.rollouts[-1]) == self.evidence.recipe.trainer.updates_per_rollout
        return self.look() if last else []
