"""Worker entry: ``torchrun … -m eeplan.runtime.train PLAN --out DIR`` executes a plan on every rank.

``eeplan train`` starts it on one machine. On several, start torchrun on each with its own rendezvous options;
data and ``--out`` must be on a file system that all of them see. Nothing here knows about process management
beyond dying with its parent.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from eeplan.errors import EeplanError, Preempted
from eeplan.runtime.launch import die_with_parent
from eeplan.runtime.stopping import STOP_SIGNALS, stop_requests


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train.

    Returns:
        Exit code: 0; 2 for an error of the input, told in one line; 75 when stopped by a signal after saving.
    """
    parser = argparse.ArgumentParser(prog="eeplan.runtime.train")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--restart", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        with stop_requests() as request:
            # Imports only now: a request is heard, and an orphaned worker ends, before they take time.
            from eeplan.plan import load_plan
            from eeplan.runtime.preflight import check_ranks, require_folder_for, require_wandb

            plan = load_plan(arguments.plan)
            check_ranks(plan, os.environ)
            if os.environ.get("RANK") == "0":
                require_folder_for(plan, arguments.out)
                require_wandb(plan)
            from eeplan.runtime.loop import train

            train(
                plan,
                arguments.out,
                restart=arguments.restart,
                stop_is_requested=lambda: request.is_made,
            )
    except Preempted as stopped:
        for number in STOP_SIGNALS:
            # The launcher ends the ranks that are left once the first one is gone.
            signal.signal(number, signal.SIG_IGN)
        return stopped.exit_code
    except EeplanError as error:
        print(f"eeplan: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
