"""Datasets of the Hugging Face hub, streamed; and whether the hub can be reached at all.

`datasets` reads, splits and remembers its place; what is not exact in that is made up for here.
Its retries last for minutes, so the server is asked first whether it is there.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

from nsa.data.config import DataConfig
from nsa.data.source import (
    DataError,
    Document,
    Reader,
    Source,
    SourceUnreachable,
    State,
    no_field,
    no_text,
)

HUB = "https://huggingface.co"
FINEWEB_EDU = ("HuggingFaceFW/fineweb-edu", "sample-10BT")
BUILDERS = ("json", "parquet", "csv", "text", "arrow")  # read the files of `data.files`
PATIENCE = 5.0  # seconds of silence after which a server counts as gone
OPENING_TRIES, READING_TRIES = 2, 3  # from a server that is no hub, and breaks off
IN_TROUBLE = (500, 502, 503, 504)
GIVING_UP = 25.0  # seconds that huggingface_hub takes to see that there is no hub
ROWS_AT_ONCE = 64  # so that long documents fit into memory
WITHOUT_HUB = (
    "run `nsa data prepare` where there is a network and set data.source to the folder that it "
    "wrote; or take what needs no network: --set data.source=embedded; or copy HF_HOME from where "
    "this was loaded whole (not streamed), and set HF_HUB_OFFLINE=1"
)


def reach_hub(what: str, path: str = "/", fix: str = WITHOUT_HUB) -> None:
    """Refuse at once where the hub gives no answer: its libraries would try for minutes.

    `what` is what is wanted from the hub, and `path` what is asked for; any answer but that of a
    server in trouble will do.
    """
    _ask(what, _hub() + path, fix)


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", HUB).rstrip("/")


def _ask(what: str, url: str, fix: str = WITHOUT_HUB) -> None:
    from huggingface_hub.utils import get_session  # with the proxies and certificates it is told

    def ask() -> int:
        return get_session().head(url, timeout=PATIENCE).status_code

    try:
        status = within(1.5 * PATIENCE, ask)  # a look-up of its name has no limit of its own
    except Exception as error:  # which ones a client raises differs from version to version
        raise SourceUnreachable(
            f"{what}: {url} cannot be reached ({_line(error)}); {fix}"
        ) from None
    if status in IN_TROUBLE:
        raise SourceUnreachable(f"{what}: {url} is in trouble (HTTP status {status}); {fix}")


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns; a TimeoutError after `seconds`, whatever it hangs on."""
    background = _Background(work)
    if not background.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    return background.result()


