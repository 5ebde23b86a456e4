"""What a user can set: pydantic models, and the recipes beside them."""

from tepo.config.load import DEFAULT_RECIPE, load_recipe, recipe_names, recipe_text
from tepo.config.recipe import Recipe

__all__ = ["DEFAULT_RECIPE", "Recipe", "load_recipe", "recipe_names", "recipe_text"]
