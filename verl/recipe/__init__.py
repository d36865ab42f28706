"""Recipes: published methods and evaluations, one folder each."""

from verl import compat  # noqa: F401 (registers the import hook for old module paths)
