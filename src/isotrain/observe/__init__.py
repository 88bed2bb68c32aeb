"""What a run shows and leaves behind: metrics, loggers, progress, plots, the run directory."""
