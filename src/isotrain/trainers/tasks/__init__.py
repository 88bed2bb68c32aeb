"""What supervised runs learn from a step's data, one file for each kind."""
