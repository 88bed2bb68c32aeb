"""JSON requests to a server on this host, and its JSON replies."""

from __future__ import annotations

import http.client
import json
from typing import Any

from isotrain.errors import RolloutError

HOST = "127.0.0.1"
LONGEST_COMPLAINT = 1000


class NoReply(RolloutError):
    """The server did not reply: what became of the request is unknown."""


class Exchange:
    """A connection for each request: one that broke leaves nothing behind for the next."""

    def __init__(self, engine: str, port: int, key: str) -> None:
        self._engine, self._port, self._key = engine, port, key

    def get(self, path: str, timeout: float | None) -> Any:
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        return self._request("POST", path, json.dumps(body, allow_nan=False).encode(), timeout)

    def _request(self, method: str, path: str, body: bytes | None, timeout: float | None) -> Any:
        """The JSON of the reply, None if it is empty; `timeout` is for a silent server."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(HOST, self._port, timeout=timeout)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            late = isinstance(error, TimeoutError) and timeout is not None
            why = f"within {timeout:g} s" if late else f"({error!r})"
            raise NoReply(f"{self._engine}: no reply to {path} {why}") from error
        finally:
            connection.close()
        if status != 200:
            raise RolloutError(f"{self._engine}: the server refused {path} with {status}: {_complaint(text)}")
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise RolloutError(f"{self._engine}: the reply to {path} is not JSON: {error}") from error


def _complaint(text: bytes) -> str:
    """What a refusal says, whichever of the usual forms it has."""
    said: Any = text.decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        inner = found.get("error")
        said = inner.get("message", said) if isinstance(inner, dict) else found.get("message", said)
    return str(said)[:LONGEST_COMPLAINT] or "no reason given"
