"""Processes that encode a share of a source's chunks each, beside the one that builds the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import AutoTokenizer

from isotrain.data.chunks import RowEncoder, chunk_path, chunked, encode_chunk
from isotrain.data.encode import Encoder
from isotrain.data.preference_items import PreferenceEncoder
from isotrain.data.prompts import PromptEncoder
from isotrain.data.rows import read_rows
from isotrain.errors import DataError
from isotrain.lifetime import die_with_parent
from isotrain.own_python import module_command

ENCODERS: dict[str, Any] = {kind.name: kind for kind in (Encoder, PreferenceEncoder, PromptEncoder)}


class Workers:
    """Each reads the whole source and writes every n-th chunk; the builder encodes what they leave out.

    They get plain text and write files that the builder checks, so that nothing is pickled. One that ends
    early, also on a row that cannot be encoded, leaves its chunks to the builder, which reports the error.
    """

    def __init__(
        self,
        source: str | Sequence[str] | None,
        encoder: RowEncoder[Any],
        chunks: Path,
        count: int,
        chunk_rows: int,
    ) -> None:
        self._encoder, self._chunks, self._count = encoder, chunks, count
        self._task = {"source": source, "chunks": str(chunks), "chunk_rows": chunk_rows, "shares": count + 1}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Once; without an effect where there is nothing to share."""
        if self._processes or not self._count:
            return
        tokenizer = self._chunks / "tokenizer"
        self._encoder.tokenizer.save_pretrained(tokenizer)
        command = module_command("isotrain.data.tokenise_workers")
        for share in range(1, self._count + 1):
            task = {
                **self._task,
                "share": share,
                "parent": os.getpid(),
                "encoder": self._encoder.name,
                "arguments": self._encoder.arguments,
                "tokenizer": str(tokenizer),
            }
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(task))
            process.stdin.close()

    def busy_with(self, number: int) -> bool:
        """Whether a worker that still runs has this chunk in its share."""
        share = number % (self._count + 1)
        return bool(self._processes and share and self._processes[share - 1].poll() is None)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def encode_share(task: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    encoder = ENCODERS[task["encoder"]](tokenizer, **task["arguments"])
    directory, first = Path(task["chunks"]), 0
    for number, rows in enumerate(chunked(read_rows(task["source"]), task["chunk_rows"])):
        if first == 0:
            encoder.values(rows[0])
        path = chunk_path(directory, first, rows)
        first += len(rows)
        if number % task["shares"] == task["share"] and not path.exists():
            encode_chunk(encoder, rows, path)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    die_with_parent(given["parent"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes themselves are the parallelism
    try:
        encode_share(given)
    except (DataError, OSError):
        sys.exit(1)
