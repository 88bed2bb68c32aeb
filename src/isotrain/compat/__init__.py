"""What a dependency has no hook for, one file each: the versions it is known for, and a test of its need."""
