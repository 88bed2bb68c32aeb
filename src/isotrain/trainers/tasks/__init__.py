"""Tasks of supervised runs, one file for each kind of data."""
