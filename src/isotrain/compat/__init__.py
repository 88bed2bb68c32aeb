"""Patches of dependencies without a hook, one file each, with the known versions and a test of the need."""
