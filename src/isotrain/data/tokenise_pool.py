"""Processes that encode chunks of rows; each ends when nobody writes to it any more."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from isotrain.data.rows import Row
from isotrain.errors import LaunchError


class Pool:
    """A thread for each process. `multiprocessing` is not used: it would run the user's script again."""

    def __init__(self, encoder: Any, processes: int) -> None:
        self._encoder = pickle.dumps(encoder)
        self._threads = ThreadPoolExecutor(processes)
        self._own = threading.local()
        self._children: list[subprocess.Popen[bytes]] = []

    def submit(self, rows: list[Row], path: Path) -> Future[None]:
        """Have a chunk encoded into a file."""
        return self._threads.submit(self._encode, rows, path)

    def _encode(self, rows: list[Row], path: Path) -> None:
        child: subprocess.Popen[bytes] | None = getattr(self._own, "child", None)
        try:
            if child is None:
                command = [sys.executable, "-m", "isotrain.data.tokenise_pool"]
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._own.child = child
                self._children.append(child)
                assert child.stdin
                child.stdin.write(self._encoder)
            assert child.stdin and child.stdout
            pickle.dump((rows, path), child.stdin)
            child.stdin.flush()
            error = pickle.load(child.stdout)
        except (EOFError, BrokenPipeError) as lost:
            code = child.wait() if child else None
            raise LaunchError(
                f"a process that tokenises ended with exit code {code} (out of memory?); start again: what "
                "is finished is kept"
            ) from lost
        if error is not None:
            raise error

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.kill()
        self._threads.shutdown()
        for child in self._children:
            child.communicate()


def main() -> None:
    from isotrain.data.tokenise import encode_chunk

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the builder ends its processes
    responses = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be read as a response
    requests = sys.stdin.buffer
    encoder = pickle.load(requests)
    while True:
        try:
            rows, path = pickle.load(requests)
        except EOFError:
            return
        failure = None
        try:
            encode_chunk(encoder, rows, path)
        except Exception as error:
            failure = error
        pickle.dump(failure, responses)
        responses.flush()


if __name__ == "__main__":
    main()
