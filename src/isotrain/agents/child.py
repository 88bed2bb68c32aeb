"""The process that imports the user's file, and forks one process for each episode.

Its only argument is the number of a socket. The first line on it is the setup, `{section: "environment" or
"agent", path, source, command, verifiers, arguments, memory}`; the reply is `{ready: true, ...}` or
`{refused: why}`. Then, for each byte that comes with a descriptor, a process is forked that talks lines of
JSON on this descriptor, and its number is replied as a line.

In an episode a request is `{request: name, ...}`, and its reply `{...}` or `{raised: what}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
from typing import Any, BinaryIO, TextIO

from isotrain.agents.callers import load_function, load_program
from isotrain.agents.interfaces import Factory, load_environment
from isotrain.agents.verifiers_environments import load_rollouts
from isotrain.errors import IsotrainError
from isotrain.lifetime import die_with_parent
from isotrain.user_file import where

# Characters of one episode: enough to see a mistake, and little enough for a log.
LONGEST_OUTPUT = 1 << 12


def main(arguments: list[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    die_with_parent()
    with control.makefile("rb", buffering=0) as lines:
        setup = json.loads(_line(lines))
    if setup["memory"]:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    try:
        factory, known = _load(setup)
    except IsotrainError as error:
        _send(control, {"refused": str(error)[:4000]})
        return
    except Exception as error:  # the class is made once, to see its tools
        _send(control, {"refused": f"{where(error)}"[:4000]})
        return
    _send(control, {"ready": True, **known})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes of ended episodes need not be waited for
    while True:
        byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not byte or not descriptors:
            return
        control.sendall(f"{_fork(control, descriptors[0], factory)}\n".encode())
        os.close(descriptors[0])


def _load(setup: dict[str, Any]) -> tuple[Factory, dict[str, Any]]:
    if setup["section"] == "environment":
        return load_environment(setup["path"], setup["source"])
    if setup.get("command"):
        return load_program(setup["command"])
    if setup.get("verifiers"):
        return load_rollouts(setup["verifiers"], setup["arguments"])
    return load_function(setup["path"], setup["source"])


def _line(lines: Any) -> bytes:
    """Byte by byte: nothing behind the line may be read, because descriptors come with it."""
    found = bytearray()
    while (byte := lines.read(1)) not in (b"", b"\n"):
        found += byte
    return bytes(found)


def _fork(control: socket.socket, descriptor: int, factory: Factory) -> int:
    try:
        pid = os.fork()
    except OSError:
        return 0  # told as such: there is no room for another process
    if pid:
        return pid
    try:
        os.setsid()  # a group of its own, with which it is killed
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        _silence()
        with socket.socket(fileno=descriptor) as own, own.makefile("rb") as requests:
            own.set_inheritable(False)
            _serve(own, requests, factory)
    finally:
        os._exit(0)


def _silence() -> None:
    """What the user's code prints is shown up to a limit; what its own processes print is not."""
    shown = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = _Limited(shown)


class _Limited:
    """A stream that shows so many characters and drops the rest."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, LONGEST_OUTPUT

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._left > 0:
                self._stream.write(text[: self._left])
        self._left -= len(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return False


def _serve(own: socket.socket, requests: BinaryIO, factory: Factory) -> None:
    environment = None
    for line in requests:
        request = json.loads(line)
        if environment is None:
            _seed(request["seed"])
        try:
            environment = environment or factory()
            reply = environment.answer(request.pop("request"), request)
        except BaseException as error:
            reply = {"raised": where(error)[:1000]}
        _send(own, reply)


def _seed(seed: int) -> None:
    """Forked processes would all draw the same numbers, and in another run others."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """As text that all of isotrain can write: halves of surrogate pairs become question marks."""
    text = json.dumps(message, ensure_ascii=False)
    connection.sendall(text.encode("utf-8", "replace") + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
