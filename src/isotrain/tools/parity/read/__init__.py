"""Readers of runs: logs, tables, traces and dumps of isotrain and other trainers."""
