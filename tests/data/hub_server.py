"""HTTP server on loopback for tests: a small hub, with failure modes."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit
from zlib import crc32

REPO = "someone/corpus"


class HubServer(ThreadingHTTPServer):
    """A small hub: the files below `root` are a version of its dataset REPO.

    `mode` is "ok", "silent", or "unavailable" (503).
    """

    daemon_threads = True

    def __init__(self, root: Path, mode: str = "ok") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode = mode
        self.versions = {"a" * 40: root}  # the last one is `main`
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        """Without a slash at the end."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that hang up; the tests provoke them."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith(f"datasets/{REPO}/resolve/"):
            version, _, name = path.partition("/resolve/")[2].partition("/")
            commit = self._commit(version)
            self._file(self.server.versions[commit], name, {"X-Repo-Commit": commit})
        elif path.startswith(f"api/datasets/{REPO}"):
            self._api(path.removeprefix(f"api/datasets/{REPO}").strip("/").split("/", 2))
        else:
            gated = "gated" in path
            code = "GatedRepo" if gated else "RepoNotFound"
            self._send(403 if gated else 404, b"{}", {"X-Error-Code": code})

    def _commit(self, version: str) -> str:
        return list(self.server.versions)[-1] if version == "main" else version

    def _api(self, parts: list[str]) -> None:
        """Respond with the files of a folder, or of a version of the dataset."""
        kind, version, name = [*parts, "", ""][:3]
        commit = self._commit(version or "main")
        root = self.server.versions[commit]
        if kind == "tree":
            response: object = [
                {
                    "type": "file" if path.is_file() else "directory",
                    "path": path.relative_to(root).as_posix(),
                    "size": path.stat().st_size,
                    "oid": "0" * 40,
                }
                for path in sorted((root / name).glob("*"))
            ]
            if not response:
                return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            files = [path for path in sorted(root.rglob("*")) if path.is_file()]
            names = [{"rfilename": path.relative_to(root).as_posix()} for path in files]
            response = {"id": REPO, "sha": commit, "siblings": names}
        return self._send(200, json.dumps(response).encode(), {"Content-Type": "application/json"})

    def _file(self, root: Path, name: str, headers: dict[str, str]) -> None:
        if not (root / name).is_file():
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", **headers})
        content = (root / name).read_bytes()
        headers |= {"ETag": f'"{crc32(content):x}"', "Accept-Ranges": "bytes"}
        requested = self.headers.get("Range")
        if not requested:
            return self._send(200, content, headers)
        first, last = requested.removeprefix("bytes=").split("-")
        start, stop = int(first), min(int(last or len(content)), len(content) - 1) + 1
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self._send(206, content[start:stop], headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        mode = self.server.mode
        if mode == "silent":
            time.sleep(3_600)
        if mode == "unavailable":
            status, content, headers = 503, b"", {}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content)


@contextmanager
def serving(root: Path, mode: str = "ok") -> Iterator[HubServer]:
    """A server within the block."""
    server = HubServer(root, mode)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
