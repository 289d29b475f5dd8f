"""Servers that are broken, careless or hostile: every shape ends as a typed outcome, in time.

The server knows nothing of HTTP but how to find the end of a request; what it sends is written
out byte by byte. All shapes are met at once by one pool, each with one try.
"""

import gzip
import json
import math
import random
import re
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchwright.calls import Done, Endpoint, Failed, Kind, Pool, chat, embed
from batchwright.calls.engine.endpoint import (
    MOST_DEBT_S,
    MOST_PAUSE_S,
    SharedRateLimit,
    Upstream,
)
from batchwright.calls.limit.fixed import FixedLimit
from batchwright.calls.wire import http as wire
from batchwright.calls.wire.discovery import check_model
from batchwright.errors import NoServer

KEY = "sk-otter-0123456789abcdef"
DEADLINE_S = 4.0
GOOD = json.dumps(
    {
        "choices": [{"message": {"content": "four"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }
).encode()


class Reset(Exception):
    """Ends a connection by a reset."""


Sent = Iterator[bytes | float]
"""Bytes to send, and seconds to wait."""


def http(body: bytes = b"", status: str = "200 OK", *headers: str, length: int | None = None):
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", "Connection: close", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(*parts: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{headers}\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def once(raw: bytes) -> Callable[[], Sent]:
    def send() -> Sent:
        yield raw

    return send


def hang(raw: bytes = b"") -> Callable[[], Sent]:
    def send() -> Sent:
        yield raw
        yield 60.0

    return send


def reset(raw: bytes) -> Callable[[], Sent]:
    def send() -> Sent:
        yield raw
        yield 0.05
        raise Reset

    return send


def endless(head: bytes, part: bytes, every_s: float = 0.0) -> Callable[[], Sent]:
    def send() -> Sent:
        yield head
        while True:
            yield part
            if every_s:
                yield every_s

    return send


def said(**changes: object) -> Callable[[], Sent]:
    return once(http(json.dumps({**json.loads(GOOD), **changes}).encode()))


def usage(prompt: object, completion: object) -> Callable[[], Sent]:
    return said(usage={"prompt_tokens": prompt, "completion_tokens": completion})


def bomb(wbits: int, size: int) -> bytes:
    """`size` bytes of white space, compressed: JSON as far as anybody can see."""
    stream = zlib.compressobj(9, zlib.DEFLATED, wbits)
    block = b" " * 2**20
    return b"".join(stream.compress(block) for _ in range(size >> 20)) + stream.flush()


GZIP, DEFLATE = "Content-Encoding: gzip", "Content-Encoding: deflate"
BOMB = bomb(31, 300 * 2**20)
OK_HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MB = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
ENVELOPE = {"choices": [{"message": {"content": "x"}}]}
TIMEOUT, BAD, CUT, GONE = Kind.TIMEOUT, Kind.BAD_BODY, Kind.TRUNCATED, Kind.UNREACHABLE
WRONG, BROKEN, BUSY, EMPTY = Kind.HTTP_4XX, Kind.HTTP_5XX, Kind.RATE_LIMITED, Kind.EMPTY

SHAPES: dict[str, tuple[Callable[[], Sent], Kind | None]] = {
    # Answers that are good, however they come.
    "good": (once(http(GOOD)), None),
    "byte order mark": (once(http(b"\xef\xbb\xbf" + GOOD)), None),
    "utf-16": (once(http(GOOD.decode().encode("utf-16"))), None),
    "chunked": (once(chunked(GOOD[:20], GOOD[20:], b"")), None),
    "no length, then closed": (once(OK_HEAD + b"\r\n" + GOOD), None),
    "gzip": (once(http(gzip.compress(GOOD), "200 OK", GZIP)), None),
    "gzip in two members": (
        once(http(gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:]), "200 OK", GZIP)),
        None,
    ),
    "GZIP in capitals": (once(http(gzip.compress(GOOD), "200 OK", GZIP.upper())), None),
    "gzip in chunks": (once(chunked(gzip.compress(GOOD), b"", headers=f"{GZIP}\r\n")), None),
    "deflate": (once(http(zlib.compress(GOOD), "200 OK", DEFLATE)), None),
    "deflate without header": (once(http(zlib.compress(GOOD)[2:-4], "200 OK", DEFLATE)), None),
    "identity": (once(http(GOOD, "200 OK", "Content-Encoding: identity")), None),
    "100 continue first": (once(b"HTTP/1.1 100 Continue\r\n\r\n" + http(GOOD)), None),
    "103 early hints first": (once(b"HTTP/1.1 103 X\r\nLink: </a>\r\n\r\n" + http(GOOD)), None),
    "a cookie": (once(http(GOOD, "200 OK", "Set-Cookie: a=b; Domain=example.com")), None),
    "one megabyte of text": (
        once(http(json.dumps({"choices": [{"message": {"content": "x" * 2**20}}]}).encode())),
        None,
    ),
    # Counts that nobody can have counted are none.
    "usage of 10^15": (usage(10**15, 10**15), None),
    "usage below zero": (usage(-600_000, -1), None),
    "usage as text": (usage("7", "3"), None),
    "usage as numbers with a point": (usage(7.5, 1e300), None),
    "usage as bool": (usage(True, False), None),
    "usage as a list": (said(usage=[1, 2]), None),
    "usage as nothing": (said(usage=None), None),
    # Bodies that are no answers.
    "nothing": (once(http()), BAD),
    "html": (once(http(b"<html>login</html>")), BAD),
    "null": (once(http(b"null")), BAD),
    "a number": (once(http(b"1e999")), BAD),
    "a list": (once(http(b"[]")), BAD),
    "a string": (once(http(b'"four"')), BAD),
    "half of the JSON": (once(http(GOOD[:40])), BAD),
    "two JSON values": (once(http(GOOD + GOOD)), BAD),
    "nested 100,000 deep": (once(http(b"[" * 100_000 + b"]" * 100_000)), BAD),
    "nested 100,000 objects deep": (once(http(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)), BAD),
    "number of 100,000 digits": (once(http(b'{"choices":' + b"9" * 100_000 + b"}")), BAD),
    "not UTF-8": (once(http(b'{"choices": "\xff\xfe\xfa"}')), BAD),
    "zeros": (once(http(bytes(5000))), BAD),
    "event stream": (once(http(b"data: {}\n\ndata: [DONE]\n\n")), BAD),
    "no choices": (said(choices=[]), BAD),
    "choices is a number": (said(choices=3), BAD),
    "choice is null": (said(choices=[None]), BAD),
    "message is text": (said(choices=[{"message": "four"}]), BAD),
    "content is a number": (said(choices=[{"message": {"content": 4}}]), BAD),
    "content is an object": (said(choices=[{"message": {"content": {"a": 1}}}]), BAD),
    "no content": (said(choices=[{"message": {"content": None}}]), EMPTY),
    "empty content": (said(choices=[{"message": {"content": ""}}]), EMPTY),
    "white content": (said(choices=[{"message": {"content": " \n"}}]), EMPTY),
    "a long reason": (said(choices=[{"message": {}, "finish_reason": "x" * 9999}]), EMPTY),
    "an error with status 200": (once(http(b'{"error": {"message": "no"}}')), BAD),
    "field names of a megabyte": (once(http(json.dumps({"x" * 2**20: 1}).encode())), BAD),
    "the key repeated": (
        once(http(GOOD.replace(b"four", b"your key is " + KEY.encode()))),
        BAD,
    ),
    # Encodings.
    "brotli, not asked for": (once(http(b"\x0b\x02\x80", "200 OK", "Content-Encoding: br")), BAD),
    "zstd, not asked for": (once(http(b"(\xb5/\xfd", "200 OK", "Content-Encoding: zstd")), BAD),
    "gzip twice": (
        once(http(gzip.compress(gzip.compress(GOOD)), "200 OK", "Content-Encoding: gzip, gzip")),
        BAD,
    ),
    "gzip that is none": (once(http(GOOD, "200 OK", GZIP)), BAD),
    "gzip with a wrong checksum": (
        once(http(gzip.compress(GOOD)[:-8] + bytes(8), "200 OK", GZIP)),
        BAD,
    ),
    "deflate that is none": (once(http(b"\xff" * 99, "200 OK", DEFLATE)), BAD),
    "half of the gzip": (once(http(gzip.compress(GOOD)[:-20], "200 OK", GZIP)), CUT),
    "gzip, then rubbish": (once(http(gzip.compress(GOOD) + b"rubbish", "200 OK", GZIP)), BAD),
    # Connections.
    "closed at once": (once(b""), GONE),
    "reset at once": (reset(b""), GONE),
    "silence": (hang(), TIMEOUT),
    "half of a status line": (hang(b"HTTP/1.1 2"), TIMEOUT),
    "half of the headers": (hang(OK_HEAD + b"Content-Le"), TIMEOUT),
    "headers, then silence": (hang(OK_HEAD + b"Content-Length: 9\r\n\r\n"), TIMEOUT),
    "half of the body, then silence": (hang(http(GOOD[:40], length=len(GOOD))), TIMEOUT),
    "half of the body, then closed": (once(http(GOOD[:40], length=len(GOOD))), CUT),
    "half of the body, then reset": (reset(http(GOOD[:40], length=len(GOOD))), CUT),
    "chunks without an end, then closed": (once(chunked(GOOD)), CUT),
    "chunks without an end, then silence": (hang(chunked(GOOD)), TIMEOUT),
    "half of a chunk": (once(CHUNKED + b"ff\r\nabc"), CUT),
    "a chunk of no size": (once(CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n"), BAD),
    "a chunk of 2^70 bytes": (once(CHUNKED + b"4" + b"0" * 17 + b"\r\nabc"), BAD),
    "a body one byte in ten seconds": (
        endless(OK_HEAD + b"Content-Length: 999\r\n\r\n", b" ", 0.5),
        TIMEOUT,
    ),
    "headers for ever, slowly": (endless(OK_HEAD, b"X-A: 1\r\n", 0.3), TIMEOUT),
    "100 continue for ever, slowly": (endless(b"", b"HTTP/1.1 100 C\r\n\r\n", 0.2), TIMEOUT),
    # No HTTP, or not this one.
    "ssh": (once(b"SSH-2.0-OpenSSH_9.6\r\n"), BAD),
    "smtp": (once(b"220 mail ESMTP\r\n"), BAD),
    "tls alert": (once(b"\x15\x03\x01\x00\x02\x02\x46"), BAD),
    "HTTP/0.9": (once(GOOD), BAD),
    "HTTP/2 preface": (once(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), BAD),
    "noise": (once(random.Random(0).randbytes(64).replace(b"H", b"h") + b"\r\n\r\n"), BAD),
    "status 20000": (once(b"HTTP/1.1 20000 OK\r\n\r\n"), BAD),
    "status of letters": (once(b"HTTP/1.1 two OK\r\n\r\n"), BAD),
    "a header without a colon": (once(OK_HEAD + b"nonsense\r\n\r\n"), BAD),
    "a header of 100,000 bytes": (once(http(GOOD, "200 OK", "X-A: " + "a" * 100_000)), BAD),
    "a header with a zero byte": (once(http(GOOD, "200 OK", "X-A: a\0b")), BAD),
    "two lengths": (once(http(GOOD, "200 OK", "Content-Length: 3")), BAD),
    "a length below zero": (once(http(GOOD, length=-5)), BAD),
    "length and chunks": (once(http(GOOD, "200 OK", "Transfer-Encoding: chunked")), BAD),
    "an upgrade": (
        once(b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"),
        WRONG,
    ),
    # Statuses, with bodies that do not matter.
    "204": (once(b"HTTP/1.1 204 No Content\r\n\r\n"), WRONG),
    "206": (once(http(GOOD, "206 Partial Content")), WRONG),
    "304": (once(b"HTTP/1.1 304 Not Modified\r\n\r\n"), WRONG),
    "400": (once(http(b'{"error": {"message": "no such field"}}', "400 X")), WRONG),
    "401 with the key": (once(http(f"bad key {KEY}".encode(), "401 X")), WRONG),
    "404 of html": (once(http(b"<html>" * 99, "404 X")), WRONG),
    "408": (once(http(b"{}", "408 X")), TIMEOUT),
    "418 nested deep": (once(http(b"[" * 100_000, "418 X")), WRONG),
    "429": (once(http(b"{}", "429 X")), BUSY),
    "429 for a day": (once(http(b"{}", "429 X", "Retry-After: 86400")), BUSY),
    "429 for ever": (once(http(b"{}", "429 X", "Retry-After: 1e308")), BUSY),
    "429 until the year 9999": (
        once(http(b"{}", "429 X", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT")),
        BUSY,
    ),
    "429 before the year 1": (once(http(b"{}", "429 X", "Retry-After: -1")), BUSY),
    "429 with a word": (once(http(b"{}", "429 X", "Retry-After: soon")), BUSY),
    "500": (once(http(b"oops", "500 X")), BROKEN),
    "500 cut off": (once(http(b"oops", "500 X", length=99)), BROKEN),
    "500 that never ends": (hang(http(b"oops", "500 X", length=99)), BROKEN),
    "500 of endless bytes": (
        endless(CHUNKED.replace(b"200", b"500"), MB),
        BROKEN,
    ),
    "500 with a gzip bomb": (once(http(BOMB, "500 X", GZIP)), BROKEN),
    "500 encoded as nobody knows": (once(http(b"x", "500 X", "Content-Encoding: x")), BROKEN),
    "503 that is busy": (once(http(b'{"error": "overloaded"}', "503 X")), BUSY),
    "599": (once(http(b"", "599 X")), BROKEN),
    "999": (once(http(b"", "999 X")), BROKEN),
}  # fmt: skip
REDIRECTS = ("301", "302", "303", "307", "308")
LARGE: dict[str, tuple[Callable[[], Sent], Kind]] = {
    "a length of 200 MB": (
        endless(OK_HEAD + b"Content-Length: 200000000\r\n\r\n", b" " * 65536),
        BAD,
    ),
    "a length of 2^80": (endless(OK_HEAD + b"Content-Length: %d\r\n\r\n" % 2**80, b" "), BAD),
    "endless chunks": (endless(CHUNKED, MB), BAD),
    "endless bytes without a length": (endless(OK_HEAD + b"\r\n", b" " * 65536), BAD),
    "endless headers": (endless(OK_HEAD, b"X-A: " + b"a" * 1000 + b"\r\n"), BAD),
    "an endless header": (endless(OK_HEAD + b"X-A: ", b"a" * 65536), BAD),
    "an endless status line": (endless(b"HTTP/1.1 200 ", b"O" * 65536), BAD),
    "a gzip bomb with a length": (once(http(BOMB, "200 OK", GZIP)), BAD),
    "a gzip bomb in chunks": (once(chunked(BOMB, b"", headers=f"{GZIP}\r\n")), BAD),
    "a deflate bomb": (once(http(bomb(15, 300 * 2**20), "200 OK", DEFLATE)), BAD),
    "an endless gzip bomb": (
        endless(OK_HEAD + GZIP.encode() + b"\r\n\r\n" + BOMB[:20000], BOMB[20000:80000]),
        BAD,
    ),
    "thirty megabytes of lists": (once(http(b"[" + b"[]," * 10**7 + b"0]")), BAD),
}  # fmt: skip


class _Talk(socketserver.BaseRequestHandler):
    server: "Hostile"
    request: socket.socket

    def handle(self) -> None:
        raw = b""
        try:
            while b"\r\n\r\n" not in raw:
                raw += self.request.recv(65536) or b"\r\n\r\n"
            head, _, body = raw.partition(b"\r\n\r\n")
            if not head:
                return
            length = re.search(rb"(?i)content-length: (\d+)", head)
            while len(body) < int(length[1] if length else 0):
                body += self.request.recv(65536)
            with self.server.lock:
                self.server.heads.append(head)
            name = json.loads(body)["messages"][0]["content"] if body else head.split()[1].decode()
            for one in self.server.shapes[name]():
                if isinstance(one, float):
                    if self.server.over.wait(one):
                        return
                else:
                    self.request.sendall(one)
        except Reset:
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *bytes(7)]))
        except OSError:
            pass


class Hostile(socketserver.ThreadingTCPServer):
    """Sends the shape that the prompt names, or for GET the path."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, shapes: dict[str, Callable[[], Sent]]) -> None:
        super().__init__(("127.0.0.1", 0), _Talk)
        self.shapes = shapes
        self.heads: list[bytes] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self) -> "Hostile":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OTTER_KEY", KEY)
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def test_every_shape_of_fault_ends_as_its_kind_within_the_deadline_and_spares_the_others(
    monkeypatch,
):
    monkeypatch.setattr(wire, "MOST_ERROR_S", 0.5)
    elsewhere = Hostile({name: once(http(GOOD)) for name in ("/", *REDIRECTS)})
    shapes = {name: send for name, (send, _) in SHAPES.items()}
    kinds = {name: kind for name, (_, kind) in SHAPES.items()}
    with elsewhere:
        for status in REDIRECTS:
            shapes[status] = once(http(b"", f"{status} X", f"Location: {elsewhere.url}/a?b=secret"))
            kinds[status] = WRONG
        # Only what never ends, and what is asked again for as long as there is time, waits.
        waits = [name for name in shapes if kinds[name] in (TIMEOUT, BUSY)]
        others = [name for name in shapes if name not in waits]
        outcomes, stats = {}, []
        with Hostile(shapes) as server:
            endpoint = Endpoint(server.url, key_env="OTTER_KEY")
            for names, deadline_s in ((waits, DEADLINE_S), (others, 300.0)):
                rules = {"limit": len(names), "deadline_s": deadline_s, "tries": 1, "hedge": False}
                with Pool(endpoint, **rules) as pool:
                    found = pool.map(chat("m", name, temperature=0) for name in names)
                    outcomes |= dict(zip(names, found, strict=True))
                    stats.append(pool.stats())
    found = {name: None if isinstance(one, Done) else one.kind for name, one in outcomes.items()}
    wrong = {
        name: (kinds[name], found[name], getattr(outcomes[name], "error", ""))
        for name in shapes
        # Whether the headers were read before the chunk is a matter of packets.
        if found[name] is not kinds[name] and not ("chunk of" in name and found[name] is CUT)
    }
    assert not wrong
    assert len(shapes) > 100
    assert elsewhere.heads == []
    for name, one in outcomes.items():
        if isinstance(one, Failed):
            assert KEY[:10] not in one.error, name
            assert "secret" not in one.error, name
            assert len(one.error) < 400, name
    nobody = [name for name in shapes if name.startswith("usage")]
    assert {outcomes[name].usage for name in nobody} == {None}
    assert stats[1]["uncounted"] >= len(nobody)
    assert 0 <= stats[1]["prompt_tokens"] < 1000


def test_an_answer_is_read_up_to_its_cap_and_memory_stays_bounded():
    shapes = {name: send for name, (send, _) in LARGE.items()}
    with (
        Hostile(shapes) as server,
        Pool(server.url, limit=1, deadline_s=60.0, tries=1, hedge=False) as pool,
    ):
        pool.map([chat("m", "a length of 2^80", temperature=0)])
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("the peak of memory cannot be reset here")
        before = peak_mb()
        outcomes = pool.map(chat("m", name, temperature=0.0) for name in LARGE)
        grown = peak_mb() - before
    found = dict(zip(LARGE, outcomes, strict=True))
    assert {name: one.kind for name, one in found.items()} == {n: k for n, (_, k) in LARGE.items()}
    assert f"longer than {wire.MOST_BODY_BYTES:,} bytes" in found["endless chunks"].error
    # The body twice (parts, then joined) and what was there already.
    assert grown < 6 * wire.MOST_BODY_BYTES / 2**20


def test_a_list_of_models_that_never_ends_is_no_list(monkeypatch):
    monkeypatch.setattr(wire, "LIST_S", 20.0)
    moved = Hostile({})
    with moved, Hostile({}) as server:
        endpoint = Endpoint(server.url, key_env="OTTER_KEY")
        for send in (
            endless(OK_HEAD + b"\r\n", b" " * 65536),
            once(http(BOMB, "200 OK", GZIP)),
            once(http(b"[" * 100_000)),
            once(http(b"", "307 X", f"Location: {moved.url}/models")),
            once(http(b'{"data": 3}')),
        ):
            server.shapes["/v1/models"] = send
            with Pool(endpoint) as pool:
                assert pool.run(check_model(endpoint, "m")) is None
        server.shapes["/v1/models"] = once(
            http(json.dumps({"data": [{"id": "x" * 10**6}]}).encode())
        )
        with Pool(endpoint) as pool, pytest.raises(NoServer) as error:
            pool.run(check_model(endpoint, "m"))
    assert len(str(error.value)) < 500
    assert moved.heads == []


def test_the_cap_grows_with_the_texts_of_an_embedding_call():
    assert wire._most(embed("m", ["a"] * 2048)) > 2048 * 5000 * 20
    assert wire._most(chat("m", "a")) == wire.MOST_BODY_BYTES


def test_one_absurd_count_or_pause_does_not_end_an_endpoint(tmp_path):
    now = time.monotonic()
    rates = SharedRateLimit(tmp_path / "rates.db", "e", tpm=6000)
    assert rates.reserve(50, now) == 0.0
    rates.settle(50, 10**8)
    for one in (rates, SharedRateLimit(tmp_path / "rates.db", "e", tpm=6000)):
        assert 0 < one.reserve(50, now) <= MOST_DEBT_S + (time.monotonic() - now)
        one.close()
    upstream = Upstream(Endpoint("http://127.0.0.1:9"), FixedLimit(4), learns=False)
    for asked in (86400.0, 1e300, math.nextafter(math.inf, 0)):
        rejected = Failed(Kind.RATE_LIMITED, "429", 429, retry_after_s=asked)
        upstream.learn(now, 0.1, rejected, call=1)
        assert upstream.limit.pause_until <= now + MOST_PAUSE_S
