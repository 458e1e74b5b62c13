"""Checkpoint folders on disk: written whole or not at all, checked before use, found newest first.

A folder ``iter_0000060`` is built under a hidden name, every file and then the folder itself is synced, and
the folder is renamed; only then does ``latest`` move. ``manifest.json`` has the checksum of every file and
of itself. So whatever happens at whatever moment, a folder with a valid manifest is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from eeplan.errors import CheckpointError

MANIFEST, LATEST = "manifest.json", "latest"
FORMAT = 2
_NAME = re.compile(r"^iter_(\d{7,})$")


def _nothing(operation: str, path: Path) -> None:
    """Before every operation."""


@dataclass(frozen=True, slots=True)
class FileOperations:
    """Every change that saving makes on disk.

    ``before(operation, path)`` is called first: a test that raises or kills there shows what a crash at that
    very step leaves behind.
    """

    before: Callable[[str, Path], None] = _nothing

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        self.before("mkdir", path)
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a new file and sync it."""
        self.before("open", path)
        with path.open("wb") as file:
            self.before("write", path)
            file.write(data)
            file.flush()
            self.before("fsync", path)
            os.fsync(file.fileno())

    def replace(self, path: Path, data: bytes) -> None:
        """Write ``path`` whole in place of an older version, and sync its folder."""
        temporary = path.with_name(f".{path.name}.partial")
        self.write(temporary, data)
        self.rename(temporary, path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename within a folder and sync it."""
        self.before("rename", new)
        os.replace(old, new)
        self.sync_folder(new.parent)

    def sync_folder(self, path: Path) -> None:
        """Sync the names in a folder."""
        self.before("fsync", path)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder, under a hidden name first, so that no half of it looks like a checkpoint."""
        if not path.exists():
            return
        if not path.name.startswith("."):
            hidden = path.with_name(f".{path.name}.old")
            shutil.rmtree(hidden, ignore_errors=True)
            self.rename(path, hidden)
            path = hidden
        self.before("remove", path)
        # What stays behind under a hidden name is removed by the next save.
        shutil.rmtree(path, ignore_errors=True)

    def tensor_writer(self, folder: Path) -> TensorWriter:
        """A writer for torch.distributed.checkpoint below ``folder``."""
        return TensorWriter(folder, self.before)


class TensorWriter(dcp.FileSystemWriter):
    """torch.distributed.checkpoint's writer that announces its writes, syncs and renames too.

    ``problems`` has the errors of the disk; torch's serialisation turns some of them into others.
    """

    def __init__(self, folder: Path, before: Callable[[str, Path], None]) -> None:
        # Several threads would make the order of operations, and so the meaning of a failed one, random.
        super().__init__(folder, thread_count=1, sync_files=True)
        self.problems: list[OSError] = []
        self.fs = _AnnouncingFileSystem(before, self.problems)


class _AnnouncingFileSystem(FileSystem):
    def __init__(self, before: Callable[[str, Path], None], problems: list[OSError]) -> None:
        self._before = before
        self._problems = problems

    def create_stream(self, path: Any, mode: str) -> Any:
        with _noted_in(self._problems):
            self._before("open", Path(path))
            return _AnnouncingStream(Path(path).open(mode), Path(path), self._before, self._problems)

    def rename(self, path: Any, new_path: Any) -> None:
        with _noted_in(self._problems):
            self._before("rename", Path(new_path))
            super().rename(path, new_path)


class _AnnouncingStream:
    """A file that announces what is done with it; asked for its number, it is about to be synced."""

    def __init__(
        self, file: Any, path: Path, before: Callable[[str, Path], None], problems: list[OSError]
    ) -> None:
        self._file, self._path, self._before, self._problems = file, path, before, problems

    def __enter__(self) -> _AnnouncingStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        with _noted_in(self._problems):
            self._before("write", self._path)
            return int(self._file.write(data))

    def fileno(self) -> int:
        with _noted_in(self._problems):
            self._file.flush()
            self._before("fsync", self._path)
            return int(self._file.fileno())

    def close(self) -> None:
        with _noted_in(self._problems):
            self._file.close()


@contextlib.contextmanager
def _noted_in(problems: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(error)
        raise


def folder_name(iteration: int) -> str:
    """Name of the checkpoint after ``iteration`` iterations."""
    return f"iter_{iteration:07d}"


def partial_folder(folder: Path, iteration: int) -> Path:
    """Where that checkpoint is built."""
    return folder / f".{folder_name(iteration)}.partial"


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoint folders below ``folder``, newest first; valid or not.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if _NAME.match(path.name)] if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints {folder} cannot be read ({error.strerror}); check permissions"
        ) from None
    return sorted(found, key=iteration_of, reverse=True)


def iteration_of(path: Path) -> int:
    """Iterations done, from the name of a checkpoint folder."""
    match = _NAME.match(path.name)
    assert match, f"{path} is no checkpoint folder"
    return int(match[1])


def clear_leftovers(folder: Path, operations: FileOperations) -> None:
    """Remove what interrupted saves left under hidden names."""
    for path in sorted(folder.glob(".iter_*")):
        operations.remove_tree(path)


def commit(
    folder: Path, iteration: int, facts: dict[str, Any], operations: FileOperations, keep: int | None
) -> Path:
    """Make the partial folder of ``iteration`` a checkpoint, move ``latest``, remove the oldest.

    Args:
        facts: stored in the manifest beside the checksums.
        keep: checkpoints that stay; None keeps all.
    """
    partial, final = partial_folder(folder, iteration), folder / folder_name(iteration)
    files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
    operations.write(partial / MANIFEST, _manifest_text({"format": FORMAT, **facts, "files": files}))
    operations.sync_folder(partial)
    # Only when a damaged one of the same iteration was passed over.
    operations.remove_tree(final)
    operations.rename(partial, final)
    operations.replace(folder / LATEST, f"{final.name}\n".encode())
    for old in checkpoints_in(folder)[keep:] if keep else []:
        operations.remove_tree(old)
    return final


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint folder against its manifest, and the manifest against itself.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file is missing, unreadable or damaged.
    """
    try:
        text = (path / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(text)
        files: dict[str, str] = manifest["files"]
        written_format = manifest["format"]
        if written_format == FORMAT and text != _manifest_text(manifest):
            raise ValueError("changed after it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is missing or damaged; use another") from None
    if written_format != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {written_format}, this eeplan reads {FORMAT}; "
            "use the version that wrote it"
        )
    for name, expected in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing; use another checkpoint")
        try:
            actual = _sha256(path / name)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path}: {name} cannot be read ({error.strerror}); use another checkpoint"
            ) from None
        if actual != expected:
            raise CheckpointError(
                f"checkpoint {path}: {name} is damaged (checksum differs); use another checkpoint"
            )
    return manifest


def _manifest_text(manifest: dict[str, Any]) -> bytes:
    """The one way to write a manifest, with its own checksum; any other bytes are damage."""
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "manifest_sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
