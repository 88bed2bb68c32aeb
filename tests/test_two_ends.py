"""Two processes that share test files run each test once, whichever of them is faster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from two_ends import pytest_addoption, pytest_runtestloop
import os, time, pytest

@pytest.fixture(scope="session", autouse=True)
def once():
    note("begin")
    yield
    note("end")

@pytest.fixture(scope="module")
def a_file(request):
    note("open " + request.path.stem)
    yield
    note("close " + request.path.stem)

def note(what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(what + "\\n")
"""
TESTS = """
from conftest import note
import os, time, pytest

@pytest.mark.parametrize("number", range(2))
def test_it(a_file, request, number):
    time.sleep(float(os.environ["PAUSE"]))
    note(f"{request.path.parent.name}/{request.path.stem} {number}")
    assert os.environ.get("FAILS") != request.path.stem
"""
FILES = [f"{folder}/test_{folder}{number}" for folder in ("a", "b", "c") for number in range(3)]


def share(where: Path, end: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "NOTES": str(where / end), "PAUSE": "0.01", **variables}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--front", "b", *options]
    command += ["--claims", str(where / "claims"), "--end", end]
    return subprocess.Popen(command, cwd=where, env=environment, stdout=subprocess.DEVNULL)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / f"{file}.py").write_text(TESTS)
    return tmp_path


def test_both_run_all_tests_once_from_both_ends(where: Path) -> None:
    both = [share(where, "front", PAUSE="0.2"), share(where, "back")]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    notes = {end: (where / end).read_text().splitlines() for end in ("front", "back")}
    ran = {end: [note for note in notes[end] if "/" in note] for end in notes}
    assert sorted(ran["front"] + ran["back"]) == sorted(f"{file} {i}" for file in FILES for i in range(2))
    assert ran["front"][0] == "b/test_b0 0" and ran["back"][0] == "c/test_c2 0"
    # Fixtures of a file end with it, those of the session at the end.
    for own in notes.values():
        assert (own[0], own[-1], own.count("begin"), own.count("end")) == ("begin", "end", 1, 1)
        for i, note in enumerate(own):
            if note.startswith("open "):
                assert own[i + 3] == note.replace("open", "close")


def test_a_failure_is_told_and_what_the_other_has_is_left_alone(where: Path) -> None:
    assert share(where, "front", "-x", FAILS="test_b1").wait(timeout=60) == 1
    assert share(where, "back").wait(timeout=60) == 0
    ran = [
        note for end in ("front", "back") for note in (where / end).read_text().splitlines() if "/" in note
    ]
    # The last of the claimed file is lost with the process that failed, which is why its result is an error.
    assert sorted(ran) == sorted({f"{file} {i}" for file in FILES for i in range(2)} - {"b/test_b1 1"})
