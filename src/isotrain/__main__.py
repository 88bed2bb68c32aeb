"""`python -m isotrain` is `isotrain`."""

from isotrain.cli.main import main

main()
