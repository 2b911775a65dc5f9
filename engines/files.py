"""Atomic writing of files and folders: a crash leaves the old one or the new one, never a half."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spot_deploy.engines.errors import SpotDeployError

try:
    import fcntl
except ImportError:  # Windows: leftovers cannot be told from what is being written
    fcntl = None  # type: ignore[assignment]

STAGING = ".spot-deploy-staging-"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends without an error."""
    handle, name = tempfile.mkstemp(prefix=STAGING, suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    held = _hold(temporary)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if held is not None:
            os.close(held)
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write a file atomically (UTF-8)."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, document: Any) -> None:
    """Write JSON atomically, refusing NaN and infinities."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


@contextmanager
def staged_folder(target: Path, *, force: bool, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A fresh folder beside `target` that takes its place when the block ends without an error.

    Args:
        target: the folder to make. A link stays, and what it names is replaced.
        force: replace one of ours that is already there.
        ours: tells whether a folder is one that this tool wrote; no other is ever replaced.

    Raises:
        SpotDeployError: `target` is there and may not be replaced, at the start or at the end, or cannot be made.
    """
    try:
        target = target.resolve()
        _check_target(target, force, ours)
        stage = Path(tempfile.mkdtemp(prefix=STAGING, dir=target.parent))
    except (OSError, RuntimeError) as error:  # RuntimeError: links that loop
        raise SpotDeployError(
            "output-path", f"cannot write {target}", seen=str(error), fix="choose another path for the output"
        ) from error
    held = _hold(stage)
    try:
        stage.chmod(0o777 & ~_umask())
        yield stage
        for path in stage.rglob("*"):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())
        if _check_target(target, force, ours):
            _exchange(stage, target)  # what was there is now the stage, and is removed below
        else:
            os.replace(stage, target)
    finally:
        if held is not None:
            os.close(held)
        if stage.exists():
            shutil.rmtree(stage)


def _hold(path: Path) -> int | None:
    """Lock a file or folder until its descriptor is closed or this process ends, however it ends."""
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def in_use(path: Path) -> bool:
    """Whether a process that still runs is writing this staged file or folder."""
    if fcntl is None:
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _check_target(target: Path, force: bool, ours: Callable[[Path], bool]) -> bool:
    """Whether there is a folder to replace.

    Raises:
        SpotDeployError: what is there may not be replaced, or the folder above is missing.
    """
    if not target.parent.is_dir():
        raise SpotDeployError(
            "output-parent-missing",
            f"cannot write {target}",
            seen=f"no folder {target.parent}",
            fix=f"mkdir -p {target.parent}",
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    replaceable = target.is_dir() and ours(target)
    if not (force and replaceable):
        raise SpotDeployError(
            "output-exists",
            f"{target} is already there",
            wanted="a path that does not exist, or an empty folder",
            fix="give --force to replace it" if replaceable else "choose another path; it is not ours to replace",
        )
    return True


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders: in one step where the system can (Linux renameat2), else in three renames."""
    at_cwd, exchange = -100, 2
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if rename is not None and rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
        return
    spare = one.with_name(one.name + "-old")
    os.replace(other, spare)
    os.replace(one, other)
    os.replace(spare, one)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begin, in bytes, and its entries by name: dtype, shape, data_offsets.

    Raises:
        ValueError: no such file's header.
    """
    with path.open("rb") as file:
        first = file.read(8)
        (size,) = struct.unpack("<Q", first.ljust(8, b"\0"))
        if first == b"version ":
            raise ValueError("a git-lfs pointer, not the file itself: git lfs pull")
        if size > path.stat().st_size - 8:
            raise ValueError("not a safetensors file, or cut off")
        entries: dict[str, Any] = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return 8 + size, entries


def read_json(path: Path, *, code: str, fix: str, limit: int = 64 << 20) -> Any:
    """Parse a JSON file strictly: UTF-8, a size cap, no duplicate keys, no NaN.

    Raises:
        SpotDeployError: with `code` and `fix`, naming what is wrong.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    try:
        data = path.read_bytes()
        if len(data) > limit:
            raise ValueError(f"{len(data)} bytes, at most {limit} expected")
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise SpotDeployError(
            code, f"cannot read {path.name}", seen=str(error), wanted="valid JSON", fix=fix
        ) from error
