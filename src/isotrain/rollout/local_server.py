"""A server program as a child process of this one, asked in JSON on a port that is known to be its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.errors import RolloutError
from isotrain.process.child import kill_group

_LISTENING = "0A"


def listens(port: int, group: int) -> bool | None:
    """Whether a process of this group listens on the port; None while nobody does.

    Loopback is open to every user of the host: one of them may have taken a port that was free a moment ago.
    """
    sockets = set(_listening_sockets(port))
    if not sockets:
        return None
    return any(sockets & _sockets(pid) for pid in _members(group))


def _listening_sockets(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):  # of a kernel without IPv6
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    yield f"socket:[{inode}]"


def _members(group: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(entry.name)) == group:
                    yield int(entry.name)


def _sockets(pid: int) -> set[str]:
    sockets = set()
    # It may end meanwhile; one of another user cannot be looked into, and is not ours.
    with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
    return sockets


# Runs in the interpreter of the server, which may not have this package. The kernel ends the server with the
# thread that started it; one whose parent died before it could ask for that ends itself. Modules of the
# working directory are not meant for it.
_BOOTSTRAP = """
import ctypes, os, runpy, signal, sys
parent, module = int(sys.argv[1]), sys.argv[2]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    os._exit(1)
del sys.argv[1:3]
sys.path[:] = [path for path in sys.path if path]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
# An engine prints a trace for each of its processes; the first of them is the cause.
LAST_WORDS = 12_000


class LocalServer:
    """In a session of its own: Ctrl-C is for its parent, which ends it in order."""

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._name, self._log = name, log
        command = [python, "-c", _BOOTSTRAP, str(os.getpid()), module, *arguments]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=dict(environment),
                )
        except OSError as error:
            raise RolloutError(f"{name}: cannot start its server: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return not self._has_ended()

    def listens(self, port: int) -> bool:
        """Whether it listens yet; raises where another process does."""
        ours = listens(port, self._process.pid)
        if ours is False:
            raise RolloutError(f"{self._name}: another process listens on port {port}; start again")
        return ours is True

    def ended(self, patience: float = 0.0) -> str | None:
        """How it ended and its last output; None while it runs."""
        deadline = time.monotonic() + patience
        while not self._has_ended():
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        self.kill()  # what it started, and left
        code = self._process.returncode
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        words = self._log.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip()
        return f"its server ended {how}" + (f"; the end of its log:\n{words}" if words else "")

    def kill(self) -> None:
        """End it and all that it started: it has nothing to save."""
        if self._process.returncode is None:
            # The group keeps its number until its leader is waited for.
            kill_group(self._process.pid)
            self._process.wait()

    def _has_ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has just waited for it
            return True


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


HOST = "127.0.0.1"
LONGEST_COMPLAINT = 1000


class NoReply(RolloutError):
    """The server did not reply: what became of the request is unknown."""


class Exchange:
    """A connection for each request: one that broke leaves nothing behind for the next."""

    def __init__(self, engine: str, server: LocalServer, port: int, key: str) -> None:
        self._engine, self._server, self._port, self._key = engine, server, port, key

    def get(self, path: str, timeout: float | None) -> Any:
        return _json(self._engine, path, self._request("GET", path, None, timeout))

    def post(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        return _json(self._engine, path, self._request("POST", path, body, timeout))

    def tell(self, path: str, timeout: float | None) -> None:
        """Raises where it is refused; the reply may have any form."""
        self._request("POST", path, {}, timeout)

    def _request(self, method: str, path: str, content: Any, timeout: float | None) -> bytes:
        """`timeout` is for a silent server."""
        body = None if content is None else json.dumps(content, allow_nan=False).encode()
        if not self._server.runs:  # and so whoever listens there now is not to have the key
            raise NoReply(f"{self._engine}: no reply to {path} (its server has ended)")
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
        return text


def _json(engine: str, path: str, text: bytes) -> Any:
    """None where the reply is empty."""
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise RolloutError(f"{engine}: the reply to {path} is not JSON: {error}") from error


def _complaint(text: bytes) -> str:
    """The message of a refusal, whichever of the usual forms it has."""
    said: Any = text.decode(errors="replace").strip()
    try:
        reply = json.loads(text)
    except ValueError:
        reply = None
    if isinstance(reply, dict):
        inner = reply.get("error")
        said = inner.get("message", said) if isinstance(inner, dict) else reply.get("message", said)
    return str(said)[:LONGEST_COMPLAINT] or "no reason given"
