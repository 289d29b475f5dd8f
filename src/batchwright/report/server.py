"""The live page: a small HTTP server that only reads run directories.

Loopback by default and then without a login; any other address needs a token. Every answer has
a content security policy that allows the page's own script, styles and requests and nothing
else. A request names a run by its place in the list, never by a path.
"""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import re
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from batchwright.errors import BatchwrightError, ConfigError, MissingFile, NoServer
from batchwright.report.html import part
from batchwright.report.plans import sample_text
from batchwright.report.summary import RunReader, find_runs, summarise_plan

__all__ = ["View", "bound", "serve_view"]

POLL_S = 0.4
"""Seconds between looks at a run that somebody watches."""
PARTIAL_S = 0.7
"""A log that takes longer than this to read is shown as far as it was read."""
PING_S = 15.0
ASK_S, REST_S = 1.0, 3.0
"""When a page that gets no stream asks again: of a live run, and of one that has ended."""
WATCHERS = 64
"""Requests that are served at once; more get an answer that says so."""
STREAMS = 4
"""Pages that updates are pushed to; others ask. A browser allows six connections to a server, for
all its tabs, and a stream keeps one."""
TOKEN = 16
"""Characters that a token has at least."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
HEAD = '<link rel="stylesheet" href="page.css">\n<script src="page.js" defer></script>'

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Watch:
    """One run, read by one task for all pages that watch it."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self.watchers = 0
        self.version = 0
        self.looks = 0
        """How often the run was read to its end."""
        self._state: Any = None
        self.changed = asyncio.Condition()
        self.whole = self.rest = "{}"
        """The newest summary as JSON, with its plan and without."""
        self.planned = False
        self.error: str | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        """Read until nobody watches any more."""
        while self.watchers:
            try:
                new, ended = await asyncio.to_thread(self._read)
                found = await asyncio.to_thread(self._summary, new)
                if found is not None:
                    self._state = found["state"]
                    await self._tell(found)
                    if found["planning"]:
                        # The rest is shown already; this may take a second.
                        found = await asyncio.to_thread(self.reader.summary)
                        await self._tell(found)
            except (BatchwrightError, OSError) as error:
                await self._tell(error=str(error))
                return
            except Exception as error:
                # Whatever a file holds, its page says so, and those of other runs go on.
                await self._tell(error=f"This run cannot be shown: {type(error).__name__}: {error}")
                return
            if not ended:
                continue
            async with self.changed:
                self.looks += 1
                self.changed.notify_all()
            if not new:
                await asyncio.sleep(POLL_S)

    def _read(self) -> tuple[bool, bool]:
        """Whether there was anything new, and whether all of it was read in a moment."""
        began, new = time.monotonic(), False
        while self.reader.update():
            new = True
            if time.monotonic() - began > PARTIAL_S:
                return new, False
        return new, True

    @property
    def live(self) -> bool:
        """Whether more is to be expected soon."""
        return self._state is None or self._state["name"] in ("live", "empty")

    def _summary(self, new: bool) -> dict[str, Any] | None:
        found = self.reader.summary(quick=True)
        return found if new or found["state"] != self._state else None

    async def _tell(self, found: dict[str, Any] | None = None, error: str | None = None) -> None:
        if found is not None:
            self.whole, self.rest = await asyncio.to_thread(_encoded, found)
            self.planned = not found["planning"]
        self.error = error
        async with self.changed:
            self.version += 1
            self.changed.notify_all()


