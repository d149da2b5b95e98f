"""`RecordKeeper`: writes the record of a visit where a person wants it, and spoils no other file.

A file that is there already is added to if it is a record of the same device. What of it is damaged
is put aside, as for every record. Anything else is refused before anything is measured.
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memlab.arguments.units import MIB, format_bytes
from memlab.errors import ConfigError, MemlabError
from memlab.records.records import SUFFIX, Kind, append, cut_damage, read_lines

NEEDED_BYTES = 16 * MIB  # of disk; a visit's record takes less than one


class RecordKeeper:
    """The lines of a visit: in memory, and in a file if there is one.

    Attributes:
        path: of the file; None for none.
        visit: when the visit began, by which its lines are known.
        lines: by kind, what was added.
        said: a sentence on what went wrong with the file; empty if nothing did.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.visit = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.lines: list[tuple[Kind, dict[str, Any]]] = []
        self.said = ""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Begin a visit to a device.

        Raises:
            ConfigError: the file cannot be used; the message says why and what to do.
        """
        if self.path is not None:
            try:
                _check(self.path, str(facts["device"]))
            except OSError as error:
                raise ConfigError(_unwritable(self.path, error)) from None
        self.add(Kind.VISIT, {"visit": self.visit, **facts})
        if self.said:
            raise ConfigError(self.said)

    def add(self, kind: Kind, line: Mapping[str, Any]) -> None:
        """Add a line. A disk that is full ends the file at its last whole line."""
        self.lines.append((kind, dict(line)))
        if self.path is None or self.said:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            append(self.path, kind, line)
        except OSError as error:
            self.said = _unwritable(self.path, error)
            if self.path.exists() and self.path.stat().st_size > size:
                os.truncate(self.path, size)


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"--out {path} cannot be written ({error.strerror or error}); take a file in a folder that "
        "can be written, on a disk with room"
    )


def _check(path: Path, device: str) -> None:
    """Raise ConfigError if the file is no place for a record of this device."""
    if path.suffix != SUFFIX:
        raise ConfigError(f"--out {path} must end in {SUFFIX}, as every record does")
    folder = next(each for each in path.absolute().parents if each.exists())
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"--out {path}: the disk has {format_bytes(free)} free; allowed is at least "
            f"{format_bytes(NEEDED_BYTES)}: take another disk, or leave --out away"
        )
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file in it")
    if path.exists() and path.stat().st_size:
        _take_up(path, device)


def _take_up(path: Path, device: str) -> None:
    """Make an existing record ready for more lines.

    Raises:
        ConfigError: it is of another device or schema, or no record at all.
    """
    remedy = "it is left as it is; name another file"
    try:
        lines = read_lines(path)
    except MemlabError as error:
        raise ConfigError(f"--out {path}: {error}; {remedy}") from None

    visits = lines.of(Kind.VISIT)
    if not visits:
        raise ConfigError(f"--out {path} is not a record; {remedy}")
    if visits[0].get("device") != device:
        raise ConfigError(
            f"--out {path} is a record of {visits[0].get('device')!r}, and this is {device!r}; "
            f"{remedy}"
        )
    cut_damage(lines)
