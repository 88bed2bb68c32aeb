"""Models and data sets by name: from the Hugging Face Hub, or from ModelScope where ISOTRAIN_HUB says so."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from isotrain.errors import RecipeError, install, one_line
from isotrain.files import parse_json, read_regular
from isotrain.terminal import beneath

VARIABLE = "ISOTRAIN_HUB"
MODELSCOPE = "modelscope"
TITLES = {"huggingface": "the Hugging Face Hub", MODELSCOPE: "ModelScope"}
# Where names lead: workers on other machines must have the same.
VARIABLES = (VARIABLE, "HF_ENDPOINT", "MODELSCOPE_ENDPOINT")

# Never pickled weights.
MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")

_LARGEST_RECORD = 64 << 20
# Errors of the clients, by name: a name that the hub does not have, or shows to others only.
_NOT_THERE = {
    *("RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "DatasetNotFoundError"),
    *(
        "HFValidationError",
        "NotExistError",
        "AuthenticationError",
        "PermissionDeniedError",
        "InvalidParameter",
    ),
}


class HubError(Exception):
    """Why a hub gave nothing and what to do, for the end of a sentence."""


def chosen() -> str:
    """The hub that names are looked up on."""
    hub = os.environ.get(VARIABLE) or "huggingface"
    if hub not in TITLES:
        raise RecipeError(f"{VARIABLE}={hub}: write {' or '.join(TITLES)}")
    return hub


def settings() -> dict[str, str]:
    """The variables that another machine needs to find the same under a name."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def download(name: str, kind: str = "model", files: Sequence[str] = MODEL_FILES) -> Path:
    """The directory with the files of a repository that match one of the patterns.

    `name@revision` is a commit, tag or branch. Of the processes of a machine one downloads, the others wait.
    """
    hub = chosen()
    repository, _, revision = name.partition("@")
    take = _from_modelscope if hub == MODELSCOPE else _from_huggingface
    try:
        return take(repository, kind, revision or None, list(files))
    except Exception as error:  # the clients raise many kinds; all mean the same to the user
        raise HubError(explain(error)) from error


def explain(error: Exception) -> str:
    """What went wrong on the chosen hub, and what to do."""
    if isinstance(error, HubError):
        return str(error)
    hub = chosen()
    if is_offline():
        advice = "HF_HUB_OFFLINE is set: unset it, or write a local directory"
    elif isinstance(error, ImportError):
        advice = install("modelscope" if hub == MODELSCOPE else "train")
    elif type(error).__name__ in _NOT_THERE:
        token = "MODELSCOPE_API_TOKEN" if hub == MODELSCOPE else "HF_TOKEN"
        advice = f"check the name, or set {token} if it is private"
        if hub == MODELSCOPE:
            advice += "; some names differ from those of the Hugging Face Hub"
    elif hub == MODELSCOPE:
        advice = f"check the network, or unset {VARIABLE} to ask the Hugging Face Hub"
    else:
        advice = f"if the Hub is blocked here, set HF_ENDPOINT to a mirror or {VARIABLE}={MODELSCOPE}"
    reason = one_line(str(error)) or type(error).__name__
    return f"on {TITLES[hub]} ({reason}); {advice}"


def commit(name: str, directory: Path) -> str | None:
    """What tells the files that `download` gave from those of another day: on the Hugging Face Hub a commit.

    ModelScope names none: there it is a digest of its file list. None for files that another program fetched.
    """
    if chosen() != MODELSCOPE:
        # The Hub's client keeps each commit in a directory of that name.
        return directory.name
    repository, _, revision = name.partition("@")
    files = _read_record(_record_path(repository, "model", revision or None))["files"]
    listed = sorted((path, *facts) for path, facts in files.items() if _matches(path, MODEL_FILES))
    return f"{MODELSCOPE}:{hashlib.sha256(repr(listed).encode()).hexdigest()[:40]}" if listed else None


def hub_of(commit: str) -> str:
    """The hub that has such commits."""
    return MODELSCOPE if commit.startswith(f"{MODELSCOPE}:") else "huggingface"


