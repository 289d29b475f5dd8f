"""A hub of datasets on loopback: the part of its protocol that `HfFileSystem` speaks.

Files of one repository `datasets/me/data`, in memory: information, listings, reading by ranges and
commits. `hub.huggingface.co` takes large and binary files by another way (LFS, Xet), which this
one never asks for.
"""

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["Hub", "hub"]

REPO = "datasets/me/data"
COMMIT = "1" * 40


class Hub:
    """What the server has, and what was asked of it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.files: dict[str, bytes] = {}
        self.ranges: list[str] = []
        """Of every read of a file; empty for a whole one."""
        self.denied = 0
        """The status that everything is answered with; 0 for none."""


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve an empty repository."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        found = Hub(f"http://127.0.0.1:{server.server_port}")
        server.hub = found  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.hub.denied:
            self._error(self.hub.denied, "AccessDenied")
        elif path.startswith(f"{REPO}/resolve/main/"):
            self._file(path.removeprefix(f"{REPO}/resolve/main/"))
        elif path in (f"api/{REPO}", f"api/{REPO}/revision/main"):
            self._json({"_id": "1", "id": "me/data", "sha": COMMIT, "private": False})
        elif path == f"api/{REPO}/tree/main" or path.startswith(f"api/{REPO}/tree/main/"):
            recursive = "recursive=true" in self.path.lower()
            self._tree(path.removeprefix(f"api/{REPO}/tree/main").strip("/"), recursive)
        else:
            self._error(404, "RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.hub.denied:
            self._error(self.hub.denied, "AccessDenied")
        elif path == f"api/{REPO}/preupload/main":
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            self._json({"files": [{"path": name, **modes} for name in names]})
        elif path == f"api/{REPO}/commit/main":
            self._commit([json.loads(line) for line in body.splitlines()])
        elif path == f"api/{REPO}/paths-info/main":
            asked = json.loads(body)["paths"]
            self._json([_entry(name, self.hub.files[name]) for name in asked])
        else:
            self._error(404, "RepoNotFound")

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.hub.files[value["path"]]
        url = f"{self.hub.address}/{REPO}/commit/{COMMIT}"
        self._json({"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _tree(self, folder: str, recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for name, raw in sorted(self.hub.files.items()):
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                inner = prefix + "/".join(parts[:depth])
                oid = hashlib.sha1(inner.encode()).hexdigest()
                found[inner] = {"type": "directory", "path": inner, "size": 0, "oid": oid}
            if recursive or len(parts) == 1:
                found[name] = _entry(name, raw)
        if folder and not found:
            self._error(404, "EntryNotFound")
        else:
            self._json(list(found.values()))

    def _file(self, name: str) -> None:
        if name not in self.hub.files:
            self._error(404, "EntryNotFound")
            return
        raw, asked = self.hub.files[name], self.headers.get("Range", "")
        self.hub.ranges.append(asked)
        if not asked:
            self._send(200, raw)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        a, b = int(first), min(int(last or len(raw)), len(raw) - 1)
        self._send(206, raw[a : b + 1], {"Content-Range": f"bytes {a}-{b}/{len(raw)}"})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def _entry(name: str, raw: bytes) -> dict[str, Any]:
    # As git names a blob.
    oid = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    return {"type": "file", "path": name, "size": len(raw), "oid": oid}
