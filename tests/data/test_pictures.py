"""A processed picture is what transformers' own processor makes of it, and a hostile file is an error."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from isotrain.data import pictures
from isotrain.data.pictures import PictureProcessor, picture_digest
from isotrain.errors import DataError

SIZES = [(56, 56), (100, 77), (640, 480), (31, 500), (9, 12), (57, 43)]
CONFIGS = {
    "qwen2.5-vl": {"min_pixels": 3136, "max_pixels": 100_352, "patch_size": 14},
    "qwen3-vl": {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "defaults": {},
}


def write_config(directory, **config):
    config = {"image_processor_type": "Qwen2VLImageProcessor", **config}
    (directory / "preprocessor_config.json").write_text(json.dumps(config))
    return directory


def drawn(size, mode="RGB", seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_equals_transformers_bit_for_bit(config, mode, tmp_path, monkeypatch):
    # transformers 5.5.4 writes the limits of one model into what others begin with.
    monkeypatch.setattr(Qwen2VLImageProcessorPil, "size", dict(Qwen2VLImageProcessorPil.size))
    own = PictureProcessor.of_model(write_config(tmp_path, **CONFIGS[config]))
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    for size in SIZES:
        image = drawn(size, mode)
        expected = theirs(images=[image], return_tensors="np")
        picture = own(encoded(image), start=3)
        assert [list(picture.grid)] == expected["image_grid_thw"].tolist()
        assert np.array_equal(own.normalised(picture.patches_PD), expected["pixel_values"])
        assert picture.tokens * own.merge**2 == len(picture.patches_PD) and picture.stop == 3 + picture.tokens
        assert picture.digest == picture_digest(picture.patches_PD, picture.grid)


def test_reads_the_file_of_all_processors_and_the_limits_of_the_recipe(tmp_path):
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}})
    )
    image = encoded(drawn((640, 480)))
    assert PictureProcessor.of_model(tmp_path)(image).grid == (1, 30, 40)
    assert PictureProcessor.of_model(tmp_path, max_pixels=64 * 64)(image).grid == (1, 2, 4)
    with pytest.raises(DataError, match="min_pixels 9000 is above max_pixels 4096"):
        PictureProcessor.of_model(tmp_path, 9000, 4096)


def test_turns_pictures_as_their_camera_says(tmp_path):
    own = PictureProcessor.of_model(write_config(tmp_path))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 270 degrees
    assert own(encoded(drawn((112, 56)), "JPEG", exif=exif)).grid == (1, 8, 4)


def test_refuses_what_is_no_picture_of_reasonable_size(tmp_path, monkeypatch):
    own = PictureProcessor.of_model(write_config(tmp_path))
    good = encoded(drawn((56, 56)))
    refused = {
        "not a picture": b"%!PS-Adobe-3.0 EPSF-3.0",
        "not a picture that": good[:200],
        "at most 200 times": encoded(drawn((402, 2))),
        "video is not supported": encoded(
            drawn((8, 8)), "GIF", save_all=True, append_images=[drawn((8, 8), seed=1)]
        ),
    }
    for message, data in refused.items():
        with pytest.raises(DataError, match=message):
            own(data)
    with pytest.raises(DataError, match="no such file"):
        own(tmp_path / "absent.png")
    monkeypatch.setattr(pictures, "MOST_PIXELS", 56 * 56 - 1)
    with pytest.raises(DataError, match="56 x 56 pixels; the most is 3135: scale it down"):
        own(good)
    monkeypatch.setattr(pictures, "MOST_BYTES", len(good) - 1)
    with pytest.raises(DataError, match="store it smaller"):
        own(good)


def test_refuses_processors_that_it_does_not_know(tmp_path):
    with pytest.raises(DataError, match=r"no preprocessor_config\.json"):
        PictureProcessor.of_model(tmp_path)
    with pytest.raises(DataError, match="not as CLIPImageProcessor"):
        PictureProcessor.of_model(write_config(tmp_path, image_processor_type="CLIPImageProcessor"))
    with pytest.raises(DataError, match="do_resize false"):
        PictureProcessor.of_model(write_config(tmp_path, do_resize=False))
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(DataError, match="download the model again"):
        PictureProcessor.of_model(tmp_path)
