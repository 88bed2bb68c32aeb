"""The page over HTTP: for this machine, for who has the key, to read only."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from isotrain.errors import DataError, RecipeError
from isotrain.tools.view.page import STATIC, linked_page, static_file
from isotrain.tools.view.requests import BadRequest, respond
from isotrain.tools.view.run import RunView

logger = logging.getLogger("isotrain")

ADDRESS = "127.0.0.1"
# Another name would be a page elsewhere whose name was pointed at this machine. Ports may differ: tunnels.
_HOSTS = {ADDRESS, "localhost"}
_SECONDS_BETWEEN = 1.0
_SECONDS_FOR_A_REQUEST = 20.0

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ViewServer(ThreadingHTTPServer):
    """Serves runs until it is closed, and reads what is new of them every second."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunView], port: int = 0) -> None:
        self.runs = runs
        self.key = secrets.token_urlsafe(24)
        self._ended = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="view-refresh", daemon=True)
        self._refresher.start()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise RecipeError(
                f"--port: cannot use port {port} ({error.strerror or error}); 0 takes any free one"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.key}/"

    def _refresh(self) -> None:
        while not self._ended.is_set():
            for run in self.runs:
                try:
                    run.refresh(self._ended.is_set)
                except Exception:  # a thread that ends would freeze the page without a word
                    logger.exception("%s cannot be read; trying again", run.path)
            self._ended.wait(_SECONDS_BETWEEN)

    def server_close(self) -> None:
        self._ended.set()
        super().server_close()
        # An interpreter that ends under a thread inside pyarrow aborts.
        self._refresher.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of a response is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS_FOR_A_REQUEST

    def do_GET(self) -> None:
        if not self._may_ask():
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"open the address that isotrain printed\n")
        address = urlsplit(self.path)
        path = address.path.split("/", 2)[2]
        if not path:
            return self._send(HTTPStatus.OK, "text/html", linked_page())
        if path in STATIC:
            return self._send(HTTPStatus.OK, STATIC[path], static_file(path))
        if path.startswith("api/"):
            return self._send_json(path.removeprefix("api/"), address.query)
        self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def _may_ask(self) -> bool:
        """The key is in the path; pages of other sites may not even try it."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        first = self.path.split("?", 1)[0].split("/")
        key = first[1] if len(first) > 2 else ""
        same = hmac.compare_digest(key.encode("utf-8", "replace"), self.server.key.encode())
        elsewhere = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        return same and host in _HOSTS and not (elsewhere and len(first) > 3)

    def _send_json(self, name: str, query: str) -> None:
        try:
            asked = parse_qs(query, keep_blank_values=True, max_num_fields=200)
            content, status = respond(self.server.runs, name, asked), HTTPStatus.OK
        except DataError as error:
            content, status = {"error": str(error)}, HTTPStatus.NOT_FOUND
        except (BadRequest, ValueError) as error:
            content, status = {"error": str(error)}, HTTPStatus.BAD_REQUEST
        except Exception:  # without a reply the page could not say what is wrong
            logger.exception("%s cannot be shown", name)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            content = {"error": "this cannot be shown; the terminal of isotrain view says why"}
        self._send(status, "application/json", json.dumps(content, allow_nan=False).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "isotrain"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: an address holds the key."""
