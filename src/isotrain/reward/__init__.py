"""Responses in, scores out: rules, mathematics, a user's function; each call bounded in time."""