class _Background:
    """Work that can be given up: it goes on in a thread that keeps nobody from ending."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error


def open_hub(config: DataConfig, name: str) -> Source:
    """`fineweb_edu`, or `hf:` with a dataset, a local folder, or a builder for `data.files`."""
    path, subset = name.removeprefix("hf:"), config.subset
    if name == "fineweb_edu":
        path, subset = FINEWEB_EDU[0], config.subset or FINEWEB_EDU[1]
    if path in BUILDERS and config.files is None:
        raise DataError(
            f"data.source = {name!r} reads files, and none are named: set data.files to a path, "
            "a pattern or an address"
        )
    return Hub(_Origin(name, os.path.expanduser(path), subset, config), None, 0, 1)


class _Origin:
    """What `datasets` needs to know to open a dataset, and to open the same one again."""

    def __init__(self, name: str, path: str, subset: str | None, config: DataConfig) -> None:
        self.name, self.field = name, config.text_field
        self._path, self._subset, self._config = path, subset, config
        self.remote = path not in BUILDERS and not os.path.isdir(path)

    def open(self, revision: str | None) -> tuple[Any, str]:
        """The dataset, and what tells this version of it from later ones."""
        if url := self._address(revision):
            _ask(self.name, url)
        try:
            dataset, revision = self.watched(self.name, revision, lambda: self._load(revision))
        except DataError:
            raise
        except Exception as error:  # of `datasets`, its file systems and its builders
            raise self._refusal(error) from error
        self._check_field(dataset)
        return dataset, revision

    def watched(self, what: str, revision: str | None, work: Callable[[], Any]) -> Any:
        """What `work` returns; a DataError where it is silent and the hub is not there any more.

        A hub that is slow has all the time that it needs.
        """
        url = self._address(revision) if self.remote else None
        if url is None:  # no server, or one for which `_http_options` sets the limits
            return work()
        background = _Background(work)
        while not background.wait(PATIENCE):
            try:
                _ask(what, url)
            except DataError:
                # A thread of Arrow's that comes back while Python ends would abort the process.
                atexit.register(background.wait, GIVING_UP)
                raise
        return background.result()

    def _address(self, revision: str | None) -> str | None:
        """Where to ask whether the server is there; None: nothing comes from one."""
        import datasets

        files = self._config.files or ""
        if not self.remote:
            return files if files.startswith(("http://", "https://")) and "*" not in files else None
        if datasets.config.HF_HUB_OFFLINE:
            return None
        return f"{_hub()}/datasets/{self._path}/resolve/{revision or 'main'}/README.md"

    def _load(self, revision: str | None) -> tuple[Any, str]:
        import datasets

        _keep_it_short(self.remote)
        builder = datasets.load_dataset_builder(
            self._path,
            self._subset,
            data_files=self._config.files,
            revision=revision if self.remote else None,
            storage_options=_http_options(self._config.files),
        )
        if hasattr(builder.config, "batch_size"):  # by default a row group, which may be empty
            builder.config.batch_size = ROWS_AT_ONCE
        dataset = builder.as_streaming_dataset(split=self._config.split)
        if self.remote:
            return dataset, str(builder.hash)
        files = [Path(file).name for file in builder.config.data_files[self._config.split]]
        return dataset, hashlib.blake2b(json.dumps(files).encode(), digest_size=8).hexdigest()

    def _refusal(self, error: Exception) -> DataError:
        import datasets

        asked = f"data.subset = {self._subset!r}, data.split = {self._config.split!r}"
        asked += f", data.files = {self._config.files!r}" if self._config.files else ""
        empty = isinstance(error, StopIteration)  # of the record that would tell the fields
        reason = "there is nothing in its first files" if empty else _line(error)
        message = f"data.source = {self.name!r} with {asked}: {reason}"
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            message += "; correct the name, or log in with `hf auth login` where it is not public"
        elif isinstance(error, OSError) and (self.remote or self._address(None)):
            message += f"; {WITHOUT_HUB}"
        return DataError(message)

    def _check_field(self, dataset: Any) -> None:
        features = dataset.features
        if features is None:
            return  # the first record will tell
        if self.field not in features:
            raise DataError(self.no_field(list(features)))
        kind = getattr(features[self.field], "dtype", type(features[self.field]).__name__)
        if kind not in ("string", "large_string"):
            raise DataError(self.no_text(kind))

    def no_field(self, there: list[str]) -> str:
        """Says which fields there are."""
        return f"{self.name}: {no_field(self.field, there)}"

    def no_text(self, kind: str) -> str:
        """Says what the field holds."""
        return f"{self.name}: {no_text(self.field, kind)}"


def _keep_it_short(hub: bool) -> None:
    """Give up within half a minute what `datasets` would try for a quarter of an hour.

    Below a try to read from the hub lie six of huggingface_hub's, with 23 seconds between them.
    """
    import datasets

    datasets.config.STREAMING_READ_MAX_RETRIES = 1 if hub else READING_TRIES
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 1
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 1
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1 if hub else OPENING_TRIES
    datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 1
    datasets.config.USE_PARQUET_EXPORT = False  # one server more to wait for, with nothing we need


def _http_options(files: str | None) -> dict[str, Any] | None:
    if not files or not files.startswith(("http://", "https://")):
        return None
    from aiohttp import ClientTimeout

    limit = ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
    options = {"client_kwargs": {"timeout": limit}}
    return {"http": options, "https": options}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


class Hub:
    """The documents of a dataset, or of one share of it."""

    def __init__(
        self, origin: _Origin, opened: tuple[Any, str] | None, index: int, count: int
    ) -> None:
        self.name = origin.name
        self._origin, self._index, self._count = origin, index, count
        self._dataset, self._revision = opened or origin.open(None)

    def read(self, state: State | None = None) -> Reader:
        """A pass from the start, or from where another one stood, in the same version of it."""
        dataset, revision = self._dataset, self._revision
        if state and state["revision"] != revision:
            if not self._origin.remote:
                raise DataError(
                    f"{self.name}: its files are no longer those that this run was reading; put "
                    "them back, or start a new run"
                )
            revision = state["revision"]
            dataset, _ = self._origin.open(revision)
        place = f"{self.name}, part {self._index + 1} of {self._count}"
        return _HubReader(
            self._origin,
            self._share(dataset),
            state or {"revision": revision, "rows": 0, "dataset": None, "given": 0},
            place,
        )

    def part(self, index: int, count: int) -> Source:
        """Whole shards as far as there are enough of them, else each `count`-th document."""
        assert self._count == 1
        return Hub(self._origin, (self._dataset, self._revision), index, count)

    def size(self) -> int | None:
        """Not known: what a hub says of a dataset's size is of all its columns."""
        return None

    def _share(self, dataset: Any) -> Any:
        from datasets.distributed import split_dataset_by_node

        # Either is a dataset of its own, as it holds the place of one pass.
        if dataset.num_shards >= self._count:
            return dataset.shard(self._count, self._index)
        return split_dataset_by_node(dataset, rank=self._index, world_size=self._count)


