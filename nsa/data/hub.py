"""Hugging Face datasets as a document source, streamed with `datasets`.

`datasets` reads and resumes. A cursor holds the state of `datasets` before a block of rows, and the
number of rows of the block that were consumed. `datasets` and `huggingface_hub` retry for minutes,
so the server is probed before and during their calls.
"""

from __future__ import annotations

import atexit
import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
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
    missing_field,
    not_text,
    text_of,
)
from nsa.system import in_background, with_timeout
from nsa.text import type_and_message

FINEWEB_EDU = ("HuggingFaceFW/fineweb-edu", "sample-10BT")
BUILDERS = ("json", "parquet", "csv", "text", "arrow")  # of `datasets`, for files
HUB_CLIENT_SECONDS = 25.0  # until huggingface_hub gives up on a hub that is down
ROWS_PER_BLOCK = 64  # small, so that long documents fit into memory
HUB = "https://huggingface.co"
PROBE_SECONDS = 5.0  # a server that does not respond for this long counts as down
SERVER_ERRORS = (500, 502, 503, 504)
WITHOUT_HUB = (
    "run `nsa data prepare` where there is a network and set data.source to the folder that it "
    "wrote; or use a source that needs no network: --set data.source=embedded; or copy HF_HOME "
    "from a machine that loaded the whole dataset (not streamed), and set HF_HUB_OFFLINE=1"
)


def open_hub(config: DataConfig, name: str) -> Source:
    """Open `fineweb_edu`, or `hf:` and the name of a dataset."""
    check_hub_name(name)
    path, subset = name.removeprefix("hf:"), config.subset
    if name == "fineweb_edu":
        path, subset = FINEWEB_EDU[0], config.subset or FINEWEB_EDU[1]
    return Hub(name, path, subset, config)


def check_hub_name(name: str) -> None:
    """Raise a DataError if a source names local files, which `datasets` could read too."""
    path = name.removeprefix("hf:")
    if path in BUILDERS or path.startswith(("/", ".", "~")) or os.path.isdir(path):
        raise DataError(
            f"data.source = {name!r}: files by way of `datasets` are withdrawn in this version; "
            "name the file or folder itself, without hf:"
        )


