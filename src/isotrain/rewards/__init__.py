"""Responses in, scores out: rules, mathematics, tests of code, a user's function; each bounded in time."""
