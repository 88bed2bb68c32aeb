"""Readers of runs, one file per format: `read.read_run` finds out which one a path needs."""
