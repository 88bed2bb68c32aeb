"""Checks that rules.yaml cannot express: one file per topic, each a generator of findings."""
