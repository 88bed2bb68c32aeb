"""What tests of several rooms share: devices, a tiny model, and where shared data is."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import npusim
import pytest

from two_ends import pytest_addoption, pytest_runtestloop  # noqa: F401

# Images of containers set it, and each of the hundreds of processes here would compile torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Before transformers is imported anywhere: it looks for the device once.
npusim.load()

from isotrain.data.prepare.tiny import make_tiny  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What tests read is English, whatever the locale of the machine.
os.environ["ISOTRAIN_LANG"] = "en"
# Shells start what runs in the background without it, and tests send it to processes of their own.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks that can be read off a test: what it is given, and what it calls by name."""
    if not isinstance(item, pytest.Function):
        return
    called = set(item.function.__code__.co_names)
    given = item.callspec.params if hasattr(item, "callspec") else {}
    # `outcome` is that of jobs on one rank and on two.
    if given.get("ranks") == 2 or "outcome" in item.fixturenames or "run_ranks" in called:
        item.add_marker(pytest.mark.ranks)
    # A process that imports everything, or a whole run.
    if called & {"run_cli", "launch", "train_supervised"}:
        item.add_marker(pytest.mark.heavy)


@pytest.fixture(params=["cpu", "npu"])
def device_type(request: pytest.FixtureRequest) -> str:
    """Every test that trains runs on the host and on the simulated accelerator."""
    return str(request.param)


@pytest.fixture(autouse=True)
def signals_left_alone() -> Iterator[None]:
    """A test that leaves Ctrl-C ignored or blocked fails: processes of later tests would inherit that."""
    yield
    left = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if left != (signal.default_int_handler, set()):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        pytest.fail(f"signals are left as {left}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token stores of tests do not reach the user's cache."""
    path = tmp_path_factory.mktemp("cache")
    os.environ["ISOTRAIN_CACHE"] = str(path)
    return path


@pytest.fixture(scope="session", autouse=True)
def drawing() -> Iterator[Callable[..., None] | None]:
    """Runs in this process leave out their plots, which take longer than the steps of most; see `plots`.

    Yields what draws them, if a test has imported it.
    """
    job: Any = sys.modules.get("isotrain.trainers.job")
    if job is None:
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        draw = job.draw_plots
        patch.setattr(job, "draw_plots", lambda *arguments: None)
        yield draw


@pytest.fixture
def plots(drawing: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for this looks at the plots of its runs."""
    monkeypatch.setattr("isotrain.trainers.job.draw_plots", drawing)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model with its tokenizer and toy conversations, as `isotrain prepare tiny` makes it."""
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, train_rows=400, validation_rows=40)
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of shared data sets, named by ISOTRAIN_SHARED or beside the repository."""
    root = Path(os.environ.get("ISOTRAIN_SHARED") or Path(__file__).parents[1].parent / "shared") / "data"
    if not root.is_dir():
        pytest.skip(f"no shared data at {root}; set ISOTRAIN_SHARED to the directory that holds data/")
    return root
