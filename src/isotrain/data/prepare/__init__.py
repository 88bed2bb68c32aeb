"""Public data sets to local files, one module each."""
