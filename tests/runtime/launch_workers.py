"""What the ranks of test_launch do. Run as ``python -m launch_workers BEHAVIOUR [FOLDER]``."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eeplan.runtime.launch import die_with_parent


def main(behaviour: str, folder: Path) -> None:
    die_with_parent()
    rank = int(os.environ["RANK"])
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    globals()[behaviour](rank, folder)


def hello(rank: int, folder: Path) -> None:
    print(f"hello from {rank} of {os.environ['WORLD_SIZE']}", file=sys.stderr)
    print(f"threads {os.environ['OMP_NUM_THREADS']}")


def wait(rank: int, folder: Path) -> None:
    """Every rank waits for a kill, with a child of its own that knows nothing of parents."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    (folder / f"rank{rank}.ready").touch()
    time.sleep(120)


def stubborn(rank: int, folder: Path) -> None:
    """As ``wait``, deaf to the polite signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait(rank, folder)


def talk(rank: int, folder: Path) -> None:
    """Ranks exchange tensors without end, so that a death is met inside a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    (folder / f"rank{rank}.ready").touch()
    while True:
        dist.all_reduce(torch.ones(4))


def user_error(rank: int, folder: Path) -> None:
    if rank == 1:
        print("eeplan: error: the moon is full; wait a night", file=sys.stderr)
        sys.exit(2)
    time.sleep(120)


def bug(rank: int, folder: Path) -> None:
    if rank == 1:
        raise AssertionError("a bug of our own")
    time.sleep(120)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
