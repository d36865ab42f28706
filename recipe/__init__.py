"""The former path of `verl.recipe`: `recipe.dapo` is the package `verl.recipe.dapo`. Not part of the wheel."""

import verl  # noqa: F401 (registers the import hook, which finds the modules)

__path__ = []
