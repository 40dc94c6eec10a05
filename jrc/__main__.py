"""`python -m jrc`: the command line."""

import sys

from jrc.cli import main

if __name__ == "__main__":
    sys.exit(main())
