"""The typed recipe that users write, loaded from YAML with overrides. Imports no torch."""
