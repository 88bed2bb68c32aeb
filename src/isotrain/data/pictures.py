"""Pictures as a vision tower takes them: decoded, resized and cut as the model's own processor does.

P: patches of a picture, D: values of a patch in one frame (channel, row, column), C: channels.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError

# Decoders that Pillow brings along; others start programs or are rarely tested with hostile files.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MOST_BYTES = 64 << 20
MOST_PIXELS = 64 << 20
"""Of a picture as it is stored; a small file can claim any size."""
MOST_STRETCHED = 200  # the processor's own limit of width to height


@dataclass(frozen=True)
class Picture:
    """A processed picture and its place in a sequence of tokens."""

    patches_PD: npt.NDArray[np.uint8]
    """Before normalisation, one frame, in the processor's order: merged patches side by side."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of patches."""
    start: int
    """Index of its first placeholder token in the sequence."""
    tokens: int
    """Placeholder tokens."""
    digest: str
    """SHA-256 of patches and grid."""
    source: str = ""
    """SHA-256 of the file that a store keeps."""

    @property
    def stop(self) -> int:
        return self.start + self.tokens


def picture_digest(patches_PD: npt.NDArray[np.uint8], grid: tuple[int, int, int]) -> str:
    return hashlib.sha256(np.array(grid, "<i8").tobytes() + patches_PD.tobytes()).hexdigest()


