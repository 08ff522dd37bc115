"""`python -m penstock.cli` runs the command `penstock`."""

from penstock.cli.main import main

main()
