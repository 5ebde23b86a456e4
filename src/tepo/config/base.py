"""What every section of a recipe has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, numbers are finite, values are validated and then fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
