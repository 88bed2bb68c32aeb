"""Outputs of a run: metrics, loggers, console, plots, the run directory."""