def _encoded(summary: dict[str, Any]) -> tuple[str, str]:
    rest = summary | {"plan": "same"} if summary["plan"] else summary
    return _json(summary), _json(rest)


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class View:
    """The application over a folder of runs, or over one batch plan."""

    def __init__(
        self, root: Path, *, hosts: frozenset[str], token: str | None = None, plan: bool = False
    ) -> None:
        self.root = root
        self._hosts, self._token = hosts, token
        self._plan = plan
        self._watches: dict[str, _Watch] = {}
        self._streams = 0
        self._own = secrets.token_hex(4)
        self.app = web.Application(middlewares=[self._guarded])
        for path in FILES:
            self.app.router.add_get(path, self._file)
        self.app.router.add_get("/api/runs", self._runs)
        self.app.router.add_get("/api/events", self._events)
        self.app.router.add_get("/api/sample", self._sample)
        self.app.on_shutdown.append(self._close)

    def runs(self) -> dict[str, Path]:
        """The runs in the folder, or the plan as one; `MissingFile` if the folder is gone."""
        if not self.root.is_dir():
            raise MissingFile(f"{self.root} is gone; start batchwright view on another folder")
        return {".": self.root} if self._plan else find_runs(self.root)

    async def _close(self, _: web.Application) -> None:
        for watch in self._watches.values():
            watch.watchers = 0
            await watch.close()
            await watch._tell(error="The server was stopped.")

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check host, method and token before anything is read, and seal every answer."""
        try:
            refused = self._refused(request)
            answer = refused if refused is not None else await handler(request)
        except web.HTTPException as error:
            answer = _refusal(error.status, f"{error.reason}; this server has one page, at /")
        except (BatchwrightError, OSError) as error:
            answer = _refusal(404, str(error))
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    def _refused(self, request: web.Request) -> web.StreamResponse | None:
        if request.method not in ("GET", "HEAD"):
            return _refusal(405, f"{request.method} is not allowed; this server only reads")
        if self._token is None:
            # A page of somebody else whose name was made to point here would send its own name.
            if request.host not in self._hosts:
                return _refusal(403, "this host name is not served; use the address it printed")
            return None
        given = request.query.get("token", "")
        known = given or request.cookies.get("batchwright_view", "")
        if not hmac.compare_digest(known.encode(), self._token.encode()):
            return _refusal(401, "a token is needed; open the page with ?token=...")
        if given and request.path == "/":
            answer = web.Response(status=303, headers={"Location": "/"})
            answer.set_cookie("batchwright_view", given, httponly=True, samesite="Strict")
            return answer
        return None

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = FILES[request.path]
        text = part(name)
        if name == "page.html":
            text = text.replace("<!--head-->", HEAD, 1).replace("<!--data-->", "", 1)
        return web.Response(text=text, content_type=kind, charset="utf-8")

    async def _runs(self, request: web.Request) -> web.Response:
        found = await asyncio.to_thread(self.runs)
        own = self.root.resolve().name
        return web.json_response(
            {"runs": [{"key": key, "name": own if key == "." else key} for key in found]}
        )

    def _path(self, request: web.Request) -> tuple[str, Path]:
        key = request.query.get("run", "")
        found = self.runs()
        if key not in found:
            raise MissingFile("there is no such run in the folder; reload the page")
        return key, found[key]

    async def _sample(self, request: web.Request) -> web.Response:
        _, path = await asyncio.to_thread(self._path, request)
        item = request.query.get("item", "")
        if not item.isdecimal() or len(item) > 10:
            return _refusal(400, "item must be the number of a sample")
        return web.json_response(
            await asyncio.to_thread(sample_text, path, int(item), self.root.resolve())
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Summaries as server-sent events: one at once, another whenever the run has grown."""
        if sum(watch.watchers for watch in self._watches.values()) >= WATCHERS:
            return _refusal(503, f"{WATCHERS} pages are open already; close some")
        key, path = await asyncio.to_thread(self._path, request)
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        if self._plan:
            summary = await asyncio.to_thread(summarise_plan, path)
            await answer.prepare(request)
            await _send(answer, "summary", _json(summary))
            await _send(answer, "end", "{}")
            return answer
        watch = self._watches.get(key)
        if watch is None or watch.error is not None:
            name = None if key == "." else key
            reader = await asyncio.to_thread(RunReader, path, name, self.root.resolve())
            watch = self._watches.setdefault(key, _Watch(reader))
            if watch.error is not None:
                watch = self._watches[key] = _Watch(reader)
        await answer.prepare(request)
        # A version is of one server and one reader; what another gave is not known here.
        known = re.fullmatch(rf"{self._own}-(\d{{1,9}})-([01])", request.query.get("seen", ""))
        seen = int(known[1]) if known and int(known[1]) <= watch.version else 0
        watch.begin()
        try:
            await self._push(watch, answer, seen, bool(known and seen and known[2] == "1"))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            watch.watchers -= 1
        return answer

    async def _push(
        self, watch: _Watch, answer: web.StreamResponse, seen: int, has_plan: bool
    ) -> None:
        """Send what is newer than `seen`; then all that follows, or when to ask again."""
        looks, held = watch.looks, False

        def due() -> bool:
            # The first look after a pause tells whether there is anything new.
            return watch.version > seen or (watch.looks > looks and not held)

        try:
            while True:
                await self._next(watch, due)
                if watch.version > seen:
                    seen = watch.version
                    if watch.error is not None:
                        await _send(answer, "gone", _json({"error": watch.error}))
                        return
                    data = watch.rest if has_plan else watch.whole
                    has_plan = watch.planned
                    name = f"{self._own}-{seen}-{int(has_plan)}"
                    await _send(answer, "summary", data, name)
                elif held:
                    await answer.write(b": still here\n\n")
                if watch.looks == looks:
                    continue
                if not watch.live:
                    await _send(answer, "ask", _json({"after_s": REST_S}))
                    return
                if not held and self._streams >= STREAMS:
                    await _send(answer, "ask", _json({"after_s": ASK_S}))
                    return
                self._streams += not held
                held = True
        finally:
            self._streams -= held

    async def _next(self, watch: _Watch, there: Callable[[], bool]) -> None:
        """Wait until it is there, or for as long as a connection may be silent."""
        async with watch.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watch.changed.wait_for(there), timeout=PING_S)


async def _send(answer: web.StreamResponse, event: str, data: str, name: str = "") -> None:
    own = f"id: {name}\n" if name else ""
    await answer.write(f"{own}event: {event}\ndata: {data}\n\n".encode())


def _refusal(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)


def bound(host: str, port: int, token: str | None) -> socket.socket:
    """A socket that listens at the address; one that is not loopback needs a token."""
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"--host must be an IP address or localhost, got {host!r}") from None
    if token is not None and len(token) < TOKEN:
        raise ConfigError(f"a token must have at least {TOKEN} characters, got {len(token)}")
    if not own and token is None:
        raise ConfigError(
            f"--host {host} is not a loopback address, so everybody there could read the runs; use "
            f"127.0.0.1 and a tunnel (ssh -L), or set BATCHWRIGHT_VIEW_TOKEN"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NoServer(
                f"port {port} of {host} is in use; choose another, or --port 0 for a free one"
            ) from None
        raise NoServer(f"cannot listen on {host}:{port}: {error.strerror}") from None


def serve_view(
    root: Path,
    listening: socket.socket,
    *,
    token: str | None = None,
    plan: bool = False,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` gets the address."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    hosts = frozenset({shown, f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"})

    async def main() -> None:
        view = View(root, hosts=hosts, token=token, plan=plan)
        runner = web.AppRunner(view.app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        try:
            await web.SockSite(runner, listening).start()
            ready(f"http://{shown}/")
            await stopped.wait()
        finally:
            await runner.cleanup()

    asyncio.run(main())
