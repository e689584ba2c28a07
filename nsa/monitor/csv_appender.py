"""CSV file that stays one table however often the run resumes or rolls back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from nsa.atomic_io import atomic_write_text


class CsvAppender:
    """Rows of cells under fixed columns, the first of which is `step`."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._columns = tuple(columns)
        self._header = ",".join(columns) + "\n"

    def rows(self) -> list[list[str]]:
        """Read the complete rows, without a last one that a crash tore."""
        header, _, rest = self.path.read_text().partition("\n")
        if header and header + "\n" != self._header:
            raise ValueError(
                f"{self.path}: the columns are {header!r}, not {self._header.strip()!r}; "
                "move the file away"
            )
        rows = [line.split(",") for line in rest.split("\n")[:-1]]
        return [row for row in rows if len(row) == len(self._columns)]

    def numbers(self, integers: Container[str]) -> list[dict[str, float | int | None]]:
        """Read the rows by column name, those of `integers` as int; an empty cell is None."""

        def number(column: str, cell: str) -> float | int | None:
            return (int if column in integers else float)(cell) if cell else None

        return [
            {column: number(column, cell) for column, cell in zip(self._columns, row, strict=True)}
            for row in self.rows()
        ]

    def restart(self, step: int) -> None:
        """Create the file, or drop the rows after `step`: these steps are taken again."""
        rows = self.rows() if self.path.exists() else []
        kept = [",".join(row) + "\n" for row in rows if int(row[0]) <= step]
        atomic_write_text(self.path, self._header + "".join(kept))

    def append(self, rows: Iterable[Sequence[str]]) -> None:
        """Append all rows or none: a torn row on a full disk would spoil the next one."""
        lines = "".join(",".join(row) + "\n" for row in rows).encode()
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            written = file.write(lines)
            if written != len(lines):
                file.truncate(end)
                raise OSError(f"{self.path}: only {written} of {len(lines)} bytes fit on the disk")