@dataclass(frozen=True)
class PictureProcessor:
    """What Qwen2-VL's image processor does, which all models of its family name, with Pillow and numpy alone.

    It stops before normalisation: bytes are an eighth of the values that the tower gets (two equal frames of
    float32), and equal bytes are equal pictures.
    """

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int
    frames: int
    """Frames of a patch; a picture fills all with the same values."""
    merge: int
    """Patches along each side of the square that becomes one token."""
    rescale: float
    resample: int

    @classmethod
    def of_model(
        cls, directory: Path, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> PictureProcessor:
        """From the files of a model; `min_pixels` and `max_pixels` go before the model's own."""
        file, config = _processor_config(directory)
        kind = str(config.get("image_processor_type", ""))
        if kind.removesuffix("Fast").removesuffix("Pil") != "Qwen2VLImageProcessor":
            raise DataError(
                f"{file}: pictures are processed as Qwen2VLImageProcessor does, not as {kind or 'nothing'}; "
                "use a model of Qwen2-VL's family, such as Qwen2.5-VL or Qwen3-VL"
            )
        if off := [f"do_{step}" for step in _STEPS if config.get(f"do_{step}") is False]:
            raise DataError(f"{file}: {', '.join(off)} false; only processors that do every step are known")
        size = config.get("size") or {}
        smallest = min_pixels or config.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        largest = max_pixels or config.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        if smallest > largest:
            raise DataError(
                f"{file}: min_pixels {smallest} is above max_pixels {largest}; lower or raise one"
            )
        return cls(
            smallest,
            largest,
            tuple(config.get("image_mean") or (0.48145466, 0.4578275, 0.40821073)),
            tuple(config.get("image_std") or (0.26862954, 0.26130258, 0.27577711)),
            config.get("patch_size", 14),
            config.get("temporal_patch_size", 2),
            config.get("merge_size", 2),
            config.get("rescale_factor", 1 / 255),
            config.get("resample", 3),
        )

    def __call__(self, image: bytes | Path, start: int = 0) -> Picture:
        """The picture in a file, or in bytes of one; its first token is at `start` of its sequence."""
        patches_PD, grid = self._patches(_resized(_decoded(image), self))
        tokens = len(patches_PD) // self.merge**2
        return Picture(patches_PD, grid, start, tokens, picture_digest(patches_PD, grid))

    def _patches(
        self, pixels_HWC: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
        rows, columns = (side // self.patch for side in pixels_HWC.shape[:2])
        channels, merge, patch = pixels_HWC.shape[2], self.merge, self.patch
        blocks = pixels_HWC.reshape(rows // merge, merge, patch, columns // merge, merge, patch, channels)
        patches_PD = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, channels * patch**2)
        return np.ascontiguousarray(patches_PD), (1, rows, columns)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frames and side of a patch, and how many patches along a side are merged."""
        return self.frames, self.patch, self.merge

    @cached_property
    def table_CV(self) -> npt.NDArray[np.float32]:
        """Each channel's normalised value of each byte, rounded as transformers rounds."""
        scaled_V = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean_C, std_C = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (scaled_V[None] - mean_C[:, None]) / std_C[:, None]

    def normalised(self, patches_PD: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """`pixel_values` of the model's processor, bit for bit: every frame of each patch."""
        by_channel = patches_PD.reshape(len(patches_PD), len(self.mean), 1, self.patch**2)
        values = self.table_CV[np.arange(len(self.mean))[:, None, None], by_channel]
        return np.repeat(values, self.frames, 2).reshape(len(patches_PD), -1)


_STEPS = ("resize", "rescale", "normalize", "convert_rgb")


def _processor_config(directory: Path) -> tuple[Path, dict[str, Any]]:
    """transformers 5 may keep it within that of all processors."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = directory / name
        if file.is_file():
            try:
                config = json.loads(file.read_text(encoding="utf-8"))
                config = config["image_processor"] if name == "processor_config.json" else config
                if isinstance(config, dict):
                    return file, config
            except (OSError, ValueError, KeyError):
                pass
            raise DataError(f"{file}: not the configuration of an image processor; download the model again")
    raise DataError(
        f"{directory}: no preprocessor_config.json, so pictures cannot be processed; use a vision-language "
        "model with all of its files, or remove data.image_key"
    )


def _decoded(image: bytes | Path) -> Any:
    """A Pillow image in RGB, upright as its camera says."""
    from PIL import Image, ImageOps

    name = str(image) if isinstance(image, Path) else "picture"
    try:
        if (size := image.stat().st_size if isinstance(image, Path) else len(image)) > MOST_BYTES:
            raise DataError(f"{name}: {size} bytes; the most is {MOST_BYTES}: store it smaller")
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise DataError(
                    f"{name}: {opened.width} x {opened.height} pixels; the most is {MOST_PIXELS}: "
                    "scale it down"
                )
            # A camera's JPEG may have a preview behind the picture, which is the first frame.
            if getattr(opened, "n_frames", 1) > 1 and opened.format != "MPO":
                raise DataError(
                    f"{name}: {opened.n_frames} frames; video is not supported, store one of them"
                )
            return ImageOps.exif_transpose(opened).convert("RGB")
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{name}: no such file") from None
    # Decoders of damaged files raise these, and struct.error and SyntaxError now and then.
    except Exception as error:
        raise DataError(
            f"{name}: not a picture that Pillow can read as {', '.join(FORMATS)}: {error}"
        ) from None


def _resized(image: Any, processor: PictureProcessor) -> npt.NDArray[np.uint8]:
    width, height = image.size
    if max(width, height) > MOST_STRETCHED * min(width, height):
        raise DataError(
            f"picture: {width} x {height} pixels; the longer side may be at most {MOST_STRETCHED} times the "
            "shorter: cut it"
        )
    factor = processor.patch * processor.merge
    # Python's round, half to even, as the processor's own.
    to_height, to_width = (round(side / factor) * factor for side in (height, width))
    if to_height * to_width > processor.max_pixels:
        shrink = math.sqrt(height * width / processor.max_pixels)
        to_height, to_width = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )
    elif to_height * to_width < processor.min_pixels:
        grow = math.sqrt(processor.min_pixels / (height * width))
        to_height, to_width = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return np.array(image.resize((to_width, to_height), resample=processor.resample))


# Decoded pictures that a process keeps: eight of the largest that a default Qwen2.5-VL takes need 300 MB.
MOST_DECODED = 512 << 20
_STORED = 4 + 2 * 4
"""Numbers of a picture in a store: place, grid, digest and source."""


class PictureFiles:
    """Encoded pictures by SHA-256, each once for all stores beside them, and what was decoded lately."""

    def __init__(self, directory: Path, processor: PictureProcessor) -> None:
        self.directory, self.processor = directory, processor
        self._decoded: OrderedDict[tuple[str, str], Picture] = OrderedDict()

    def _path(self, source: str) -> Path:
        return self.directory / source[:2] / source

    def add(self, image: bytes) -> Picture:
        """Keep a file, whole or not at all, and process it."""
        picture = replace(self.processor(image), source=hashlib.sha256(image).hexdigest())
        path = self._path(picture.source)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            partial.write_bytes(image)
            partial.rename(path)
        return picture

    def load(self, row: npt.NDArray[np.int64]) -> Picture:
        """The picture of which a store has this row; other pixels than its encoder saw are an error."""
        start, *grid = (int(number) for number in row[:4])
        digest, source = (part.astype("<i8").tobytes().hex() for part in (row[4:8], row[8:]))
        picture = self._decoded.pop((source, digest), None)
        if picture is None:
            path = self._path(source)
            picture = replace(self.processor(path), source=source)
            if picture.digest != digest:
                raise DataError(
                    f"{path}: decoded to other pixels than when the data was tokenised; install the same "
                    "version of Pillow in all environments, or delete the cache to tokenise again"
                )
        self._decoded[source, digest] = picture  # as the one used last
        while sum(kept.patches_PD.nbytes for kept in self._decoded.values()) > MOST_DECODED:
            self._decoded.popitem(last=False)
        assert picture.grid == tuple(grid)
        return replace(picture, start=start)


def stored_rows(pictures: Sequence[Picture]) -> npt.NDArray[np.int64]:
    """What a store keeps of pictures, one after the other."""
    rows = [
        np.concatenate(
            [
                np.array([picture.start, *picture.grid], "<i8"),
                np.frombuffer(bytes.fromhex(picture.digest + picture.source), "<i8"),
            ]
        )
        for picture in pictures
    ]
    return np.concatenate([np.zeros(0, "<i8"), *rows])


def rows_of(stored: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What `stored_rows` put one after the other; ValueError if that is damaged."""
    return stored.reshape(-1, _STORED)


def positions_of(length: int, pictures: Sequence[Picture]) -> npt.NDArray[np.int64]:
    """Time, row and column of each token of a sequence, as multimodal rotary embeddings of the family count.

    A text token has the same number three times. Only the pictures' places count: a policy can write their
    token.
    """
    positions_3L = np.empty((3, length), np.int64)
    done, position = 0, 0
    for picture in pictures:
        text = picture.start - done
        positions_3L[:, done : picture.start] = np.arange(position, position + text)
        merge = math.isqrt(len(picture.patches_PD) // picture.tokens)
        frames, rows, columns = picture.grid[0], picture.grid[1] // merge, picture.grid[2] // merge
        places = np.indices((frames, rows, columns)).reshape(3, -1)
        positions_3L[:, picture.start : picture.stop] = position + text + places
        done, position = picture.stop, position + text + max(rows, columns)
    positions_3L[:, done:] = np.arange(position, position + length - done)
    return positions_3L
