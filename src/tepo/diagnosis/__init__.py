"""What is wrong with a run, in words: rules over its recipe and metrics, and the watch that applies them."""

from tepo.diagnosis.evidence import Evidence
from tepo.diagnosis.rules import RULES, Finding, Rule, diagnose
from tepo.diagnosis.watch import Watch

__all__ = ["RULES", "Evidence", "Finding", "Rule", "Watch", "diagnose"]
