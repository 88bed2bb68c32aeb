"""What tests of sandboxes share: a working bubblewrap, and a server of SandboxFusion's protocol."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from isotrain.errors import SandboxError
from isotrain.process.bubblewrap import Bubblewrap
from isotrain.process.sandbox import Limits

REQUIRED = "ISOTRAIN_TEST_SANDBOX"


@contextmanager
def bubblewrap(limits: Limits, python: str | None = None) -> Iterator[Bubblewrap]:
    """A sandbox that works. Without one the test is skipped, but fails in CI, which installs bubblewrap."""
    sandbox = Bubblewrap(limits, python)
    try:
        sandbox.start()
    except SandboxError as error:
        if os.environ.get(REQUIRED) == "required":
            raise
        pytest.skip(f"no sandbox: {error}")
    try:
        yield sandbox
    finally:
        sandbox.close()


def run_code(sandbox: Bubblewrap, request: dict[str, Any]) -> dict[str, Any]:
    """What SandboxFusion replies to a request; the program itself runs in bubblewrap."""
    assert request["language"] == "python" and request["files"] == {}
    outcome = sandbox.run(request["code"], request["stdin"] or "", request["run_timeout"])
    late = outcome.ended == "time"
    return {
        "status": "Success" if outcome.succeeded else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "TimeLimitExceeded" if late else "Finished",
            "execution_time": outcome.seconds,
            "return_code": None if late else outcome.exit_code,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr,
        },
        "executor_pod_name": None,
        "files": {},
    }


class FusionServer:
    """Listens on loopback; `replies` are sent first, each a status with a body, then programs are run."""

    def __init__(self, sandbox: Bubblewrap | None) -> None:
        self.replies: list[tuple[int, bytes]] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, request))
                if server.replies:
                    status, body = server.replies.pop(0)
                else:
                    assert sandbox is not None
                    status, body = 200, json.dumps(run_code(sandbox, request)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def fusion_server(sandbox: Bubblewrap | None) -> Iterator[FusionServer]:
    server = FusionServer(sandbox)
    try:
        yield server
    finally:
        server.close()
