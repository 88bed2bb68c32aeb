"""The parts of the self-test, one program each; a crash or hang of one is not the end of the others."""