class Hub(Source):
    """The documents of a dataset.

    Their size is unknown: the sizes that a hub lists include all columns.
    """

    def __init__(self, name: str, path: str, subset: str | None, config: DataConfig) -> None:
        self.name, self._field = name, config.text_field
        self._path, self._subset, self._config = path, subset, config
        self._opened = self._open(None)

    def _open(self, revision: str | None) -> tuple[Any, str]:
        """Open the dataset; return it and its revision."""
        if url := self._url(revision):
            probe(self.name, url)
        try:
            dataset, revision = self._call_with_probes(
                self.name, revision, lambda: self._load(revision)
            )
        except DataError:
            raise
        except Exception as error:  # of `datasets`, its file systems and its builders
            raise self._open_error(error) from error
        self._check_field(dataset)
        return dataset, revision

    def _call_with_probes(self, what: str, revision: str | None, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; raise a DataError if the hub goes down meanwhile.

        A hub that is only slow has unlimited time. `what` names the work in the error.
        """
        url = self._url(revision)
        if url is None:
            return work()
        future = in_background(work)
        while not wait([future], PROBE_SECONDS).done:
            try:
                probe(what, url)
            except DataError:
                # A thread that returns from Arrow during Python's exit would abort the process.
                atexit.register(wait, [future], HUB_CLIENT_SECONDS)
                raise
        return future.result()

    def _url(self, revision: str | None) -> str | None:
        """Return the URL to probe; None offline."""
        import datasets

        if datasets.config.HF_HUB_OFFLINE:
            return None
        return f"{hub_url()}/datasets/{self._path}/resolve/{revision or 'main'}/README.md"

    def _load(self, revision: str | None) -> tuple[Any, str]:
        import datasets

        _configure_client()
        builder = datasets.load_dataset_builder(
            self._path,
            self._subset,
            data_files=self._config.pattern,
            revision=revision,
        )
        if hasattr(builder.config, "batch_size"):  # the default, a row group, may be empty
            builder.config.batch_size = ROWS_PER_BLOCK
        return builder.as_streaming_dataset(split=self._config.split), str(builder.hash)

    def _open_error(self, error: Exception) -> DataError:
        import datasets

        settings = f"data.subset = {self._subset!r}, data.split = {self._config.split!r}"
        settings += f", data.pattern = {self._config.pattern!r}" if self._config.pattern else ""
        reason = type_and_message(error)
        if isinstance(error, StopIteration):  # `datasets` reads the fields from the first record
            reason = "there is nothing in its first files"
        message = f"data.source = {self.name!r} with {settings}: {reason}"
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            message += "; correct the name, or log in with `hf auth login` if it is not public"
        elif isinstance(error, OSError):
            message += f"; {WITHOUT_HUB}"
        return DataError(message)

    def _check_field(self, dataset: Any) -> None:
        features = dataset.features
        if features is None:  # until the first record is read
            return
        if self._field not in features:
            raise DataError(f"{self.name}: {missing_field(self._field, list(features))}")
        kind = getattr(features[self._field], "dtype", type(features[self._field]).__name__)
        if kind not in ("string", "large_string"):
            raise DataError(f"{self.name}: {not_text(self._field, kind)}")

    def read(self, cursor: Cursor | None = None) -> Documents:
        stream, revision = self._opened
        cursor = cursor or {"revision": revision, "rows": 0, "dataset": None, "given": 0}
        if cursor["revision"] != revision:
            stream, _ = self._open(cursor["revision"])
        # The object holds the state of one pass, so each pass gets a copy: one shard of one.
        return self._documents(stream.shard(1, 0), cursor)

    def _documents(self, stream: Any, start: Cursor) -> Documents:
        """Read rows in blocks; the server can be probed between blocks.

        Cursor: the state of `datasets` before the block ("dataset"), and the rows consumed, in the
        block ("given") and in total ("rows").
        """
        state, consumed, total = start["dataset"], start["given"], start["rows"]
        if state is not None:
            stream.load_state_dict(copy.deepcopy(state))
        records = iter(stream)
        while True:
            rows, error = self._call_with_probes(
                f"{self.name}, after row {total}", start["revision"], partial(_read_block, records)
            )
            for number, record in enumerate(rows[consumed:], consumed + 1):
                total += 1
                if text := text_of(record, self._field, self.name):
                    cursor = {"rows": total, "dataset": state, "given": number}
                    location = f"{self.name}: row {total}"
                    yield Document(text.encode("utf-8", "replace"), location), start | cursor
            if error is not None:
                raise _broke_off(self.name, total, error) from error
            if not rows:
                return
            state, consumed = stream.state_dict(), 0


def _configure_client() -> None:
    """Make `datasets` retry for half a minute, not a quarter of an hour, and count no downloads.

    One try is enough: it includes six tries of huggingface_hub, over 23 seconds.
    """
    import datasets

    # Downloads are counted by a request that takes seconds without a network.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 1
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 1
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 1
    datasets.config.USE_PARQUET_EXPORT = False  # a second server, not needed here


def _read_block(records: Iterator[dict[str, Any]]) -> tuple[list[dict[str, Any]], Exception | None]:
    """Return the next rows, and the error after them; [] and None at the end."""
    rows: list[dict[str, Any]] = []
    try:
        for record in islice(records, ROWS_PER_BLOCK):
            rows.append(record)
    except Exception as error:  # of `datasets`, its file systems and its builders
        return rows, error
    return rows, None


def _broke_off(name: str, row: int, error: Exception) -> DataError:
    fix = f"retries did not help: run the same command again to continue, or {WITHOUT_HUB}"
    if isinstance(error, ValueError):  # Arrow's errors are ValueErrors
        fix = "the file of this row is broken: repair it, or name other files in data.pattern"
    return DataError(
        f"{name}: reading broke off after row {row} ({type_and_message(error)}); {fix}"
    )


def hub_url() -> str:
    return os.environ.get("HF_ENDPOINT", HUB).rstrip("/")


def probe(what: str, url: str, fix: str = WITHOUT_HUB) -> None:
    """Raise SourceUnreachable for `what` if the server of `url` does not respond or fails."""
    from huggingface_hub.utils import get_session  # configured with proxies and certificates

    def head() -> int:
        return get_session().head(url, timeout=PROBE_SECONDS).status_code

    try:
        status = with_timeout(1.5 * PROBE_SECONDS, head)  # DNS has no timeout
    except Exception as error:  # the exception types of the client differ between versions
        raise SourceUnreachable(
            f"{what}: {url} cannot be reached ({type_and_message(error)}); {fix}"
        ) from None
    if status in SERVER_ERRORS:
        raise SourceUnreachable(f"{what}: {url} has a server error (HTTP status {status}); {fix}")
