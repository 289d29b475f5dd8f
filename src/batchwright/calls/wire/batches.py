"""OpenAI's Batch API: files and batches over HTTP, and the lines of their files.

What creates something is sent once. If its response is lost, the server is asked whether it was
created before it is sent again.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.outcome import Failed, Kind, Outcome, parse_body
from batchwright.calls.request import Request
from batchwright.calls.wire.http import Exchange, HttpTransport, Unanswered
from batchwright.calls.wire.masking import Mask
from batchwright.calls.wire.openai import PATHS, from_body, refused, retry_after_s, scrub
from batchwright.errors import ConfigError, NoServer

__all__ = ["ENDED", "BatchServer", "encode_line", "outcome_of_line", "path_of", "why_failed"]

ENDED = ("completed", "failed", "expired", "cancelled")
"""A batch in one of these states changes no more."""
TRIES = 6
FIRST_PAUSE_S, MOST_PAUSE_S = 0.25, 30.0
CONTROL_S, TRANSFER_S = 60.0, 3600.0
"""How long the server may take for a small response, and for a file."""
PAGE = 100
MOST_FILE_BYTES = 2**30
"""Of an output or error file."""
REPEATS_KEY = "the response repeats the API key, which would be stored with it"


def path_of(request: Request) -> str:
    """The API that a request belongs to, as batches name it."""
    return "/v1" + PATHS[request.kind]


def encode_line(custom_id: str, request: Request) -> bytes:
    """A line of an input file; the body is the request's own bytes.

    >>> from batchwright.calls import chat
    >>> encode_line("a", chat("m", "2+2?")).decode()[:69]
    '{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":'
    """
    head = {"custom_id": custom_id, "method": "POST", "url": path_of(request)}
    text = json.dumps(head, separators=(",", ":"))
    return text[:-1].encode() + b',"body":' + request.data + b"}\n"


def outcome_of_line(request: Request, line: Mapping[str, Any]) -> Outcome:
    """The outcome of a line of an output or error file."""
    response, error = line.get("response"), line.get("error")
    if isinstance(response, Mapping) and isinstance(response.get("status_code"), int):
        if response["status_code"] == 200:
            return from_body(request, response.get("body"))
        body = json.dumps(response.get("body")).encode()
        return refused(request, response["status_code"], {}, body)
    if isinstance(error, Mapping):
        code = str(error.get("code"))
        text = f"{code}: {scrub(str(error.get('message') or ''), request)}"
        kinds = {"batch_expired": Kind.TIMEOUT, "batch_cancelled": Kind.CANCELLED}
        kinds[REPEATS_KEY] = Kind.BAD_BODY
        return Failed(kinds.get(code, Kind.HTTP_5XX), text.removesuffix(": "))
    return Failed(Kind.BAD_BODY, f"a line of the batch has {sorted(map(str, line))[:6]}")


def why_failed(batch: Mapping[str, Any]) -> Failed:
    """The failure of every request of a batch that the server refused as a whole."""
    errors = batch.get("errors")
    rows = errors.get("data") if isinstance(errors, Mapping) else None
    found = [row for row in rows or () if isinstance(row, Mapping)]
    first = found[0] if found else {}
    code, line = str(first.get("code") or "no reason given"), first.get("line")
    where = f" (line {line} of its file)" if isinstance(line, int) else ""
    more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
    # Too many tokens in the queue: the same batch is taken when others have finished.
    kind = Kind.RATE_LIMITED if code == "token_limit_exceeded" else Kind.HTTP_4XX
    message = " ".join(str(first.get("message") or "").split())[:200]
    text = f"batch {batch.get('id')} failed, {code}{where}: {message}{more}"
    return Failed(kind, text.replace(": and", " and").removesuffix(": "))


class BatchServer:
    """Files and batches of one endpoint, on the loop that runs it.

    Raises:
        NoServer: after some tries there is still no response, or none that makes sense.
        ConfigError: the server refuses; the message says what it said.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        if endpoint.protocol != "openai":
            raise ConfigError(
                f"{endpoint.name} has no Batch API; give an OpenAI-compatible address such as "
                f"https://api.openai.com/v1, or leave out --batch-api"
            )
        self._name = endpoint.name
        self._mask = Mask.of(endpoint)
        self._http = HttpTransport(endpoint)

    async def close(self) -> None:
        await self._http.close()

    async def upload(self, name: str, content: bytes) -> str:
        """The id of a file with this name, which nobody else has, and content."""
        boundary = secrets.token_hex(16)
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            f"Content-Type: application/jsonl\r\n\r\n"
        )
        data = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        kind = f"multipart/form-data; boundary={boundary}"

        async def send() -> Exchange:
            return await self._http.exchange("POST", "/files", data, kind, timeout_s=TRANSFER_S)

        found = await self._once(send, lambda: self.find_file(name))
        return str(found["id"])

    async def create(self, file: str, path: str) -> dict[str, Any]:
        """The batch over an uploaded file."""
        given = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
        data = json.dumps(given).encode()

        async def send() -> Exchange:
            return await self._http.exchange("POST", "/batches", data, timeout_s=CONTROL_S)

        return await self._once(send, lambda: self.find_batch(file))

    async def get(self, batch: str) -> dict[str, Any]:
        return self._parsed(await self._again("GET", f"/batches/{batch}"))

    async def cancel(self, batch: str) -> None:
        """Ask for the end of a batch; one that has ended already stays as it is."""
        response = await self._again("POST", f"/batches/{batch}/cancel", b"", refused=True)
        if response.status >= 400 and (await self.get(batch)).get("status") not in ENDED:
            self._refuse(response)

    async def lines(self, file: str) -> list[dict[str, Any]]:
        """The lines of an output or error file."""
        path = f"/files/{file}/content"
        response = await self._again("GET", path, timeout_s=TRANSFER_S, most_bytes=MOST_FILE_BYTES)
        found = []
        for row in response.body.splitlines():
            try:
                line = parse_body(row) if row.strip() else None
            except ValueError:
                raise NoServer(f"{self._name}: the file {file} is not JSON lines") from None
            if isinstance(line, dict):
                if self._mask.is_in(row):
                    line |= {"response": None, "error": {"code": REPEATS_KEY}}
                found.append(line)
        return found

    async def find_file(self, name: str) -> dict[str, Any] | None:
        """The uploaded file with this name, if there is one."""
        return await self._find("/files", "&purpose=batch", "filename", name)

    async def find_batch(self, file: str) -> dict[str, Any] | None:
        """The batch over this file, if there is one."""
        return await self._find("/batches", "", "input_file_id", file)

    async def _find(self, path: str, query: str, field: str, value: str) -> dict[str, Any] | None:
        after = ""
        while True:
            response = await self._again("GET", f"{path}?limit={PAGE}{query}{after}")
            rows = self._parsed(response, "data")["data"]
            for row in rows:
                if isinstance(row, dict) and row.get(field) == value:
                    return row
            if not rows or not self._parsed(response, "data").get("has_more"):
                return None
            after = f"&after={rows[-1]['id']}"

    async def _once(
        self,
        send: Callable[[], Awaitable[Exchange]],
        find: Callable[[], Awaitable[dict[str, Any] | None]],
    ) -> dict[str, Any]:
        """Create something with one request that the server acts on, however often it is sent."""
        why = ""
        for number in range(TRIES):
            if number:
                found = await find()
                if found is not None:
                    return found
            wait = None
            try:
                response = await send()
            except (Unanswered, ValueError) as error:
                why = str(error)
            else:
                if response.status < 300:
                    return self._parsed(response)
                if not _passing(response.status):
                    self._refuse(response)
                why = f"{self._name} responded with status {response.status}"
                wait = retry_after_s(response.headers)
            await asyncio.sleep(_pause(number, wait))
        found = await find()
        if found is not None:
            return found
        raise NoServer(f"{why}, {TRIES} times; run again to resume")

    async def _again(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        timeout_s: float = CONTROL_S,
        most_bytes: int = 4 * 2**20,
        refused: bool = False,
    ) -> Exchange:
        """A request that may be sent several times; `refused` returns errors as they are."""
        why = ""
        for number in range(TRIES):
            wait = None
            try:
                response = await self._http.exchange(
                    method, path, data, timeout_s=timeout_s, most_bytes=most_bytes
                )
            except Unanswered as error:
                why = str(error)
            except ValueError as error:
                raise NoServer(str(error)) from None
            else:
                if response.status < 300 or (refused and not _passing(response.status)):
                    return response
                if not _passing(response.status):
                    self._refuse(response)
                why = f"{self._name} responded with status {response.status}"
                wait = retry_after_s(response.headers)
            if number < TRIES - 1:
                await asyncio.sleep(_pause(number, wait))
        raise NoServer(f"{why}, {TRIES} times; run again to resume")

    def _parsed(self, response: Exchange, field: str = "id") -> dict[str, Any]:
        try:
            found = parse_body(response.body)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get(field) in (None, ""):
            raise NoServer(f"{self._name} does not speak OpenAI's Batch API: no {field!r} came")
        return found

    def _refuse(self, response: Exchange) -> None:
        # A request of nobody: there is no prompt to be hidden in what the server says.
        nobody = Request("chat", {"model": "-", "messages": []})
        said = refused(nobody, response.status, response.headers, response.body).error
        raise ConfigError(f"the Batch API of {self._name}: {said}")


def _passing(status: int) -> bool:
    return status == 429 or status == 408 or status >= 500


def _pause(number: int, wait: float | None) -> float:
    return min(MOST_PAUSE_S, max(FIRST_PAUSE_S * float(2**number), wait or 0.0))
