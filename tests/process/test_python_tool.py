"""The tool `python` of agents: short replies, whatever a program does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isotrain.errors import SandboxError
from isotrain.process.sandbox import Limits, PythonTool
from isotrain.process.supervise import MIB
from sandboxes import bubblewrap, fusion_server

LIMITS = Limits(seconds=3.0, memory=256 * MIB, output=100_000)


@pytest.fixture
def tool() -> Iterator[PythonTool]:
    with bubblewrap(LIMITS):
        one = PythonTool(limits=LIMITS, longest=400)
        one.start()
        yield one
        one.close()


def test_what_a_program_prints(tool: PythonTool) -> None:
    assert tool.run("print(6 * 7)\nprint()") == "42"
    assert tool.run("x = 1") == ""
    assert tool.run("print(x)").endswith("NameError: name 'x' is not defined\n[exit code 1]")
    both = tool.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(2)")
    assert both == "out\nerr\n[exit code 2]"


def test_limits_are_told_to_the_model(tool: PythonTool) -> None:
    assert tool.run("print(1, flush=True)\nwhile True: pass") == "1\n[killed after 3 s]"
    assert tool.run("b'x' * 2**30").endswith("[out of memory: 256 MiB]")
    assert tool.run("print('x' * 10**6)").endswith("[killed after 100000 bytes of output]")


def test_replies_are_short(tool: PythonTool) -> None:
    reply = tool.run("print('a' * 5000 + 'b' * 5000)")
    assert reply == "a" * 100 + "\n[... 9800 characters left out ...]\n" + "b" * 100


def test_the_same_tool_over_http() -> None:
    with bubblewrap(LIMITS) as inner, fusion_server(inner) as server:
        tool = PythonTool(server.address, LIMITS)
        tool.start()
        assert tool.run("print(6 * 7)") == "42"
        tool.close()


def test_a_sandbox_that_fails_is_no_reply(tool: PythonTool) -> None:
    tool.close()
    with pytest.raises(SandboxError, match="closed"):
        tool.run("print(1)")
