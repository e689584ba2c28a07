"""Hugging Face datasets as a document source, streamed with `datasets`.

`datasets` reads and resumes. A cursor holds the state of `datasets` before a block of rows, and the
number of rows of the block that were consumed. `datasets` and `huggingface_hub` retry for minutes,
so the server is probed before and during their calls.
"""

from __future__ import annotations

import atexit
import copy
import glob
import hashlib
import json
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
BUILDERS = ("json", "parquet", "csv", "text", "arrow")  # of `datasets`, for `data.pattern`
OPEN_TRIES, READ_TRIES = 2, 3  # for a server that is not the hub
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
    """Open `fineweb_edu`, or `hf:` and a dataset, a local folder, or a builder of `datasets`."""
    path, subset = name.removeprefix("hf:"), config.subset
    if name == "fineweb_edu":
        path, subset = FINEWEB_EDU[0], config.subset or FINEWEB_EDU[1]
    if path in BUILDERS and config.pattern is None:
        raise DataError(
            f"data.source = {name!r} reads files, and none are named; set data.pattern to a path, "
            "a pattern or an address"
        )
    return Hub(name, os.path.expanduser(path), subset, config)


def local_content(config: DataConfig, name: str) -> str:
    """Return a digest of the names and sizes of local files; "" for a dataset of the hub."""
    path = os.path.expanduser(name.removeprefix("hf:"))
    if path not in BUILDERS and not os.path.isdir(path):
        return ""
    pattern = os.path.join("" if path in BUILDERS else path, config.pattern or "**")
    files = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    listing = json.dumps([[file, os.path.getsize(file)] for file in files])
    return hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()


class Hub(Source):
    """The documents of a dataset.

    Their size is unknown: the sizes that a hub lists include all columns.
    """

    def __init__(self, name: str, path: str, subset: str | None, config: DataConfig) -> None:
        self.name, self._field = name, config.text_field
        self._path, self._subset, self._config = path, subset, config
        self._on_hub = path not in BUILDERS and not os.path.isdir(path)
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
        url = self._url(revision) if self._on_hub else None
        if url is None:  # no server, or one with the time limits of `_http_options`
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
        """Return the URL to probe; None without a server."""
        import datasets

        pattern = self._config.pattern or ""
        if not self._on_hub:
            return pattern if _is_url(pattern) and "*" not in pattern else None
        if datasets.config.HF_HUB_OFFLINE:
            return None
        return f"{hub_url()}/datasets/{self._path}/resolve/{revision or 'main'}/README.md"

    def _load(self, revision: str | None) -> tuple[Any, str]:
        import datasets

        _configure_client(self._on_hub)
        builder = datasets.load_dataset_builder(
            self._path,
            self._subset,
            data_files=self._config.pattern,
            revision=revision if self._on_hub else None,
            storage_options=_http_options(self._config.pattern or ""),
        )
        if hasattr(builder.config, "batch_size"):  # the default, a row group, may be empty
            builder.config.batch_size = ROWS_PER_BLOCK
        dataset = builder.as_streaming_dataset(split=self._config.split)
        if self._on_hub:
            return dataset, str(builder.hash)
        return dataset, ""  # `local_content` tells whether the files changed

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
        elif isinstance(error, OSError) and (self._on_hub or self._url(None)):
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


def _configure_client(on_hub: bool) -> None:
    """Make `datasets` retry for half a minute, not a quarter of an hour, and count no downloads.

    On the hub one try is enough: it includes six tries of huggingface_hub, over 23 seconds.
    """
    import datasets

    # Even local files are counted, by a request that takes seconds without a network.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.config.STREAMING_READ_MAX_RETRIES = 1 if on_hub else READ_TRIES
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 1
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 1
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1 if on_hub else OPEN_TRIES
    datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 1
    datasets.config.USE_PARQUET_EXPORT = False  # a second server, not needed here


def _is_url(pattern: str) -> bool:
    return pattern.startswith(("http://", "https://"))


def _http_options(pattern: str) -> dict[str, Any] | None:
    """Return the time limits of a server that `data.pattern` names; None without such a server."""
    if not _is_url(pattern):
        return None
    from aiohttp import ClientTimeout

    limit = ClientTimeout(total=None, sock_connect=PROBE_SECONDS, sock_read=PROBE_SECONDS)
    options = {"client_kwargs": {"timeout": limit}}
    return {"http": options, "https": options}


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
