"""A server on this machine with the parts of both hubs' HTTP interfaces that their clients ask for.

Written after the requests of huggingface_hub 2.4 and modelscope-hub 0.5.1. It serves directories, all
revisions alike except those in `missing`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Path] = {}
        self.datasets: dict[str, Path] = {}
        self.requests: list[tuple[str, str, str]] = []
        """Method, path with query, and range of each request."""
        self.stop_after: dict[str, int] = {}
        """Files of which so many bytes are sent, and then nothing until `resume`."""
        self.resume = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self, file: str) -> list[str]:
        """The ranges in which a file was asked for; an empty one is all of it."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(file)]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.resume.set()
            server.shutdown()
            thread.join()


def entries(directory: Path) -> list[dict[str, Any]]:
    """Path, size and SHA-256 of the files."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [
        {
            "path": str(path.relative_to(directory)),
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Range", "")))
        address = urlsplit(self.path)
        parts = unquote(address.path).strip("/").split("/")
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        if parts[:2] == ["api", "v1"]:
            self._modelscope(parts[2:], query)
        else:
            self._huggingface(parts, query)

    def _modelscope(self, parts: list[str], query: dict[str, str]) -> None:
        directory = self._repository(parts[0], parts[1:3])
        if directory is None:
            return self._json({"Code": 10010205001, "Message": "not found", "Success": False}, 404)
        if parts[3:] in (["repo", "files"], ["repo", "tree"]):
            names = {"path": "Path", "size": "Size", "sha256": "Sha256"}
            files = [
                {names[key]: value for key, value in entry.items()} | {"Type": "blob"}
                for entry in entries(directory)
            ]
            return self._json({"Code": 200, "Data": {"Files": files}, "Success": True})
        if parts[3:] == ["repo"]:
            return self._file(directory, query["FilePath"])
        self._json({"Code": 404, "Message": "unknown", "Success": False}, 404)

    def _huggingface(self, parts: list[str], query: dict[str, str]) -> None:
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts[0] if parts[0] in ("models", "datasets") else "models"
        parts = parts[1:] if parts[0] == kind else parts
        directory = self._repository(kind, parts[:2])
        if directory is None:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        rest = parts[2:]
        if not api and rest[0] == "resolve":
            return self._file(directory, "/".join(rest[2:]))
        if rest[:1] == ["tree"]:
            return self._json([_tree_entry(entry) for entry in entries(directory)])
        if rest in ([], ["revision", "main"], ["revision", COMMIT]):
            name = "/".join(parts[:2])
            siblings = [{"rfilename": entry["path"]} for entry in entries(directory)]
            info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            return self._json({**info, "downloads": 0, "likes": 0})
        self._json({"error": "unknown"}, 404, {"X-Error-Code": "RevisionNotFound"})

    def _repository(self, kind: str, name: list[str]) -> Path | None:
        known = {"models": self.server.models, "datasets": self.server.datasets}
        return known[kind].get("/".join(name)) if kind in known else None

    def _json(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, directory: Path, name: str) -> None:
        path = directory / name
        if not path.is_file():
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        content = path.read_bytes()
        first, asked = 0, self.headers.get("Range", "")
        if asked:
            first = int(asked.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command != "GET":
            return
        stop = self.server.stop_after.get(name)
        if stop is not None and not self.server.resume.is_set():
            self.wfile.write(content[first:stop])
            self.wfile.flush()
            self.server.resume.wait(60)
            self.close_connection = True
            return
        self.wfile.write(content[first:])


def _tree_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """As large files are listed, whose entity tag is their SHA-256."""
    lfs = {"oid": entry["sha256"], "size": entry["size"], "pointerSize": 100}
    oid = hashlib.sha1(entry["sha256"].encode()).hexdigest()
    return {"type": "file", "path": entry["path"], "size": entry["size"], "oid": oid, "lfs": lfs}
