"""Worker entry: ``torchrun … -m eeplan.runtime.train PLAN --out DIR`` executes a plan on every rank.

``eeplan train`` starts it; nothing here knows about process management beyond dying with its parent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eeplan.errors import EeplanError
from eeplan.runtime.launch import die_with_parent


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, train, and turn the user's errors into one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="eeplan.runtime.train")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        # Heavy imports only now, so that an orphaned worker ends before it loads torch.
        from eeplan.plan import load_plan
        from eeplan.runtime.loop import train

        train(load_plan(arguments.plan), arguments.out)
    except EeplanError as error:
        print(f"eeplan: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
