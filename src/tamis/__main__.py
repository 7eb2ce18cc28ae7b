"""`python -m tamis`: the same as the command `tamis`."""

import sys

from tamis.cli import main

if __name__ == "__main__":
    sys.exit(main())
