"""Pictures of rows: read, counted against the places for them in the messages, and laid among the tokens.

T: tokens of one sample.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.data.formats import ChatMessage, ChatRow, Text
from isotrain.data.items import Sample
from isotrain.data.pictures import MOST_BYTES, Picture, PictureFiles, PictureProcessor
from isotrain.data.rows import Row, read_rows
from isotrain.errors import DataError
from isotrain.files import parse_json, read_regular
from isotrain.recipe.data import PICTURE_MODELS

MARKER = "<image>"
_OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")


class RowPictures:
    """What an encoder needs to know of pictures; its arguments are those that JSON can hold."""

    def __init__(
        self,
        model: str,
        cache: str,
        key: str,
        max_per_prompt: int,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self.key, self.max_per_prompt = key, max_per_prompt
        directory = Path(model)
        self.files = PictureFiles(Path(cache), PictureProcessor.of_model(directory, min_pixels, max_pixels))
        config = parse_json(read_regular(directory / "config.json"))
        if (kind := config.get("model_type")) not in PICTURE_MODELS:
            raise DataError(
                f"data.image_key: model type '{kind}' cannot be given pictures; use one of "
                f"{', '.join(PICTURE_MODELS)}, or remove image_key"
            )
        self.token = int(config["image_token_id"])

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that samples depend on besides the rows."""
        return {
            "key": self.key,
            "most": self.max_per_prompt,
            "processor": repr(self.files.processor),
            "token": self.token,
        }

    def files_digest(self, source: str | Sequence[str]) -> str:
        """SHA-256 over sizes and times of all files that rows name: an exchanged one needs another store."""
        total = hashlib.sha256()
        for row in read_rows(source):
            for name in map(_path, _listed(row.values.get(self.key))):
                if name is None or row.directory is None:
                    continue
                with suppress(OSError, ValueError):  # whose row is then refused
                    status = (row.directory / name).stat()
                    total.update(repr((name, status.st_size, status.st_mtime_ns)).encode())
        return total.hexdigest()

    def without_bytes(self, row: Row) -> Row:
        """The row that rewards and viewers get."""
        return replace(row, values={name: v for name, v in row.values.items() if name != self.key})

    def read(self, row: Row, conversation: ChatRow | Text | str) -> tuple[Any, list[Picture]]:
        """The conversation with a part for each picture, as chat templates take it, and the pictures."""
        sources = _listed(row.values.get(self.key))
        if len(sources) > self.max_per_prompt:
            raise DataError(
                f"'{self.key}' has {len(sources)} pictures; raise data.images.max_per_prompt "
                f"({self.max_per_prompt}), or remove some"
            )
        if not isinstance(conversation, ChatRow):
            if sources:
                raise DataError(
                    f"'{self.key}' has pictures, but the row is plain text; write messages, and use a "
                    "tokenizer with a chat template"
                )
            return conversation, []
        messages = tuple(_with_parts(message) for message in conversation.messages)
        places = sum(_is_picture(part) for m in messages if isinstance(m.content, list) for part in m.content)
        if places != len(sources):
            raise DataError(
                f"'{self.key}' has {len(sources)} pictures, but the messages have {places} places for them "
                f'({MARKER} in a string, or {{"type": "image"}} in a list); make these numbers equal'
            )
        pictures = [self.files.add(_file(source, row, self.key)) for source in sources]
        return replace(conversation, messages=messages), pictures

    def placed(self, sample: Sample, pictures: Sequence[Picture]) -> Sample:
        """The sample with as many placeholder tokens for each picture as it has features."""
        at = np.flatnonzero(sample.tokens_T == self.token)
        if len(at) != len(pictures):
            raise DataError(
                f"the chat template wrote {len(at)} image tokens for {len(pictures)} pictures; use the "
                "model's own template, and no image token in the text"
            )
        counts_T = np.ones(len(sample), np.int64)
        counts_T[at] = [picture.tokens for picture in pictures]
        starts_T = np.cumsum(counts_T) - counts_T
        return Sample(
            np.repeat(sample.tokens_T, counts_T),
            np.repeat(sample.mask_T, counts_T),
            tuple(replace(p, start=int(start)) for p, start in zip(pictures, starts_T[at], strict=True)),
        )


def refuse_pictures(conversation: ChatRow | Text | str) -> None:
    """Without `data.image_key` a template would write image tokens that no picture belongs to."""
    messages = conversation.messages if isinstance(conversation, ChatRow) else ()
    if any(_is_picture(part) for m in messages if isinstance(m.content, list) for part in m.content):
        raise DataError("a message has a picture; set data.image_key to the column of the row's pictures")


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _with_parts(message: ChatMessage) -> ChatMessage:
    content = message.content
    if isinstance(content, str):
        if MARKER not in content:
            return message
        pieces = [piece for piece in re.split(f"({MARKER})", content) if piece]
        content = [{"type": "image"} if p == MARKER else {"type": "text", "text": p} for p in pieces]
        message = replace(message, content=content)
    for part in content or ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _OTHER_MEDIA:
            raise DataError(f"a message has {kind}; only pictures and text are supported: remove the row")
        if _is_picture(part) and message.role in ("assistant", "tool"):
            raise DataError(
                f"a message of '{message.role}' has a picture; only the user's and the system's may"
            )
        if _is_picture(part) and set(part) != {"type"}:
            raise DataError(
                'a picture stands in its message; write {"type": "image"} there, and the picture into the '
                "column of data.image_key"
            )
    return message


def _listed(column: Any) -> list[Any]:
    """The pictures of a row, which may be one alone."""
    return [] if column is None else column if isinstance(column, list) else [column]


def _content(source: Any) -> Any:
    """Bytes or path of a picture, also where both stand in a dictionary."""
    return source.get("bytes") or source.get("path") if isinstance(source, Mapping) else source


def _path(source: Any) -> str | None:
    return content if isinstance(content := _content(source), str) else None


def _file(source: Any, row: Row, key: str) -> bytes:
    """The bytes of a picture; a path is relative to the data file, and stays below its directory."""
    source = _content(source)
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str):
        raise DataError(
            f"'{key}' must have bytes or paths, not {type(source).__name__}; store pictures as files, or as "
            "bytes in Parquet"
        )
    if "://" in source or source.startswith("data:"):
        raise DataError(f"'{key}' has an address, {source[:60]!r}; download the picture, and write its path")
    if row.directory is None:
        raise DataError(f"'{key}' has the path {source!r}, but rows of a Hub data set have no directory")
    try:
        path = (row.directory / source).resolve()
        if not path.is_relative_to(row.directory.resolve()):
            raise DataError(f"'{key}': {source!r} leads out of {row.directory}; move the pictures below it")
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path}: more than {MOST_BYTES} bytes; store it smaller")
        return read_regular(path, MOST_BYTES)
    except DataError:
        raise
    except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
        why = getattr(error, "strerror", None) or error
        raise DataError(f"'{key}': {row.directory}/{source!r} cannot be read: {why}") from None
