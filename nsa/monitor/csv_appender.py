"""CSV file of logged steps: rows are appended, and dropped when steps run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from nsa.atomic_io import atomic_write_text


class CsvAppender:
    """Rows of cells under fixed columns, the first of which is `step`."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = ",".join(columns)

    def restart(self, step: int) -> None:
        """Create the file, or drop the rows after `step` and those that a crash tore."""
        text = self._path.read_text() if self._path.exists() else ""
        header, _, rest = text.partition("\n")
        if header and header != self._columns:
            raise ValueError(
                f"{self._path}: the columns are {header!r}, not {self._columns!r}; "
                "move the file away"
            )
        kept = [
            line
            for line in rest.split("\n")[:-1]
            if line.count(",") == self._columns.count(",") and int(line.partition(",")[0]) <= step
        ]
        atomic_write_text(self._path, "\n".join([self._columns, *kept]) + "\n")

    def append(self, rows: Iterable[Sequence[str]]) -> None:
        """Append all rows or none: a torn row on a full disk would spoil the next one."""
        lines = "".join(",".join(row) + "\n" for row in rows).encode()
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            written = file.write(lines)
            if written != len(lines):
                file.truncate(end)
                raise OSError(f"{self._path}: only {written} of {len(lines)} bytes were written")
