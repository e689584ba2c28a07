"""Hub probe: fail within seconds when the Hugging Face hub is down.

`datasets` and `huggingface_hub` retry for minutes, so the server is probed before and during their
work.
"""

from __future__ import annotations

import os

from nsa.data.source import SourceUnreachable
from nsa.probes import with_timeout

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


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
