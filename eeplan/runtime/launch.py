"""Starting the ranks of one job on this machine, and seeing to it that none of them outlives it.

torchrun is the launcher: rendezvous, rank numbers and the first notice of a dead rank are its work. This
module adds what a command line needs around it: output rank by rank, one message that names the rank and the
cause, and no orphans, whatever dies first. Each process asks the kernel to be killed with its parent
(:func:`die_with_parent`), so even a SIGKILL of ``eeplan`` itself takes all ranks along.

Several machines are not covered: start torchrun on each of them with its own rendezvous options.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from eeplan.errors import EeplanError, LaunchError, Preempted
from eeplan.runtime.stopping import STOP_FILE_VARIABLE, StopRequest, listening, stop_requests

ERROR_PREFIX = "eeplan: error: "
"""How a rank reports an error that the user can act on; it then exits with code 2."""

_JOB_VARIABLE = "EEPLAN_JOB"
_PARENT_VARIABLE = "EEPLAN_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_SHUTDOWN_S = 2
"""Time that torchrun gives the surviving ranks between SIGTERM and SIGKILL."""
_HOLD_S = 10.0
"""A traceback is held back this long, to see whether it only echoes the death of another rank."""
_TORCH_RANK = re.compile(r"^\[rank\d+\]: ?")
"""Put before each line of a traceback by torch; the rank is known here anyway."""
_NOISE = re.compile(r"^USDT:.*(profiler_start|profiler_stop)$")
"""Written by torch's profiler at each use; no setting of its own turns it off."""
_CLOSED = re.compile(r"Sending process (\d+) closing signal")
"""torchrun's notice of ending a survivor, whose exit code then says nothing."""
_FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+).*?^\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)", re.M | re.S)


def launch(
    module: str,
    args: Sequence[str],
    *,
    nproc: int,
    threads_per_process: int | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    saves_when_stopped: bool = False,
) -> None:
    """Run ``python -m module args`` in ``nproc`` ranks and wait for all of them.

    Args:
        module: importable worker module; it calls :func:`die_with_parent` before anything heavy.
        args: its command line.
        nproc: number of ranks.
        threads_per_process: OMP_NUM_THREADS of each; None shares the cores evenly.
        log: file that all output is appended to, with the rank before each line.
        on_line: called with each line that a rank writes, in order of arrival; lines of ranks other than 0
            carry their rank. None writes to stderr.
        saves_when_stopped: the workers answer SIGTERM and SIGUSR1 by saving and ending with code 75
            (``stopping``); here and at torchrun these signals are then passed on to them, and nothing else.

    Raises:
        EeplanError: a rank reported an error of the input (``eeplan: error: …`` and exit code 2).
        LaunchError: a rank was killed or failed; the message names it. No rank is left running.
        Preempted: the ranks have saved and ended as asked.
    """
    job = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eeplan-launch-")))
        stop_file = folder / "stop" if saves_when_stopped else None
        stack.enter_context(
            listening(StopRequest(stop_file, tells=True)) if stop_file else _sigterm_as_exit()
        )
        log_file = stack.enter_context(_open_log(log)) if log else None
        output = _Output(folder, on_line or _to_stderr, log_file)
        stack.callback(output.close)
        with (folder / "launcher.log").open("wb") as launcher_log:
            process = subprocess.Popen(
                _command(module, args, nproc, folder, stop_file),
                env=_environment(job, threads_per_process or default_threads(nproc), stop_file),
                stdin=subprocess.DEVNULL,
                stdout=launcher_log,
                stderr=launcher_log,
                start_new_session=True,
            )
        try:
            _wait(process, job, output)
        finally:
            _kill_job(process, job)
            output.pump()
        launcher_text = (folder / "launcher.log").read_text(errors="replace")
        if process.returncode == 0:
            output.release()
            return
        output.log_only(launcher_text)
        raise _failure(process.returncode, launcher_text, output, log)


