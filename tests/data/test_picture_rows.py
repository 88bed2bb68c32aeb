"""Rows with pictures become samples whose tokens, pictures and stores belong together, or errors."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from isotrain.data.encode import Encoder, PromptEncoder
from isotrain.data.items import Item
from isotrain.data.pictures import Picture, PictureProcessor
from isotrain.data.rows import Row, read_rows
from isotrain.data.tokenise import cached_store, encode_chunk
from isotrain.errors import DataError
from isotrain.models.files import load_tokenizer
from vision_models import make_vlm, png

ANSWER = {"role": "assistant", "content": "red"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def arguments(model: Path, tmp_path: Path, **changes):
    return {
        "model": str(model),
        "cache": str(tmp_path / "cache" / "pictures"),
        "key": "images",
        "max_per_prompt": 2,
        **changes,
    }


def encoder_of(model: Path, tmp_path: Path, prompts=False, **changes):
    pictures = arguments(model, tmp_path, **changes)
    tokenizer = load_tokenizer(model)
    if prompts:
        return PromptEncoder(tokenizer, "messages", 1024, "error", pictures)
    return Encoder(tokenizer, "messages", "prompt", "completion", 1024, "error", pictures)


def write(tmp_path: Path, rows: list[dict]) -> str:
    (tmp_path / "a.png").write_bytes(png((84, 56), 1))
    (tmp_path / "b.png").write_bytes(png((56, 112), 2))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row_of(content, images, **extra):
    return {"messages": [{"role": "user", "content": content}, ANSWER], "images": images, **extra}


MARKED = row_of("<image>and <image>?", ["a.png", {"path": "b.png"}])
TYPED = row_of(
    [{"type": "image"}, {"type": "text", "text": "and "}, {"type": "image"}, {"type": "text", "text": "?"}],
    ["a.png", "b.png"],
)


def test_markers_parts_and_bytes_are_the_same_sample(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path, [MARKED, TYPED, row_of("no picture", None)])
    store = cached_store(source, encoder_of(model, tmp_path), tmp_path / "cache")
    first, second, third = (store[number].samples[0] for number in range(3))
    assert (
        np.array_equal(first.tokens_T, second.tokens_T)
        and first.pictures[0].digest == second.pictures[0].digest
    )
    processor = PictureProcessor.of_model(model)
    expected = [processor(png((84, 56), 1)), processor(png((56, 112), 2))]
    for picture, of_file in zip(first.pictures, expected, strict=True):
        assert np.array_equal(picture.patches_PD, of_file.patches_PD) and picture.digest == of_file.digest
    tokenizer = load_tokenizer(model)
    text = tokenizer.decode(first.tokens_T)
    pad = "<|image_pad|>"
    assert f"<|vision_start|>{pad * 6}<|vision_end|>and <|vision_start|>{pad * 8}<|vision_end|>?" in text
    inside = np.zeros(len(first), bool)
    for picture in first.pictures:
        inside[picture.start : picture.stop] = True
    assert np.array_equal(inside, first.tokens_T == tokenizer.convert_tokens_to_ids(pad))
    assert (
        not first.mask_T[inside].any() and tokenizer.decode(first.tokens_T[first.mask_T]) == "red<|im_end|>"
    )
    assert third.pictures == ()
    # Each file once, whatever the number of rows that have it.
    assert len([p for p in (tmp_path / "cache" / "pictures").rglob("*") if p.is_file()]) == 2
    table = pyarrow.Table.from_pylist(
        [
            row_of(
                "<image>and <image>?",
                [{"bytes": png((84, 56), 1), "path": None}, {"bytes": png((56, 112), 2), "path": "x"}],
            )
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (of_bytes,) = encoder_of(model, tmp_path).values(next(iter(read_rows(str(tmp_path / "rows.parquet")))))
    assert [p.digest for p in of_bytes.samples[0].pictures] == [p.digest for p in first.pictures]


def test_prompts_read_pictures_when_they_are_asked_for(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path, [{**MARKED, "messages": MARKED["messages"][:1], "answer": "red"}])
    encoder = encoder_of(model, tmp_path, prompts=True)
    store = cached_store(source, encoder, tmp_path / "cache")
    prompt = store[0]
    assert "images" not in prompt.row and prompt.row["answer"] == "red"
    assert [p.tokens for p in prompt.pictures] == [6, 8]
    for path in (tmp_path / "cache" / "pictures").rglob("*"):
        if path.is_file():
            path.write_bytes(png((84, 56), 77))
    encoder.pictures.files._decoded.clear()
    assert store[0].tokens_P is not None
    with pytest.raises(DataError, match="decoded to other pixels"):
        _ = store[0].pictures


def test_an_exchanged_file_is_not_taken_from_an_older_store(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    source = write(data, [row_of("<image>?", "a.png")])

    def digest() -> str:
        store = cached_store(source, encoder_of(model, tmp_path), tmp_path / "cache")
        picture: Picture = store[0].samples[0].pictures[0]
        return picture.digest

    before = digest()
    # Nothing that no row names counts, such as a run's plots or an editor's dangling link.
    (data / "plot.png").write_bytes(png((56, 56), 3))
    (data / ".#rows.jsonl").symlink_to("nowhere")
    assert digest() == before and len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
    (data / "a.png").write_bytes(png((84, 56), 5))
    assert digest() != before


def test_a_chunk_does_not_hold_the_pixels_of_its_rows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, [row_of("<image>?", "a.png")] * 5)
    encoder = encoder_of(model, tmp_path)
    alive: list[weakref.ref[Item]] = []

    def values(row: Row, of: Callable[[Row], list[Item]] = encoder.values) -> list[Item]:
        assert sum(item() is not None for item in alive) <= 1
        items = of(row)
        alive.extend(map(weakref.ref, items))
        return items

    monkeypatch.setattr(encoder, "values", values)
    encode_chunk(encoder, list(read_rows(source)), tmp_path / "chunk")
    assert len(alive) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    {
        "count": (row_of("<image>?", ["a.png", "b.png"]), "2 pictures, but the messages have 1 places"),
        "none": (row_of("<image>?", []), "0 pictures, but the messages have 1 places"),
        "many": (row_of("<image>" * 3, ["a.png"] * 3), r"has 3 pictures; raise data\.images\.max_per_prompt"),
        "address": (row_of("<image>?", "https://example.com/a.png"), "download the picture"),
        "inline": (row_of("<image>?", "data:image/png;base64,AAAA"), "download the picture"),
        "escape": (row_of("<image>?", "../secret.png"), "leads out of"),
        "absolute": (row_of("<image>?", "/etc/passwd"), "leads out of"),
        "missing": (row_of("<image>?", "c.png"), "cannot be read"),
        "directory": (row_of("<image>?", "."), "cannot be read"),
        "no name": (row_of("<image>?", "a\0.png"), "cannot be read"),
        "number": (row_of("<image>?", 3), "must have bytes or paths, not int"),
        "not one": (row_of("<image>?", "rows.jsonl"), "not a picture"),
        "video": (row_of([{"type": "video"}], None), "only pictures and text"),
        "in place": (row_of([{"type": "image", "image": "a.png"}], None), "stands in its message"),
        "token": (row_of("<image><|image_pad|>", "a.png"), "2 image tokens for 1 pictures"),
        "token alone": (row_of("<|image_pad|>", None), "1 image tokens for 0 pictures"),
        "tool": (
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "tool", "content": "<image>"},
                    ANSWER,
                ],
                "images": "a.png",
            },
            "'tool' has a picture",
        ),
        "answer": (
            {
                "messages": [{"role": "user", "content": "?"}, {**ANSWER, "content": "<image>"}],
                "images": "a.png",
            },
            "'assistant' has a picture",
        ),
    }.values(),
)
def test_refuses_rows_that_name_the_line(model: Path, tmp_path: Path, row: dict, message: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    source = write(data, [row])
    with pytest.raises(DataError, match=message) as error:
        cached_store(source, encoder_of(model, tmp_path), tmp_path / "cache")
    assert str(error.value).startswith(f"{source}:1: ")


def test_refuses_links_out_of_the_directory(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    source = write(data, [row_of("<image>?", "link.png")])
    (tmp_path / "outside.png").write_bytes(png((56, 56)))
    (data / "link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(DataError, match="leads out of"):
        cached_store(source, encoder_of(model, tmp_path), tmp_path / "cache")


def test_parts_with_pictures_need_the_column(model: Path, tmp_path: Path) -> None:
    encoder = Encoder(load_tokenizer(model), "messages", "prompt", "completion", 1024, "error")
    with pytest.raises(DataError, match=r"set data\.image_key"):
        encoder.values(next(iter(read_rows(write(tmp_path, [TYPED])))))


def test_refuses_models_of_other_families(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "preprocessor_config.json").write_bytes((model / "preprocessor_config.json").read_bytes())
    (other / "config.json").write_text('{"model_type": "llava"}')
    (other / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (other / "tokenizer_config.json").write_bytes((model / "tokenizer_config.json").read_bytes())
    with pytest.raises(DataError, match="'llava' cannot be given pictures; use one of qwen2_vl"):
        encoder_of(other, tmp_path)
