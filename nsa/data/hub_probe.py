"""Hub probe: fail within seconds when the Hugging Face hub is down.

`datasets` and `huggingface_hub` retry for minutes, so the server is probed before and during their
work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

from nsa.data.source import SourceUnreachable

HUB = "https://huggingface.co"
PROBE_SECONDS = 5.0  # without a response, after which a server counts as down
SERVER_ERRORS = (500, 502, 503, 504)
WITHOUT_HUB = (
    "run `nsa data prepare` where there is a network and set data.source to the folder that it "
    "wrote; or use a source that needs no network: --set data.source=embedded; or copy HF_HOME "
    "from a machine that loaded the whole dataset (not streamed), and set HF_HUB_OFFLINE=1"
)


def hub_url() -> str:
    return os.environ.get("HF_ENDPOINT", HUB).rstrip("/")


def probe(what: str, url: str, fix: str = WITHOUT_HUB) -> None:
    """Raise SourceUnreachable for `what` if the server of `url` is silent or has an error."""
    from huggingface_hub.utils import get_session  # configured with proxies and certificates

    def head() -> int:
        return get_session().head(url, timeout=PROBE_SECONDS).status_code

    try:
        status = with_timeout(1.5 * PROBE_SECONDS, head)  # name resolution has no limit
    except Exception as error:  # the exception types of the client differ between versions
        raise SourceUnreachable(
            f"{what}: {url} cannot be reached ({one_line(error)}); {fix}"
        ) from None
    if status in SERVER_ERRORS:
        raise SourceUnreachable(f"{what}: {url} has a server error (HTTP status {status}); {fix}")


def with_timeout(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the result of `work`; raise TimeoutError after `seconds`, whatever blocks it."""
    future = in_background(work)
    if not wait([future], seconds).done:
        raise TimeoutError(f"no response within {seconds:g} seconds")
    return future.result()


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a daemon thread, which can be abandoned, unlike an executor's."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