class _HubReader:
    """Reads some rows at a time, so that they can be waited for with an eye on the server."""

    def __init__(self, origin: _Origin, dataset: Any, state: State, place: str) -> None:
        self._origin, self._dataset, self._place = origin, dataset, place
        # The state of `datasets` in front of the rows that were read last, and how many of them
        # were given; after loading one it has none of its own until it has read a row.
        self._before, self._given = state["dataset"], 0
        self._read: list[dict[str, Any]] = []
        self._error: Exception | None = None
        self._revision, self._behind = state["revision"], state["rows"] - state["given"]
        if self._before is not None:
            dataset.load_state_dict(copy.deepcopy(self._before))
        self._records = iter(dataset)
        for _ in range(state["given"]):
            self._record()

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Document:
        while (record := self._record()) is not None:
            if text := self._text(record):
                return Document(text, f"{self._place}: row {self._rows}")
        raise StopIteration

    def state(self) -> State:
        return {
            "revision": self._revision,
            "rows": self._rows,
            "dataset": self._before,
            "given": self._given,
        }

    @property
    def _rows(self) -> int:
        return self._behind + self._given

    def _record(self) -> dict[str, Any] | None:
        if self._given == len(self._read):
            if self._error is None:
                what = f"{self._place}, after row {self._rows}"
                self._origin.watched(what, self._revision, self._read_on)
            if self._given == len(self._read):
                self._raise()
                return None
        self._given += 1
        return self._read[self._given - 1]

    def _read_on(self) -> None:
        if self._read:
            self._before = self._dataset.state_dict()
        self._behind += self._given
        self._read, self._given = [], 0
        try:
            for record in islice(self._records, ROWS_AT_ONCE):
                self._read.append(record)
        except Exception as error:  # of `datasets`, its file systems and its builders
            self._error = error

    def _raise(self) -> None:
        if self._error is None:
            return
        fix = f"trying again did not help: start the run again to go on, or {WITHOUT_HUB}"
        if isinstance(self._error, ValueError):  # as are Arrow's complaints
            fix = "the file that holds this row is broken: fix it, or name others in data.files"
        raise DataError(
            f"{self._place}: reading broke off after row {self._rows} ({_line(self._error)}); "
            + fix
        ) from self._error

    def _text(self, record: dict[str, Any]) -> bytes:
        if self._origin.field not in record:
            raise DataError(self._origin.no_field(list(record)))
        text = record[self._origin.field]
        if text is not None and not isinstance(text, str):
            raise DataError(self._origin.no_text(type(text).__name__))
        return (text or "").encode("utf-8", "replace")
