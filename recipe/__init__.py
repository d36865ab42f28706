"""Recipes: published methods and evaluations, one folder each. `verl/recipe` is a link to this folder.

Imported as `recipe`, the former path, the modules are those of `verl.recipe`.
"""

from verl import compat  # noqa: F401 (registers the import hook of public paths)

if __name__ == "recipe":
    __path__ = []
