"""Programs in a sandbox behind HTTP, by SandboxFusion's protocol."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import time
from threading import Event, Timer
from typing import Any
from urllib.parse import urlsplit

from isotrain.errors import SandboxError, one_line
from isotrain.process.supervise import MIB, Limits, ProgramOutcome, ended_by_memory

ATTEMPTS = 3
# Seconds before the second attempt; twice as many before the third.
PAUSE = 1.0
# For the queue of the server and the way there and back, beyond the time of the program.
SLACK = 10.0
# Overloaded, or a gateway without a server behind it: the program has not run, or its outcome is lost.
BUSY = frozenset({429, 502, 503, 504})
# Of a reply, beyond stdout and stderr: JSON writes a character with up to six bytes.
_ENVELOPE = 1 << 16


class _Busy(Exception):
    """The server could not be reached, or was too busy."""


class SandboxFusion:
    def __init__(self, address: str, limits: Limits) -> None:
        """`address`: `http://host:port`, with or without the path `/run_code`."""
        parts = urlsplit(address)
        self._address, self._limits = address, limits
        try:
            self._secure, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        except ValueError as error:
            raise SandboxError(f"{address}: {error}") from None
        self._path = parts.path.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._closing = Event()
        self._sockets: set[socket.socket] = set()

    def start(self) -> None:
        outcome = self.run("print('isotrain')")
        if not outcome.succeeded or outcome.stdout != "isotrain\n":
            reason = outcome.stderr.strip()[-300:] or outcome.stdout[:300] or f"it ended by {outcome.ended}"
            raise SandboxError(f"{self._address} did not run a program of one line: {reason}")

    def run(self, program: str, stdin: str = "", seconds: float | None = None) -> ProgramOutcome:
        most = self._limits.seconds if seconds is None else min(seconds, self._limits.seconds)
        request = {
            "code": program,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": most,
            "run_timeout": most,
            "memory_limit_MB": math.ceil(self._limits.memory / MIB),
            "files": {},
            "fetch_files": [],
        }
        body = json.dumps(request).encode()
        for attempt in range(1, ATTEMPTS + 1):
            if self._closing.is_set():
                raise SandboxError("the sandbox is closed")
            try:
                return self._outcome(self._post(body, most + SLACK))
            except _Busy as busy:
                if attempt == ATTEMPTS:
                    raise SandboxError(
                        f"{self._address} failed {ATTEMPTS} times: {busy}; is the server running, and has it "
                        "enough workers?"
                    ) from None
                self._closing.wait(PAUSE * attempt)
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        self._closing.set()
        for connected in tuple(self._sockets):
            _cut_off(connected)

    def _post(self, body: bytes, seconds: float) -> Any:
        """The reply; the time is that of the whole exchange, however slowly its bytes come."""
        deadline = time.monotonic() + seconds
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        with contextlib.closing(kind(self._host, self._port, timeout=seconds)) as connection:
            try:
                connection.connect()
                status, content = self._exchange(connection, body, deadline)
            except (OSError, http.client.HTTPException) as error:
                late = time.monotonic() >= deadline
                raise _Busy(
                    f"no reply within {seconds:g} s" if late else f"{type(error).__name__}: {error}"
                ) from None
        if time.monotonic() >= deadline:
            raise _Busy(f"no reply within {seconds:g} s")
        if status in BUSY:
            raise _Busy(f"HTTP status {status}")
        if status != 200:
            raise SandboxError(
                f"{self._address} replied with HTTP status {status}; is it the address of a SandboxFusion "
                "server?"
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise SandboxError(f"{self._address} did not reply with JSON") from None

    def _exchange(
        self, connection: http.client.HTTPConnection, body: bytes, deadline: float
    ) -> tuple[int, bytes]:
        # A socket's own timeout begins again with each byte, and the connection may let go of its socket.
        connected = connection.sock
        timer = Timer(max(0.0, deadline - time.monotonic()), _cut_off, (connected,))
        timer.daemon = True
        timer.start()
        self._sockets.add(connected)
        try:
            headers = {"Content-Type": "application/json", "Accept": "application/json"}
            connection.request("POST", self._path, body, headers)
            reply = connection.getresponse()
            most = 2 * 6 * self._limits.output + _ENVELOPE
            content = reply.read(most + 1)
        finally:
            self._sockets.discard(connected)
            timer.cancel()
        if len(content) > most:
            raise SandboxError(f"{self._address} sent a reply of more than {most} bytes")
        return reply.status, content

    def _outcome(self, reply: Any) -> ProgramOutcome:
        """By the server's words: `status` is about the sandbox, `run_result` about the program."""
        reply = reply if isinstance(reply, dict) else {}
        status, result = reply.get("status"), reply.get("run_result")
        if status not in ("Success", "Failed") or not isinstance(result, dict):
            reason = str(reply.get("message") or f"status {status!r}")
            raise SandboxError(f"{self._address} could not run the program: {one_line(reason)}")
        most = self._limits.output
        stdout, stderr = (_text(result.get(name)) for name in ("stdout", "stderr"))
        seconds = result.get("execution_time")
        seconds = float(seconds) if isinstance(seconds, (int, float)) else 0.0
        kept = stdout[:most], stderr[:most], seconds
        if result.get("status") == "TimeLimitExceeded":
            return ProgramOutcome("time", None, *kept)
        if result.get("status") != "Finished":
            raise SandboxError(
                f"{self._address} could not run the program: {one_line(stderr or str(result))}"
            )
        if max(len(stdout.encode("utf-8", "replace")), len(stderr.encode("utf-8", "replace"))) > most:
            return ProgramOutcome("output", None, *kept)
        code = result.get("return_code")
        if not isinstance(code, int):  # how it ended is not known, and must not count as a wrong program
            raise SandboxError(f"{self._address} sent no return code: {one_line(str(result))}")
        return ProgramOutcome("memory" if ended_by_memory(code, stderr) else "exit", code, *kept)


def _cut_off(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