def _wait(process: subprocess.Popen[bytes], job: str, output: _Output) -> None:
    """Wait for the launcher, and help it where it would be patient: it gives survivors 30 s to end."""
    launcher = _Tail((output.folder / "launcher.log").open(errors="replace"))
    deadline = float("inf")
    with launcher.file:
        while process.poll() is None:
            output.pump()
            if any(_CLOSED.search(line) for line in launcher.lines()):
                deadline = min(deadline, time.monotonic() + _SHUTDOWN_S)
            if time.monotonic() > deadline:
                _kill(pid for pid in processes_of(job) if pid != process.pid)
            time.sleep(_POLL_S)


def die_with_parent() -> None:
    """Have this process killed when its parent dies, and end it now if that has happened already.

    Worker entry points call this first, before they import anything heavy. Outside Linux a thread watches the
    parent instead.
    """
    parent = os.getppid()
    # Set by launch(); taken away so that a worker's own children do not compare against it.
    expected = int(os.environ.pop(_PARENT_VARIABLE, parent))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != expected:
        os._exit(128 + signal.SIGKILL)


def default_threads(nproc: int) -> int:
    """Compute threads per rank when ``nproc`` ranks share this machine's cores evenly."""
    return max(1, available_cores() // nproc)


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Be the launcher process: torchrun, tied to the life of the process that called :func:`launch`."""
    die_with_parent()
    os.environ[_PARENT_VARIABLE] = str(os.getpid())
    passing_on = stop_requests(tells=True) if STOP_FILE_VARIABLE in os.environ else contextlib.nullcontext()
    with passing_on:
        from torch.distributed.run import main as torchrun

        torchrun(sys.argv[1:])


@dataclass(slots=True)
class _Tail:
    """Whole lines of a growing file."""

    file: TextIO
    partial: str = ""

    def lines(self) -> list[str]:
        *whole, self.partial = (self.partial + self.file.read()).split("\n")
        return whole


@dataclass(slots=True)
class _Output:
    """Passes on what the ranks write, holding back what may turn out to be an echo of another's death."""

    folder: Path
    on_line: Callable[[str], None]
    log: TextIO | None
    tails: dict[Path, _Tail] = field(default_factory=dict)
    held: list[tuple[float, int, str]] = field(default_factory=list)
    holding: set[int] = field(default_factory=set)
    error_line: str = ""

    def pump(self) -> None:
        """Read and route everything written since the last call."""
        for path in sorted(self.folder.glob("*/attempt_*/*/std*.log")):
            if path not in self.tails:
                self.tails[path] = _Tail(path.open(errors="replace", newline="\n"))
        for path, tail in self.tails.items():
            for line in tail.lines():
                self._route(int(path.parent.name), _TORCH_RANK.sub("", line))
        if self.held and time.monotonic() - self.held[0][0] > _HOLD_S:
            self.release()

    def release(self) -> None:
        """Pass on all lines that were held back."""
        for _, rank, line in self.held:
            self._emit(rank, line)
        self.held.clear()
        self.holding.clear()

    def close(self) -> None:
        """Close the files that the ranks wrote to."""
        for tail in self.tails.values():
            tail.file.close()

    def log_only(self, text: str) -> None:
        """Write the launcher's own words to the log file."""
        if self.log:
            self.log.writelines(f"[launcher] {line}\n" for line in text.splitlines())
            self.log.flush()

    def _route(self, rank: int, line: str) -> None:
        if self.log:
            self.log.write(f"[rank {rank}] {line}\n")
            self.log.flush()
        if _NOISE.match(line):
            return
        if line.startswith(ERROR_PREFIX):
            self.error_line = self.error_line or line.removeprefix(ERROR_PREFIX)
            return
        if line.startswith("Traceback (most recent call last)"):
            self.holding.add(rank)
        if rank in self.holding:
            self.held.append((time.monotonic(), rank, line))
        else:
            self._emit(rank, line)

    def _emit(self, rank: int, line: str) -> None:
        self.on_line(line if rank == 0 else f"[rank {rank}] {line}")


def _failure(code: int, launcher_text: str, output: _Output, log: Path | None) -> EeplanError:
    """What to tell the user, from the launcher's exit code and last words and the ranks' output."""
    see = f"; log: {log}" if log else ""
    closed = set(_CLOSED.findall(launcher_text))
    failures = [(int(r), int(c), pid) for r, c, pid in _FAILURE.findall(launcher_text) if pid not in closed]
    first = min(failures, key=lambda failure: _by_cause(failure[1]), default=None)
    if first and first[1] < 0 and _by_cause(first[1])[0] == 0:
        return _killed(first[0], -first[1], first[2], see)
    if output.error_line:
        return EeplanError(output.error_line)
    if first and first[1] == Preempted.exit_code:
        return Preempted("training was stopped by a signal and is saved; the same command goes on")
    output.release()
    if first is None:
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        words = next(
            (line.strip() for line in reversed(launcher_text.splitlines()) if line.strip()), "no output"
        )
        return LaunchError(f"the launcher {how} and no rank is left running: {words}{see}")
    if first[1] < 0:
        return _killed(first[0], -first[1], first[2], see)
    return LaunchError(
        f"rank {first[0]} ended with exit code {first[1]} and the other ranks were stopped; what it wrote is "
        f"above{see}"
    )


def _by_cause(exit_code: int) -> tuple[int, int]:
    """Sort key: a kill explains the errors of other ranks; an abort may come of a peer's lost connection."""
    if exit_code == -signal.SIGABRT:
        return 2, exit_code
    return (0, exit_code) if exit_code < 0 else (1, -exit_code)


def _killed(rank: int, number: int, pid: str, see: str) -> LaunchError:
    advice = ""
    if number == signal.SIGKILL:
        advice = "; if nobody did that by hand, the machine ran out of memory: lower micro_batch_size"
    return LaunchError(
        f"rank {rank} (process {pid}) was killed by {_signal_name(number)} and the other ranks were "
        f"stopped{advice}{see}"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _command(module: str, args: Sequence[str], nproc: int, folder: Path, stop_file: Path | None) -> list[str]:
    # torchrun would answer SIGTERM by ending the ranks within seconds; saving may take longer.
    handled = ("--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT") if stop_file else ()
    return [
        *(sys.executable, "-m", "eeplan.runtime.launch"),
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(nproc)),
        *("--monitor-interval", "0.05", "--shutdown-timeout", str(_SHUTDOWN_S)),
        *("--redirects", "3", "--log-dir", str(folder)),
        *handled,
        *("--module", module, *args),
    ]


def _environment(job: str, threads: int, stop_file: Path | None) -> dict[str, str]:
    # All ranks are on this machine; gloo would otherwise look up the host's name.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        **loopback,
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        _JOB_VARIABLE: job,
        _PARENT_VARIABLE: str(os.getpid()),
        **({STOP_FILE_VARIABLE: str(stop_file)} if stop_file else {}),
    }


def _kill_job(process: subprocess.Popen[bytes], job: str) -> None:
    """Kill the launcher, and every process that carries the job's mark, however far down."""
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5.0
    while (alive := processes_of(job)) and time.monotonic() < deadline:
        _kill(alive)
        time.sleep(_POLL_S)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(job: str) -> list[int]:
    """Living processes, apart from this one, whose environment carries the mark of ``job``.

    Empty where there is no /proc; :func:`die_with_parent` then does the work alone.
    """
    mark = f"{_JOB_VARIABLE}={job}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        # A process that is gone, or somebody else's, is none of ours.
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit meanwhile, so that the ranks are stopped and temporary files removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _open_log(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot write the log {path}: {error.strerror}; choose another folder") from None


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    main()
