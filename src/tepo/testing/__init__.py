"""The checks that every objective of this project passes, for any other: `check_objective`. Needs torch alone."""

from tepo.testing.properties import PROPERTIES, check_objective

__all__ = ["PROPERTIES", "check_objective"]
