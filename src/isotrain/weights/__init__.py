"""Weights from the training ranks to the rollout engines: gather, send, load, verify."""
