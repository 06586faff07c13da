"""`python -m twoaxis` is the `twoaxis` command."""

import sys

from twoaxis.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
