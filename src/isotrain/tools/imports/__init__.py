"""Recipes from the scripts, configurations and logs of other frameworks, and back."""
