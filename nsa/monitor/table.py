"""A CSV table that stays one table however often the run resumes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from nsa.atomic_io import atomic_write_text


class Table:
    """Rows of plain cells under fixed columns, of which the first is `step`."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._columns = tuple(columns)
        self._header = ",".join(columns) + "\n"

    def rows(self) -> list[list[str]]:
        """The rows as cells, without a last one that a crash tore."""
        header, _, rest = self.path.read_text().partition("\n")
        if header and header + "\n" != self._header:
            raise ValueError(
                f"{self.path} has the columns {header!r}, not {self._header.strip()!r}; "
                "move it away"
            )
        rows = [line.split(",") for line in rest.split("\n")[:-1]]
        return [row for row in rows if len(row) == len(self._columns)]

    def numbers(self, whole: Container[str]) -> list[dict[str, float | int | None]]:
        """The rows by column, `whole` ones as int; an empty cell is None."""

        def number(column: str, cell: str) -> float | int | None:
            return (int if column in whole else float)(cell) if cell else None

        return [
            {column: number(column, cell) for column, cell in zip(self._columns, row, strict=True)}
            for row in self.rows()
        ]

    def restart(self, step: int) -> None:
        """Make the file, or drop the rows of steps after `step`, which are about to come again."""
        rows = self.rows() if self.path.exists() else []
        kept = [",".join(row) + "\n" for row in rows if int(row[0]) <= step]
        atomic_write_text(self.path, self._header + "".join(kept))

    def append(self, rows: Iterable[Sequence[str]]) -> None:
        """All of the rows or none: on a full disk a part of one would spoil the next."""
        lines = "".join(",".join(row) + "\n" for row in rows).encode()
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            written = file.write(lines)
            if written != len(lines):
                file.truncate(end)
                raise OSError(f"only {written} of {len(lines)} bytes fitted into {self.path}")
