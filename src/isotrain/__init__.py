"""Post-train language models from one recipe on any device."""

__version__ = "0.1.0"
