"""What a run shows and leaves behind: metrics, sinks, progress, plots, the run directory."""
