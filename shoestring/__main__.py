"""`python -m shoestring`: the command line of this very interpreter, as launchers start it."""

from shoestring.cli import main

main()
