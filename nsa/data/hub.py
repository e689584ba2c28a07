"""Datasets of the Hugging Face hub, streamed; and whether the hub can be reached at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import Any

from nsa.data.source import DataError

HUB = "https://huggingface.co"
PATIENCE = 10.0  # seconds that the hub has for one short answer
WITHOUT_HUB = (
    "run `nsa data prepare` where there is a network and set data.source to the folder that it "
    "wrote; or take what needs no network: --set data.source=embedded; or copy HF_HOME from where "
    "this was loaded whole, and set HF_HUB_OFFLINE=1"
)


def reach_hub(what: str, path: str = "/", mend: str = WITHOUT_HUB) -> None:
    """Refuse at once where the hub gives no answer: its libraries would try for minutes.

    `what` is what is wanted from the hub, and `path` what is asked for; any answer but that of a
    server in trouble will do.
    """
    from huggingface_hub.utils import get_session  # with the proxies and certificates it is told

    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")

    def ask() -> int:
        return get_session().head(hub + path, timeout=PATIENCE).status_code

    try:
        status = within(1.5 * PATIENCE, ask)
    except Exception as error:  # which ones a client raises differs from version to version
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise DataError(f"{what}: {hub} cannot be reached ({reason}); {mend}") from None
    if status >= 500:
        raise DataError(f"{what}: {hub} is in trouble (HTTP status {status}); {mend}")


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns; TimeoutError after `seconds`, even where a look-up of a name hangs."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    return done[0]
