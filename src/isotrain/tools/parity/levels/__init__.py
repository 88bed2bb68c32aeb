"""The levels at which a computation is looked at, from operators to whole runs."""
