"""Environments in their own processes: what they do to themselves costs one episode, and no more."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from isotrain.environments.processes import EnvironmentProcesses, EpisodeFailed
from isotrain.errors import EpisodeError

SOURCE = '''
import os, random, subprocess, sys, time

IMPORTED = random.random()

class Room:
    def reset(self, **row):
        self.row = row
        return f"{IMPORTED} {random.random()}"

    def say(self, text: str) -> str:
        """Says something.

        Args:
            text: What to say.
        """
        return text + self.row.get("mark", "")

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        import asyncio
        await asyncio.sleep(seconds)
        return "awake"

    def do(self, what: str) -> str:
        """Does harm.

        Args:
            what: Which.
        """
        if what == "hang":
            time.sleep(600)
        if what == "crash":
            os._exit(3)
        if what == "signal":
            os.kill(os.getpid(), 11)
        if what == "exit":
            sys.exit("enough")
        if what == "memory":
            return "x" * (1 << 30)
        if what == "flood":
            for _ in range(200):
                print("y" * (1 << 16))
            return "printed"
        if what == "raise":
            raise ValueError("no such thing")
        if what == "children":
            subprocess.Popen(["sleep", "600"])
            return str(os.getpid())
        if what == "bomb":
            while True:
                if os.fork() == 0:
                    time.sleep(600)
        return "done"

    def get_reward(self) -> float:
        return 0.5
'''


@contextmanager
def environments(tmp_path: Path, source: str = SOURCE, **options: Any) -> Iterator[EnvironmentProcesses]:
    path = tmp_path / "room.py"
    path.write_text(source)
    settings = {"time_limit": 20.0, "start_timeout": 60.0, **options}
    found = EnvironmentProcesses(
        {"section": "environment", "path": f"{path}:Room", "source": source}, **settings
    )
    try:
        found.start()
        yield found
    finally:
        found.close()


def call(processes: EnvironmentProcesses, *whats: str) -> list[Any]:
    """What comes of harm in an episode each, all at the same time, and of an episode beside them."""

    async def one(what: str) -> Any:
        process = await processes.open()
        try:
            await process.ask("reset", row={"mark": "!"}, seed=1)
            name, value = ("do", {"what": what}) if what != "say" else ("say", {"text": "hello"})
            return (await process.ask("call", name=name, arguments=value)).get("result")
        except EpisodeFailed as failed:
            return failed
        finally:
            processes.end(process)

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*map(one, whats)))

    return asyncio.run(all_of_them())


def test_tools_rewards_and_errors_as_the_policy_sees_them(tmp_path: Path) -> None:
    async def play(processes: EnvironmentProcesses) -> list[Any]:
        process = await processes.open()
        await process.ask("reset", row={}, seed=1)
        found = [
            await process.ask("call", name="say", arguments={"text": "ü\n"}),
            await process.ask("call", name="wait", arguments={"seconds": 0.01}),
            await process.ask("call", name="say", arguments={}),
            await process.ask("call", name="reset", arguments={}),
            await process.ask("call", name="do", arguments={"what": "raise"}),
            await process.ask("call", name="say", arguments={"text": "half \ud83d"}),
            await process.ask("reward"),
        ]
        processes.end(process)
        return found

    with environments(tmp_path) as processes:
        assert [tool["function"]["name"] for tool in processes.known["tools"]] == ["do", "say", "wait"]
        said, woke, wrong, hidden, raised, half, reward = asyncio.run(play(processes))
    assert said == {"result": "ü\n"} and woke == {"result": "awake"} and reward == {"reward": 0.5}
    assert "missing 1 required positional argument" in wrong["error"]
    assert half == {"result": "half ?"}  # no tokenizer would take a half of a surrogate pair
    assert hidden == {"error": "Tool reset not found."} and raised == {"error": "no such thing"}


def test_random_numbers_are_those_of_the_episode(tmp_path: Path) -> None:
    async def observe(processes: EnvironmentProcesses, seed: int) -> str:
        process = await processes.open()
        try:
            return str((await process.ask("reset", row={}, seed=seed))["observation"])
        finally:
            processes.end(process)

    async def several(processes: EnvironmentProcesses) -> list[str]:
        return [await observe(processes, seed) for seed in (1, 2, 1)]

    with environments(tmp_path) as processes:
        first, other, again = asyncio.run(several(processes))
    assert first == again != other
    assert first.split()[0] == other.split()[0]  # the file was imported once


def test_harm_costs_one_episode_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harm = ["crash", "signal", "memory", "flood", "say", "bomb", "exit"]
    marks = []
    with environments(tmp_path, time_limit=120.0) as processes:  # no limit for the others, however busy it is
        marks.append(processes._child.mark)  # type: ignore[union-attr]
        crash, signal, memory, flood, said, bomb, ended = call(processes, *harm)
        assert call(processes, "say") == ["hello!"]  # and others can begin
    with environments(tmp_path, time_limit=3.0) as impatient:
        marks.append(impatient._child.mark)  # type: ignore[union-attr]
        (hang,) = call(impatient, "hang")
    assert (hang.failure, hang.detail) == ("timeout", "no reply to 'call' after 3 s")
    assert (crash.failure, signal.failure) == ("crash", "crash")
    assert crash.detail == "its process ended during 'call'"
    assert memory is None  # told to the policy as an error
    assert (flood, said) == ("printed", "hello!")
    assert bomb.failure in ("crash", "timeout")
    assert (ended.failure, ended.detail) == ("error", "room.py:42: SystemExit: enough")
    assert len(capfd.readouterr().err) < 5000
    assert not any(map(_marked, marks))


def _marked(mark: str) -> list[str]:
    """Processes of environments that are still there."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def test_what_an_episode_started_ends_with_it(tmp_path: Path) -> None:
    with environments(tmp_path) as processes:
        (group,) = call(processes, "children")
        deadline = time.monotonic() + 10
        while _in_group(int(group)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _in_group(int(group))


def _in_group(group: int) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(pid)
    return found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Room\n", r"room.py:1: expected ':'"),
        ("import nothing_like_it\nclass Room: pass\n", "room.py:1: ModuleNotFoundError"),
        ("class Hall: pass\n", r"has no class Room; it has Hall"),
        ("class Room: pass\n", "Room has no method reset"),
        (
            "class Room:\n    def reset(self, **row): ...\n    def go(self, where): ...\n",
            r"room.py:3: Room.go cannot be a tool: ",
        ),
        ("class Room:\n    async def reset(self, states): ...\n", "but no method step"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(EpisodeError, match=message), environments(tmp_path, source):
        pass


def test_secrets_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SEARCH_API_KEY", "given")
    source = SOURCE.replace('return "done"', "return str([os.environ.get(k) for k in what.split()])")
    with environments(tmp_path, source, passed=["SEARCH_API_KEY"]) as processes:
        assert call(processes, "HF_TOKEN SEARCH_API_KEY") == ["[None, 'given']"]