def cached_file(name: str, file: str) -> Path | None:
    """A model's file that is on this machine already; the network is never asked."""
    repository, _, revision = name.partition("@")
    with contextlib.suppress(Exception):  # not there, not installed, or not a name: all the same here
        if chosen() == MODELSCOPE:
            from modelscope_hub import HubApi

            where: dict[str, Any] = {"revision": revision or "master", "local_files_only": True}
            return Path(HubApi().download_file(repository, "model", file, **where))
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(repository, file, revision=revision or None)
        return Path(cached) if isinstance(cached, str) else None
    return None


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextlib.contextmanager
def _alone(lock: Path, name: str) -> Iterator[None]:
    """One process of a machine at a time; the system frees the lock however it ends.

    Where no lock can be made, as in a cache that is only read, nothing can be written either.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError:
        yield
        return
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            _wait_for(file, name)
        yield


def _wait_for(file: BinaryIO, name: str) -> None:
    """Take the lock, and say so where that takes longer than to look at what is there."""
    for _ in range(20):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
    print(f"{name}: waiting for another process that downloads it", file=sys.stderr)
    fcntl.flock(file, fcntl.LOCK_EX)


def _key(*parts: str) -> str:
    return "isotrain-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _from_huggingface(repository: str, kind: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Bars(tqdm):
        """Several at a time, which move the cursor; their texts are the client's own."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"file": beneath(sys.stderr), **options})  # type: ignore[no-untyped-call]

    lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"{_key(kind, repository)}.lock"
    with contextlib.nullcontext() if is_offline() else _alone(lock, repository):
        # By itself the Hub's client 1.x asks the network about a commit, even offline.
        return Path(
            snapshot_download(
                repository,
                repo_type=kind,
                revision=revision,
                allow_patterns=patterns,
                local_files_only=is_offline(),
                tqdm_class=Bars,
            )
        )


def _from_modelscope(repository: str, kind: str, revision: str | None, patterns: list[str]) -> Path:
    """From ModelScope's cache, or into it.

    Its client reads all of a cached file again to check it, in each process. So a record in the cache says
    which files were checked, and which a repository has: then an interrupted download is known offline too.
    """
    os.environ.setdefault("MODELSCOPE_LOG_LEVEL", "WARNING")
    from modelscope_hub import HubApi
    from modelscope_hub.errors import CacheNotFound, NetworkError

    api, record_path = HubApi(), _record_path(repository, kind, revision)
    where: dict[str, Any] = {"repo_type": kind, "revision": revision or "master"}
    with contextlib.nullcontext() if is_offline() else _alone(record_path.with_suffix(".lock"), repository):
        try:
            cached: Path | None = Path(api.download_repo(repository, **where, local_files_only=True))
        except CacheNotFound:
            cached = None
        record = _read_record(record_path)
        known = bool(record["files"])
        error: Exception | None = None
        if not is_offline():
            try:
                entries = api.list_repo_files(repository, **where)
                listed = {entry.path: [entry.size, entry.sha256] for entry in entries if not entry.is_dir}
                record = {"files": listed, "checked": _unchanged(record, listed, cached)}
            except NetworkError as unreachable:
                error = unreachable
        wanted = [path for path in record["files"] if _matches(path, patterns)]
        missing = [path for path in wanted if path not in _unchanged(record, record["files"], cached)]
        if is_offline() or error:
            if cached is None or missing or (revision and not known and cached.name != revision):
                raise error or FileNotFoundError(
                    f"{missing[0]} was not downloaded" if cached and missing else "it was not downloaded"
                )
            return cached
        if not wanted:
            raise FileNotFoundError(f"it has no {' or '.join(patterns)}")
        for path in wanted:  # a stranger's names: the client joins them to its directory, and shows them
            if path.startswith("/") or ".." in PurePosixPath(path).parts or not path.isprintable():
                raise ValueError(f"it has a file with a forbidden name: {path!r}")
        if missing:
            _write_record(record_path, record)
            facts = [(path, *record["files"][path]) for path in missing]
            files = [{"Path": path, "Size": size, "Sha256": sha256} for path, size, sha256 in facts]
            with contextlib.redirect_stderr(beneath(sys.stderr)):
                cached = Path(api.download_repo(repository, **where, file_list=files))
            record["checked"] |= {path: (cached / path).stat().st_mtime_ns for path in missing}
            _write_record(record_path, record)
        assert cached is not None
        return cached


def _unchanged(
    record: dict[str, Any], listed: dict[str, list[Any]], directory: Path | None
) -> dict[str, int]:
    """The files, with their times, that were checked and are still the ones listed."""
    kept = {}
    for path, modified in record["checked"].items():
        if directory and record["files"].get(path) == listed.get(path):
            with contextlib.suppress(OSError):
                if (directory / path).stat().st_mtime_ns == modified:
                    kept[path] = modified
    return kept


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _record_path(repository: str, kind: str, revision: str | None) -> Path:
    from modelscope_hub import get_default_config

    key = _key(kind, repository, revision or "master")
    return Path(get_default_config().cache_dir) / ".lock" / f"{key}.json"


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(read_regular(path, _LARGEST_RECORD))
        return {"files": dict(record["files"]), "checked": dict(record["checked"])}
    except (OSError, ValueError, TypeError, KeyError):
        return {"files": {}, "checked": {}}


def _write_record(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):  # a cache that is only read: files are then checked each time
        partial.write_text(json.dumps(record))
        partial.replace(path)
