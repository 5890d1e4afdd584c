"""`python -m lightning_diffpipe.cli`."""

from lightning_diffpipe.cli import main

main()
