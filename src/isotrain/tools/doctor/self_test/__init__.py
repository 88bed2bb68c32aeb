"""The self-test: what to run first on a new machine, stage by stage, with a verdict each."""
