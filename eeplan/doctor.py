"""Is this machine and installation fit for eeplan? Each finding says what to do about it.

Findings are data; drawing them is ``views``. A warning never fails the whole: planning and simulating work
without torch, and training works with other versions than the tested ones, only not as tested.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import eeplan
from eeplan.console import Progress
from eeplan.errors import EeplanError

Status = Literal["ok", "warn", "fail"]

MIN_MEMORY_BYTES = 4 * 2**30
"""The demo's two processes and what they share the machine with."""
MIN_DISK_BYTES = 2**30
PYTHON = (3, 11)
_MAIN_PACKAGES = (
    *("numpy", "scipy", "pandas", "matplotlib", "typer", "pyyaml", "pydantic", "rich"),
    *("torch", "megatron-core", "tokenizers", "tensorboard"),
)
_INSTALL_RUNTIME = "to train: pip install -c constraints.txt 'eeplan[runtime]'"
_RUNTIME_PACKAGES = frozenset({"torch", "megatron-core", "tokenizers", "tensorboard"})


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(progress: Progress) -> dict[str, Any]:
    """Run all checks.

    Returns:
        ``{"ok": no check failed, "checks": [{"name", "status", "detail", "remedy"}, …]}``
    """
    groups: dict[str, Callable[[], list[Check]]] = {
        "python": lambda: [python_check(sys.version_info[:2])],
        "packages": lambda: package_checks(pinned_versions(), installed_versions()),
        "machine": lambda: [
            cores_check(_cores()),
            memory_check(_free_memory_bytes()),
            disk_check(Path.cwd()),
        ],
        "imports": lambda: [import_check("torch"), import_check("megatron.core")],
        "processes": lambda: [processes_check()],
    }
    checks: list[Check] = []
    with progress.step("check"):
        for done, (name, group) in enumerate(groups.items()):
            progress.update(done, len(groups), name)
            checks += group()
    return {"ok": all(c.status != "fail" for c in checks), "checks": [asdict(c) for c in checks]}


def python_check(version: tuple[int, ...]) -> Check:
    """The interpreter's version: megatron-core is pinned to the newest release for this one."""
    detail = f"{platform.python_version()} ({sys.executable})"
    if version == PYTHON:
        return Check("python", "ok", detail)
    return Check("python", "fail", detail, f"use Python {PYTHON[0]}.{PYTHON[1]}")


def pinned_versions() -> dict[str, str]:
    """Versions in constraints.txt of a source checkout; empty for an installed wheel."""
    path = Path(eeplan.__file__).parents[1] / "constraints.txt"
    text = path.read_text() if path.is_file() else ""
    return {_canonical(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)}


def installed_versions() -> dict[str, str]:
    """Versions of the packages that eeplan builds on, as far as they are installed."""
    return {name: version for name in _MAIN_PACKAGES if (version := _version(name))}


def package_checks(pinned: Mapping[str, str], installed: Mapping[str, str]) -> list[Check]:
    """One finding for each package that is missing or of another version, or one that all is well."""
    checks = []
    for name in _MAIN_PACKAGES:
        have, want = installed.get(name), pinned.get(_canonical(name))
        if have is None and name in _RUNTIME_PACKAGES:
            checks.append(Check(name, "warn", "not installed; planning works without", _INSTALL_RUNTIME))
        elif have is None:
            checks.append(Check(name, "fail", "not installed", "pip install -c constraints.txt eeplan"))
        elif want and have.partition("+")[0] != want:
            remedy = f"for the tested version: pip install -c constraints.txt {name}"
            checks.append(Check(name, "warn", f"{have} installed, tested with {want}", remedy))
    against = "all as in constraints.txt" if pinned else "no constraints.txt here to compare with"
    return checks or [Check("packages", "ok", f"{len(installed)} packages, {against}")]


def cores_check(cores: int) -> Check:
    """Pipeline stages run at the same time only on cores of their own."""
    if cores >= 2:
        return Check("cores", "ok", f"{cores} usable")
    return Check(
        "cores", "warn", f"{cores} usable", "two stages will take turns; use a machine with 2 or more"
    )


def memory_check(free_bytes: int | None) -> Check:
    """Memory that new processes can have."""
    if free_bytes is None:
        return Check("memory", "warn", "cannot tell on this system", f"have {_gib(MIN_MEMORY_BYTES)} free")
    if free_bytes >= MIN_MEMORY_BYTES:
        return Check("memory", "ok", f"{_gib(free_bytes)} available")
    remedy = f"the demo needs {_gib(MIN_MEMORY_BYTES)}; end other programs or train a smaller model"
    return Check("memory", "warn", f"{_gib(free_bytes)} available", remedy)


def disk_check(folder: Path) -> Check:
    """Room for checkpoints and reports in ``folder``."""
    free = shutil.disk_usage(folder).free
    if free >= MIN_DISK_BYTES:
        return Check("disk", "ok", f"{_gib(free)} free in {folder}")
    return Check("disk", "warn", f"{_gib(free)} free in {folder}", f"make {_gib(MIN_DISK_BYTES)} of room")


def import_check(module: str) -> Check:
    """Whether a module of the runtime can be imported, and how long that takes."""
    name = f"import {module}"
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return Check(name, "warn", "not installed", _INSTALL_RUNTIME)
    start_s = time.perf_counter()
    try:
        importlib.import_module("eeplan.runtime")  # silences the notes on optional packages
        importlib.import_module(module)
    except Exception as error:  # a broken binary package can raise anything on import
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Check(name, "fail", reason, "remove the environment and install it again")
    return Check(name, "ok", f"in {time.perf_counter() - start_s:.1f} s")


def processes_check() -> Check:
    """Start two processes and let them exchange tensors."""
    name = "two processes"
    if importlib.util.find_spec("torch") is None:
        return Check(name, "warn", "not tried without torch", "install the runtime first")
    from eeplan.runtime.launch import launch

    lines: list[str] = []
    start_s = time.perf_counter()
    try:
        launch("eeplan.runtime.selftest", [], nproc=2, threads_per_process=1, on_line=lines.append)
    except EeplanError as error:
        words = lines[-1] if lines else str(error)
        return Check(name, "fail", words, "see that 127.0.0.1 works and /tmp is writable, then try again")
    backend = next((line.split()[-1] for line in lines if line.startswith("backend ")), "unknown")
    return Check(name, "ok", f"exchange tensors over {backend}, in {time.perf_counter() - start_s:.1f} s")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _cores() -> int:
    from eeplan.runtime.launch import available_cores

    return available_cores()


def _free_memory_bytes() -> int | None:
    """MemAvailable of Linux, or None."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    available = int(match[1]) * 1024 if match else None
    limit = _cgroup_limit_bytes()
    return min(filter(None, (available, limit)), default=None)


def _cgroup_limit_bytes() -> int | None:
    """What a container may still take, where one sets a limit."""
    try:
        maximum = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        current = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return None
    return None if maximum == "max" else int(maximum) - int(current)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
