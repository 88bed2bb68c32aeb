"""Two runs in, a verdict out; nothing here needs torch."""
