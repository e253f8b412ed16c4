"""`python -m adafrugal` is the same command as `adafrugal`."""

import sys

from adafrugal.cli import main

if __name__ == "__main__":
    sys.exit(main())
