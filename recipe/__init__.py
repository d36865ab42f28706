"""Recipes: published methods and evaluations, each in a folder of its own."""
