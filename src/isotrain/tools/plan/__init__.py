"""Needs of a recipe on devices, before one is taken."""
