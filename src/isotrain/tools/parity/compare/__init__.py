"""Two runs' curves against each other: statistics, effects, the outcome."""
