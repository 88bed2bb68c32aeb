"""Pictures of prompts as vLLM takes them: pixels that are ready, and their places in expanded prompts.

vLLM's own processor is not used: the trainer's pixels and tokens are those of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.data.pictures import Picture, PictureProcessor


def picture_options(pictures: int, vllm: Any, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's options for prompts of at most so many pictures."""
    if not pictures:
        return {"skip_tokenizer_init": True}
    options = {
        # It makes a processor when it starts, which wants a tokenizer.
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": pictures, "video": 0},
        # Its keys would be our hashes, which differ after each update.
        "mm_processor_cache_gb": 0,
        # It finds out how much memory of a device is left beside the largest pictures.
        "skip_mm_profiling": on_cpu,
    }
    # vLLM 0.32 normalises pixels on the device unless it is told not to, those that are normalised too.
    if "mm_device_do_normalize" in {field.name for field in fields(vllm.EngineArgs)}:
        options["mm_device_do_normalize"] = False
    return options


def picture_hash(picture: Picture, salt: str) -> str:
    """`salt` names the weights: vLLM keeps features of pictures by their hash, also when those have changed.

    Its `reset_encoder_cache` is not for times when requests run.
    """
    return f"{picture.digest}/{salt}"


class PictureInputs:
    def __init__(self, directory: Path) -> None:
        self._processor = PictureProcessor.of_model(directory)

    def prompt(self, tokens_T: npt.NDArray[np.int32], pictures: Sequence[Picture], salt: str) -> Any:
        import torch
        from transformers import BatchFeature
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        grids = torch.tensor([picture.grid for picture in pictures])
        pixels = np.concatenate([self._processor.normalised(picture.patches_PD) for picture in pictures])
        kwargs = MultiModalKwargsItems.from_hf_inputs(
            BatchFeature({"pixel_values": torch.from_numpy(pixels), "image_grid_thw": grids}),
            {
                "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
                "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            },
        )
        places = [PlaceholderRange(offset=picture.start, length=picture.tokens) for picture in pictures]
        hashes = [picture_hash(picture, salt) for picture in pictures]
        return mm_input(tokens_T.tolist(), kwargs, {"image": hashes}, {"image": places}, cache_salt=salt)
