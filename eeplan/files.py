"""Reading and writing files whole: a reader never sees half of one.

Hashing and atomic replacement live here; what the files mean does not.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from eeplan.errors import FileError


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def read_bytes(path: Path, what: str) -> bytes:
    """Contents of ``path``; ``what`` names it in the error ("run file", "profile", …).

    Raises:
        FileError: missing, a directory, or unreadable.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"{what} {path} does not exist; check the path") from None
    except IsADirectoryError:
        raise FileError(f"{what} {path} is a directory; give the file inside it") from None
    except OSError as error:
        raise FileError(f"{what} {path} cannot be read: {error.strerror}") from None


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` by temporary file, fsync and rename, making parent folders.

    Raises:
        FileError: the folder is not writable or the disk is full; ``path`` is then untouched.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; give it the permissions an ordinary open() would.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise FileError(f"cannot write {path}: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """UTF-8 version of :func:`write_bytes`."""
    write_bytes(path, text.encode())


def require_writable_folder(folder: Path, what: str) -> None:
    """Whether files can be written below ``folder``, which need not exist; found out without writing.

    Raises:
        FileError: a file stands in the way, or permission is missing.
    """
    # os.path answers False below a folder that may not be searched; Path.exists would raise.
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise FileError(f"{what} {folder} cannot be made: {nearest} is a file; choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise FileError(
            f"{what} {folder} cannot be written: no permission in {nearest}; choose another folder"
        )


def require_writable_file(path: Path, what: str) -> None:
    """Whether ``path`` can be written or replaced; found out without writing.

    Raises:
        FileError: it is a directory, or its folder cannot be written.
    """
    if path.is_dir():
        raise FileError(f"{what} {path} is a directory; give the name of a file")
    require_writable_folder(path.parent, f"folder of {what}")
