"""Hugging Face datasets as a document source, streamed with `datasets`.

`datasets` retries for minutes, so one request probes the server first.
"""

from __future__ import annotations

import copy
import os
from itertools import islice
from typing import Any

from nsa.data.config import DataConfig
from nsa.data.source import (
    Cursor,
    DataError,
    Document,
    Documents,
    Source,
    SourceUnreachable,
    text_of,
)
from nsa.system import with_timeout
from nsa.text import type_and_message

FINEWEB_EDU = ("HuggingFaceFW/fineweb-edu", "sample-10BT")
BUILDERS = ("json", "parquet", "csv", "text", "arrow")  # `datasets`' readers of files
ROWS_PER_BLOCK = 64  # a copy of the state of `datasets` takes longer than a row: one per block
PROBE_SECONDS = 5.0  # a server that does not respond for this long counts as down
SERVER_ERRORS = (500, 502, 503, 504)
WITHOUT_HUB = (
    "run `nsa data prepare` where there is a network and set data.source to the folder that it "
    "wrote; or use a source that needs no network: --set data.source=embedded; or copy HF_HOME "
    "from a machine that loaded the whole dataset (not streamed), and set HF_HUB_OFFLINE=1"
)


def check_hub_name(name: str) -> None:
    """Raise a DataError if a source names local files, which `datasets` could read too."""
    path = name.removeprefix("hf:")
    if path in BUILDERS or path.startswith(("/", ".", "~")) or os.path.isdir(path):
        raise DataError(
            f"data.source = {name!r}: files by way of `datasets` are withdrawn in this version; "
            "name the file or folder itself, without hf:"
        )


class Hub(Source):
    """The documents of a dataset: `fineweb_edu`, or `hf:` and a name.

    Their size is unknown: the sizes that a hub lists include all columns.
    """

    def __init__(self, config: DataConfig, name: str) -> None:
        self.name, self._config = name, config
        self._path, self._subset = name.removeprefix("hf:"), config.subset
        if name == "fineweb_edu":
            self._path, self._subset = FINEWEB_EDU[0], config.subset or FINEWEB_EDU[1]
        self._opened = self._open(None)

    def _open(self, revision: str | None) -> tuple[Any, str]:
        """Open the dataset; return it and its revision."""
        import datasets

        if not datasets.config.HF_HUB_OFFLINE:
            path = f"datasets/{self._path}/resolve/{revision or 'main'}/README.md"
            probe(self.name, f"{hub_url()}/{path}")
        # Switch off two requests: one counts the download and takes seconds without a network, the
        # other looks for Parquet files on another server.
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        datasets.config.USE_PARQUET_EXPORT = False
        try:
            builder = datasets.load_dataset_builder(
                self._path, self._subset, data_files=self._config.pattern, revision=revision
            )
            if hasattr(builder.config, "batch_size"):  # its default, a row group's length, may be 0
                builder.config.batch_size = ROWS_PER_BLOCK
            return builder.as_streaming_dataset(split=self._config.split), str(builder.hash)
        except Exception as error:  # of `datasets`, its file systems and its builders
            raise self._open_error(error) from error

    def _open_error(self, error: Exception) -> DataError:
        import datasets

        settings = f"data.subset = {self._subset!r}, data.split = {self._config.split!r}"
        if self._config.pattern:
            settings += f", data.pattern = {self._config.pattern!r}"
        reason = type_and_message(error)
        if isinstance(error, StopIteration):  # `datasets` reads the fields from the first record
            reason = "there is nothing in its first files"
        message = f"data.source = {self.name!r} with {settings}: {reason}"
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            message += "; correct the name, or log in with `hf auth login` if it is not public"
        elif isinstance(error, OSError):
            message += f"; {WITHOUT_HUB}"
        return DataError(message)

    def read(self, cursor: Cursor | None = None) -> Documents:
        """Start a pass, or resume one after a document.

        A cursor holds the state of `datasets` before a block of rows ("dataset"), and how many rows
        are consumed in this block ("given") and in total ("rows").
        """
        stream, revision = self._opened
        cursor = cursor or {"revision": revision, "rows": 0, "dataset": None, "given": 0}
        if cursor["revision"] != revision:
            stream, _ = self._open(cursor["revision"])
        # A stream holds the state of one pass, so each pass reads a copy, which `shard` returns.
        stream = stream.shard(1, 0)
        state, consumed, total = cursor["dataset"], cursor["given"], cursor["rows"]
        if state is not None:
            stream.load_state_dict(copy.deepcopy(state))
        try:
            for record in islice(stream, consumed, None):
                total, consumed = total + 1, consumed + 1
                if text := text_of(record, self._config.text_field, self.name):
                    after = {"rows": total, "dataset": state, "given": consumed}
                    location = f"{self.name}: row {total}"
                    yield Document(text.encode("utf-8", "replace"), location), cursor | after
                if consumed == ROWS_PER_BLOCK:
                    state, consumed = stream.state_dict(), 0
        except DataError:
            raise
        except Exception as error:  # of `datasets`, its file systems and its builders
            fix = f"retries did not help: run the same command again to continue, or {WITHOUT_HUB}"
            if isinstance(error, ValueError):  # Arrow's errors are ValueErrors
                fix = (
                    "the file of this row is broken: repair it, or name other files in data.pattern"
                )
            reason = type_and_message(error)
            raise DataError(
                f"{self.name}: reading broke off after row {total} ({reason}); {fix}"
            ) from error


def hub_url() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def probe(name: str, url: str, fix: str = WITHOUT_HUB) -> None:
    """Raise SourceUnreachable, which names `name`, if the server of `url` fails or is silent."""
    from huggingface_hub.utils import get_session  # configured with proxies and certificates

    def head() -> int:
        return get_session().head(url, timeout=PROBE_SECONDS).status_code

    try:
        status = with_timeout(1.5 * PROBE_SECONDS, head)  # DNS has no timeout
    except Exception as error:  # the exception types of the client differ between versions
        raise SourceUnreachable(
            f"{name}: {url} cannot be reached ({type_and_message(error)}); {fix}"
        ) from None
    if status in SERVER_ERRORS:
        raise SourceUnreachable(f"{name}: {url} has a server error (HTTP status {status}); {fix}")
