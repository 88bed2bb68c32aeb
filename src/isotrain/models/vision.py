"""Vision-language models of Qwen2-VL's family: pictures to features, features among the embeddings of tokens.

P: patches, D: bytes of a patch in one frame, C: channels, V: values of a byte, G: pictures, T: packed tokens,
M: tokens that stand for a feature, H: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from isotrain.errors import ModelError
from isotrain.recipe.data import PICTURE_MODELS

TOWER = "visual"
# For adapters: a pattern of the names of the tower's modules.
TOWER_MODULES = rf"(.*\.)?{TOWER}(\..*)?"

Pictures = tuple[torch.Tensor, ...]
"""`PackedPictures` of the data."""


def sees(config: PretrainedConfig) -> bool:
    """Whether a configuration is of a model of the family."""
    return config.model_type in PICTURE_MODELS


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """Tower and merger of a model of the family."""
    return model.base_model.get_submodule(TOWER) if sees(model.config) else None


class Embedded(NamedTuple):
    """The language model's inputs for packed tokens."""

    embeds_TH: torch.Tensor
    positions_XT: torch.Tensor
    """The tokens' place in their sample; with pictures, then time, row and column."""
    seen_T: torch.Tensor | None = None
    """Which tokens stand for a feature, where deeper layers get features too."""
    deep: tuple[torch.Tensor, ...] = ()
    """Their features, layer by layer: Qwen3-VL's deepstack."""

    def inputs(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """By name, with what is of packed tokens put into rows."""
        inputs: dict[str, Any] = {
            "inputs_embeds": rows(self.embeds_TH),
            "position_ids": torch.stack([rows(positions_T) for positions_T in self.positions_XT]),
        }
        if len(self.positions_XT) == 1:
            inputs["position_ids"] = inputs["position_ids"][0]
        if self.seen_T is not None:
            inputs |= {"visual_pos_masks": rows(self.seen_T), "deepstack_visual_embeds": list(self.deep)}
        return inputs


class Vision:
    """Embeds pictures for the language model; not a module, so that parameters keep their names."""

    def __init__(
        self, model: PreTrainedModel, table_CV: torch.Tensor, frames: int, patch: int, merge: int
    ) -> None:
        """`table_CV`: normalised values of each channel's bytes; the others are the processor's too."""
        tower = tower_of(model)
        assert tower is not None
        self.model, self.tower, self.table_CV = model, tower, table_CV
        self.frames, self.patch, self.merge = frames, patch, merge
        self.language_model: Any = model.base_model.language_model

    @property
    def trained(self) -> bool:
        """Whether its weights are; frozen ones are whole on every rank, and bear no gradient."""
        return any(parameter.requires_grad for parameter in self.tower.parameters())

    def __call__(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, pictures: Pictures | None
    ) -> Embedded:
        embeds_TH = self.model.get_input_embeddings()(tokens_T)
        if pictures is None:
            if self.trained:
                # All ranks take part in the tower's collectives, and its weights get a gradient of 0, as they
                # do from a batch in which another rank has a picture.
                shape = self.merge**2, len(self.table_CV) * self.patch**2
                blank_PD = tokens_T.new_zeros(shape, dtype=torch.uint8)
                features = self._features(blank_PD, tokens_T.new_tensor([[1, self.merge, self.merge]]))
                zero = torch.stack([part.sum() * 0 for part in features]).sum()
                embeds_TH = embeds_TH + zero.to(embeds_TH.dtype)
            return Embedded(embeds_TH, positions_T[None])
        patches_PD, grids_G3, positions_3T, places_M, features_M = pictures
        features_MH, *deep = (
            part.index_select(0, features_M).to(embeds_TH.dtype)
            for part in self._features(patches_PD, grids_G3)
        )
        embeds_TH = embeds_TH.index_copy(0, places_M, features_MH)
        seen_T = torch.zeros_like(tokens_T, dtype=torch.bool).index_fill(0, places_M, True)
        positions_4T = torch.cat([positions_T[None], positions_3T])
        return Embedded(embeds_TH, positions_4T, seen_T if deep else None, tuple(deep))

    def _features(self, patches_PD: torch.Tensor, grids_G3: torch.Tensor) -> list[torch.Tensor]:
        """The merger's features, then those of deeper layers."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trained):
            output = self.tower(self._normalised(patches_PD), grid_thw=grids_G3)
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]

    def _normalised(self, patches_PD: torch.Tensor) -> torch.Tensor:
        """The processor's `pixel_values`, bit for bit: an eighth of their bytes came to the device."""
        table_CV = self.table_CV.to(patches_PD.device)
        offsets_C1 = (torch.arange(len(table_CV), device=patches_PD.device) * table_CV.shape[1])[:, None]
        bytes_PCd = patches_PD.view(len(patches_PD), len(table_CV), -1).long() + offsets_C1
        values_PCd = table_CV.flatten()[bytes_PCd]
        return values_PCd.unsqueeze(2).expand(-1, -1, self.frames, -1).reshape(len(patches_PD), -1)


def left_padded_rows(part_T: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Packed rows that end together; the padding is zero."""
    rows = [row.flip(0) for row in part_T.split(lengths)]
    return pad_sequence(rows, batch_first=True).flip(1)


def refuse_unsupported(model: PreTrainedModel, **used: bool) -> None:
    """An error for settings that vision-language models cannot be used with yet, by their fields' names."""
    if sees(model.config) and (fields := [name.replace("__", ".") for name, on in used.items() if on]):
        raise ModelError(
            f"{', '.join(fields)}: not supported for model type '{model.config.model_type}'; remove it"
        )
