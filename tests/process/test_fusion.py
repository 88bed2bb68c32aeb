"""SandboxFusion's protocol against a server on loopback that runs programs in bubblewrap."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from isotrain.errors import SandboxError
from isotrain.process import fusion
from isotrain.process.bubblewrap import Bubblewrap
from isotrain.process.fusion import SandboxFusion
from isotrain.process.sandbox import Limits, build_sandbox
from isotrain.process.supervise import MIB
from sandboxes import FusionServer, bubblewrap, fusion_server

LIMITS = Limits(seconds=3.0, memory=256 * MIB, output=10_000)


@pytest.fixture
def server() -> Iterator[FusionServer]:
    """One that knows no program: its replies are given."""
    with fusion_server(None) as one:
        yield one


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "PAUSE", 0.05)
    monkeypatch.setattr(fusion, "SLACK", 0.5)


def reply(**changes: object) -> tuple[int, bytes]:
    result = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": "", "execution_time": 0.1}
    result.update({name: value for name, value in changes.items() if name in result})
    whole = {"status": "Success", "message": "", "run_result": result}
    whole.update({name[4:]: value for name, value in changes.items() if name.startswith("top_")})
    return 200, json.dumps(whole).encode()


def test_runs_programs_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "SLACK", 20.0)
    with bubblewrap(Limits(seconds=10.0, memory=LIMITS.memory)) as inner, fusion_server(inner) as server:
        sandbox = build_sandbox(server.address, LIMITS)
        assert isinstance(sandbox, SandboxFusion)
        sandbox.start()
        right = sandbox.run("print(input() * 2)", "ab\n")
        assert (right.ended, right.exit_code, right.stdout) == ("exit", 0, "abab\n") and right.succeeded
        wrong = sandbox.run("import sys; sys.exit('no')")
        assert (wrong.ended, wrong.exit_code, wrong.stderr) == ("exit", 1, "no\n")
        late = sandbox.run("import time; time.sleep(60)", seconds=1.0)
        assert (late.ended, late.exit_code) == ("time", None)
        assert sandbox.run("b'x' * 2**30").ended == "memory"
        long = sandbox.run("print('x' * 20_000)")
        assert long.ended == "output" and len(long.stdout) == LIMITS.output
    paths, requests = zip(*server.requests, strict=True)
    assert set(paths) == {"/run_code"}
    assert requests[1] == {
        **{
            "code": "print(input() * 2)",
            "stdin": "ab\n",
            "language": "python",
            "files": {},
            "fetch_files": [],
        },
        **{"compile_timeout": 3.0, "run_timeout": 3.0, "memory_limit_MB": 256},
    }
    assert requests[3]["run_timeout"] == 1.0


@pytest.mark.parametrize("path", ["", "/", "/run_code", "/run_code/"])
def test_addresses_with_and_without_the_path(server: FusionServer, path: str) -> None:
    server.replies = [reply(stdout="isotrain\n")]
    SandboxFusion(server.address + path, LIMITS).start()
    assert [path for path, _ in server.requests] == ["/run_code"]


def test_a_busy_server_is_asked_again_but_not_for_ever(server: FusionServer) -> None:
    sandbox = SandboxFusion(server.address, LIMITS)
    server.replies = [(504, b""), (429, b""), reply(stdout="at last")]
    assert sandbox.run("").stdout == "at last"
    server.replies = [(503, b"")] * 9
    with pytest.raises(
        SandboxError, match=rf"{server.address} failed 3 times: HTTP status 503; is the server"
    ):
        sandbox.run("")
    assert len(server.replies) == 6


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((404, b""), "HTTP status 404; is it the address of a SandboxFusion server"),
        ((500, b""), "HTTP status 500"),
        ((302, b""), "HTTP status 302"),
        ((200, b"<html>"), "did not reply with JSON"),
        ((200, b"[" * 100_000), "did not reply with JSON"),
        ((200, b"[]"), "could not run the program: status None"),
        (reply(top_status="SandboxError", top_message="no \x1b[31mworker\n"), r"program: no \[31mworker$"),
        (reply(top_run_result=None), "could not run the program"),
        (reply(return_code=None), "sent no return code"),
        (reply(return_code="x"), "sent no return code"),
        (reply(status="Error", stderr="docker is gone"), "could not run the program: docker is gone"),
        ((200, b" " * 400_000), "more than 185536 bytes"),
    ],
)
def test_a_broken_server_is_named_at_once(server: FusionServer, given: tuple[int, bytes], told: str) -> None:
    server.replies = [given, reply()]
    with pytest.raises(SandboxError, match=told):
        SandboxFusion(server.address, LIMITS).run("print(1)")
    assert len(server.requests) == 1


def test_odd_values_of_a_reply_are_no_crash(server: FusionServer) -> None:
    server.replies = [reply(stdout=None, stderr=7, return_code=3, execution_time="y", top_status="Failed")]
    outcome = SandboxFusion(server.address, LIMITS).run("")
    assert (outcome.stdout, outcome.stderr, outcome.exit_code, outcome.seconds) == ("", "", 3, 0.0)
    assert not outcome.succeeded


def test_says_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(SandboxError, match=rf"127\.0\.0\.1:{port} failed 3 times: ConnectionRefusedError"):
        SandboxFusion(f"http://127.0.0.1:{port}", LIMITS).start()


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"]
)
def test_a_server_that_hangs_or_drips_times_out(sent: bytes) -> None:
    """The time is that of the whole exchange: a byte now and then does not extend it."""
    stop = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    def drip(connection: socket.socket) -> None:
        with connection:
            try:
                connection.sendall(sent)
                while not stop.wait(0.1):
                    connection.sendall(b" " if sent else b"")
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        begun = time.monotonic()
        try:
            with pytest.raises(SandboxError, match=r"failed 3 times: no reply within 0\.7 s"):
                SandboxFusion(f"http://127.0.0.1:{listener.getsockname()[1]}", LIMITS).run("", seconds=0.2)
        finally:
            stop.set()
            thread.join()
    assert time.monotonic() - begun < 3 * 0.7 + 10


def test_close_ends_what_waits_for_a_reply() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        sandbox = SandboxFusion(f"http://127.0.0.1:{listener.getsockname()[1]}", Limits(seconds=600.0))
        waiting = threads.submit(sandbox.run, "")
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            sandbox.close()
            with pytest.raises(SandboxError, match="closed"):
                waiting.result(timeout=30)


def test_a_port_that_is_none() -> None:
    with pytest.raises(SandboxError, match="http://host:99999: Port out of range"):
        SandboxFusion("http://host:99999", LIMITS)


def test_the_default_is_bubblewrap() -> None:
    assert isinstance(build_sandbox("bubblewrap", LIMITS), Bubblewrap)
