"""Score tests of a model's constants: what a module gave beside what its config's constants give."""
