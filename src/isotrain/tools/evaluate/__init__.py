"""Responses of a model to the prompts of a data set, their scores, and how sure these are."""
