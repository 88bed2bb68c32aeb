"""What the user writes: the typed recipe, loaded from YAML with overrides. Imports no torch."""
