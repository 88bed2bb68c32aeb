from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from isotrain.tools.view.run import RunView
from isotrain.tools.view.server import ADDRESS, ViewServer


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """What a browser, or somebody else, may send to a server."""

    server: ViewServer

    def send(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None, host: str | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection(ADDRESS, self.server.server_address[1], timeout=30)
        connection.putrequest(method, path, skip_host=True)
        named = f"{ADDRESS}:{self.server.server_address[1]}" if host is None else host
        for name, value in {"Host": named, **(headers or {})}.items():
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        found = Reply(reply.status, dict(reply.getheaders()), reply.read())
        connection.close()
        return found

    def ask(self, name: str, /, *pairs: tuple[str, object], **query: object) -> Reply:
        return self.send(f"/{self.server.key}/api/{name}?{urlencode([*pairs, *query.items()])}")

    def get(self, name: str, /, *pairs: tuple[str, object], **query: object) -> Any:
        reply = self.ask(name, *pairs, **query)
        assert reply.status == 200, reply.body
        return reply.json


@contextmanager
def serving(*runs: Path) -> Iterator[Client]:
    views = [RunView(run) for run in runs]
    for view in views:
        view.refresh()
    with ViewServer(views) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Client]]:
    """Start servers that end with the test."""
    with ExitStack() as stack:
        yield lambda *runs: stack.enter_context(serving(*runs))
