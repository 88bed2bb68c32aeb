"""Prompts in, trajectories out: generation engines behind one small protocol."""
