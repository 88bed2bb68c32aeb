"""A verdict as files that people look at."""
