"""What tests of reward processes share: a file with functions that misbehave on request, and who is alive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

FUNCTIONS = """
import asyncio, ctypes, os, signal, subprocess, sys, time

def meeting(where):
    # "3 DIR": yields until 3 calls have come to DIR, and fails if it takes too long.
    count, directory = where.split(" ", 1)
    number = len(os.listdir(directory))
    while True:
        try:
            os.close(os.open(os.path.join(directory, str(number)), os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            number += 1
    end = time.monotonic() + 60
    while len(os.listdir(directory)) < (number // int(count) + 1) * int(count):
        assert time.monotonic() < end, "nobody else came"
        yield True
    yield False

def misbehave(response):
    kind, _, rest = response.partition(" ")
    if kind == "sleep":
        time.sleep(1000)
    if kind == "meet":
        meet = meeting(rest)
        while next(meet):
            time.sleep(0.01)
    if kind == "busy":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if kind == "exit":
        os._exit(3)
    if kind == "sys.exit":
        sys.exit(4)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "raise":
        raise ValueError("no such thing " + rest)
    if kind == "print":
        print('{"id": 0, "score": 1.0, "parts": {}}', flush=True)
        os.write(1, b"garbage without end")
        sys.stdin.read()
    if kind == "close":
        os.closerange(3, 10_000)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "subprocess":
        pid = subprocess.Popen(["sleep", "1000"]).pid
        with open(rest, "w") as file:
            file.write(str(pid))
        time.sleep(1000)
    if kind == "session":
        pid = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
        with open(rest, "w") as file:
            file.write(str(pid))
    if kind == "session-exit":
        misbehave("session " + rest)
        os._exit(3)
    if kind == "noise":
        os.write(int(sys.argv[1]), b"not json\\n")  # the socket, whatever its number is here
    if kind == "huge":
        os.write(int(sys.argv[1]), b'{"id": 1, "score": 1' + b"0" * 400 + b', "parts": {}}\\n')
    if kind == "endless":
        os.write(int(sys.argv[1]), b"x" * (2 << 20))
    if kind == "deep":
        os.write(int(sys.argv[1]), b"[" * 200_000 + b"\\n")
    return {"nan": float("nan"), "inf": float("inf"), "text": "x" * 10_000_000, "none": None, "true": True,
            "list": [1.0], "big": 10 ** 400, "pid": os.getpid(),
            "dict": {"score": 0.5, "length": 3, "pred": "7", "bad": float("nan")},
            "no-score": {"reward": 1.0}}.get(kind, 1.0)

def score(response, answer):
    return misbehave(response)

async def score_async(response, answer):
    kind, _, rest = response.partition(" ")
    if kind == "meet":
        meet = meeting(rest)
        while next(meet):
            await asyncio.sleep(0.01)
        return 1.0
    if kind == "await":
        await asyncio.sleep(float(rest))
        return 1.0
    if kind == "block":
        time.sleep(float(rest))
        return 1.0
    if kind == "thread":
        await asyncio.to_thread(time.sleep, float(rest))
        return 1.0
    if kind == "command":
        process = await asyncio.create_subprocess_exec("sleep", "1000")
        with open(rest, "w") as file:
            file.write(str(process.pid))
        await process.wait()
    if kind == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    return misbehave(response)

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs
    right = solution_str == ground_truth
    return {"score": float(right), "acc": data_source == "gsm8k", "index": extra_info["index"]}

def everything(response, answer, row, weight=2.0):
    return weight * (len(response) + answer + row["n"])

def unknown(response, prompt):
    return 0.0

def nothing(**kwargs):
    return 0.0

number = 3
"""


def write_functions(directory: Path) -> Path:
    path = directory / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def group_of(pid: int) -> list[int]:
    """All processes that run in a process group."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and alive(int(entry)):
            try:
                if os.getpgid(int(entry)) == pid:
                    found.append(int(entry))
            except ProcessLookupError:
                pass
    return found
