"""`isotrain mismatch`: why the engine's log-probs differ from the trainer's, with a share for each cause."""
