"""Object stores on loopback for the tests: servers of S3 and GCS from the registry, and a hub.

Each is a real server of its protocol, spoken to by the library that users have.
"""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="`make machines` installs and runs this")
pytest.importorskip("moto", reason="`make machines` installs and runs this")
pytest.importorskip("gcsfs", reason="`make machines` installs and runs this")
pytest.importorskip("gcp_storage_emulator", reason="`make machines` installs and runs this")

import gcsfs
import s3fs
from huggingface_hub import HfFileSystem, constants

__all__ = ["SCHEMES", "SECRET", "Store", "denying", "environment", "opened", "serving"]

SCHEMES = ("s3", "gs", "hf")
SECRET = "a-secret-of-the-test"
SERVERS = {
    "s3": """
from moto.server import ThreadedMotoServer
import time
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
time.sleep(3600)
""",
    "gs": """
from gcp_storage_emulator.server import create_server
import time
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="data")
server.start()
host, port = server._api._httpd.server_address
print(f"http://{host}:{port}", flush=True)
time.sleep(3600)
""",
}


@dataclass(frozen=True)
class Store:
    """A store with an empty place for files."""

    scheme: str
    root: str
    """The address of the place, without the slash at its end."""
    files: Any
    """The file system of fsspec."""
    env: dict[str, str]
    """The environment of who may use it."""

    def put(self, name: str, raw: bytes) -> None:
        self.files.pipe_file(f"{self.root}/{name}", raw)

    def cat(self, name: str) -> bytes:
        found: bytes = self.files.cat_file(f"{self.root}/{name}")
        return found

    def names(self, folder: str = "") -> list[str]:
        """Below the root, of all files in a folder."""
        self.files.invalidate_cache()
        found = self.files.find(f"{self.root}/{folder}".rstrip("/"))
        inner = self.root.partition("://")[2]
        return [name.removeprefix(f"{inner}/") for name in found]


@contextmanager
def serving(scheme: str) -> Iterator[str]:
    """The address of a server, which runs in a process or thread of its own."""
    if scheme == "hf":
        from hub_server import hub

        with hub() as found:
            yield found.address
        return
    command = [sys.executable, "-c", SERVERS[scheme]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def environment(scheme: str, address: str) -> dict[str, str]:
    """What a user of the store at an address has set."""
    if scheme == "s3":
        return {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    if scheme == "gs":
        # Without the second, gcsfs asks Google itself for the kind of the bucket.
        return {"STORAGE_EMULATOR_HOST": address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    return {"HF_ENDPOINT": address, "HF_TOKEN": SECRET, "HF_HUB_OFFLINE": "0"}


@contextmanager
def opened(scheme: str, address: str, home: str) -> Iterator[Store]:
    """An empty place in the store at an address, for this process and for commands."""
    env = {**environment(scheme, address), "BATCHWRIGHT_HOME": home}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        # The hub's client reads the environment when it is imported.
        read = {
            "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
        }
        for name, value in read.items() if scheme == "hf" else ():
            patch.setattr(constants, name, value)
        kind = {
            "s3": s3fs.S3FileSystem,
            "gs": gcsfs.GCSFileSystem,
            "hf": HfFileSystem,
        }[scheme]
        kind.clear_instance_cache()
        files = kind(skip_instance_cache=True)
        root = "hf://datasets/me/data" if scheme == "hf" else f"{scheme}://data"
        found = Store(scheme, root, files, env)
        if scheme == "s3" and not files.exists("data"):
            files.mkdir("data")
        yield found
        for name in found.names():
            files.rm_file(f"{root}/{name}")
        kind.clear_instance_cache()


DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class _Denying(http.server.BaseHTTPRequestHandler):
    """A store in which nobody has any right."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(DENIED)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(DENIED)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@contextmanager
def denying() -> Iterator[str]:
    """The address of a server that refuses everything."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Denying) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
