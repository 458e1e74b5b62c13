"""``python -m eeplan``."""

import sys

from eeplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
