"""Where the time of a run's profiled steps goes."""
