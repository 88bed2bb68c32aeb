"""From the `rollout` section of a recipe to an engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.data.trajectory import sample_seed
from isotrain.device.base import Device
from isotrain.errors import RolloutError
from isotrain.models.config import Positions, positions, text_config
from isotrain.models.files import model_directory
from isotrain.models.load import read_config
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import ModelSection
from isotrain.rollout.base import RolloutEngine


@dataclass(frozen=True)
class EngineArguments:
    """The arguments that every engine is made from."""

    rollout: RolloutSection
    directory: Path
    dtype: str
    device: Device
    longest: int
    """Tokens of the longest prompt with the longest response."""
    positions: Positions
    """The model's positions."""
    seed: int
    name: str
    repeatable: bool = True
    """Responses must be the same from run to run."""
    head_float32: bool = False
    routes: bool = False
    """Trajectories have the experts of each token."""
    trained: ModelSection | None = None
    """How the ranks compute the model, for an engine that does the same."""
    token_budget: int = 16384
    """Tokens of the ranks' micro-batches."""
    pictures: int = 0
    """Most pictures of a prompt; 0 for models that read text alone."""

    @property
    def seeded(self) -> bool:
        """Each response has noise of its own: on a device that is several kernels a response and token."""
        return self.repeatable or self.device.type == "cpu"

    @property
    def engine_seed(self) -> int:
        """Without seeds of their own, responses of two engines must not share their noise."""
        return self.seed if self.seeded else sample_seed(self.seed, zlib.crc32(self.name.encode()), 0)

    @property
    def eager(self) -> bool:
        """Where compiling takes minutes and saves little, unless the recipe says otherwise."""
        return self.device.type == "cpu" if self.rollout.eager is None else self.rollout.eager

    @property
    def server(self) -> dict[str, Any]:
        """Arguments of both engines that have processes of their own."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "device_type": self.device.type,
            "seed": self.seed,
            "tensor_parallel": self.rollout.tensor_parallel,
            "memory_utilization": self.rollout.memory_utilization,
            "cache_bytes": int(self.rollout.kv_cache_gb * 2**30),
            "eager": self.eager,
            "update_timeout": self.rollout.update_timeout,
            "config_changes": self.positions.config_changes,
        }

    def room(self, spare: int) -> int:
        """Positions that an engine needs, and `spare` ones where the model has them."""
        limit = self.positions.limit
        return self.longest + spare if limit is None else min(self.longest + spare, limit)


def build_rollout(
    rollout: RolloutSection,
    model_path: str,
    dtype: str,
    *,
    device: Device,
    max_prompt: int,
    seed: int,
    name: str,
    repeatable: bool = True,
    head_float32: bool = False,
    routes: bool = False,
    trained: ModelSection | None = None,
    token_budget: int = 16384,
    pictures: int = 0,
) -> RolloutEngine:
    directory = model_directory(model_path)
    longest = max_prompt + rollout.max_tokens
    usable = positions(read_config(directory))
    if (limit := usable.limit) is not None and longest > limit:
        raise RolloutError(
            f"rollout.max_tokens: prompts of {max_prompt} and responses of {rollout.max_tokens} tokens make "
            f"{longest}, the model has {limit} positions; write {limit - max_prompt} or less"
        )
    return ENGINES[rollout.engine](
        EngineArguments(
            rollout,
            directory,
            dtype,
            device,
            longest,
            usable,
            seed,
            name,
            repeatable,
            head_float32,
            routes,
            trained,
            token_budget,
            pictures,
        )
    )


# Engines are imported when they are asked for: each brings packages that the others do not need.


# On a processor, kernels of their recurrent layers end in an assertion where the type is another.
_BFLOAT16_ON_CPU = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


def _vllm(plan: EngineArguments) -> RolloutEngine:
    from isotrain.rollout.vllm import VllmEngine

    kind = text_config(read_config(plan.directory)).model_type
    if plan.device.type == "cpu" and plan.dtype != "bfloat16" and kind in _BFLOAT16_ON_CPU:
        raise RolloutError(
            f"rollout.engine: on a CPU, vLLM computes recurrent layers of model type '{kind}' in bfloat16 "
            "only; set rollout.engine: hf, or model.dtype: bfloat16"
        )

    max_length = plan.room(1)  # scoring a whole sequence, it writes a token after it
    # What vLLM calls it, and reads in the model's configuration.
    head = {"head_dtype": "float32"} if plan.head_float32 else {}
    changes = {**(plan.positions.config_changes or {}), **head}
    return VllmEngine(
        plan.directory,
        max_length=max_length,
        load_format=plan.rollout.load_format,
        seeded=plan.seeded,
        pictures=plan.pictures,
        options=plan.rollout.engine_options,
        **{**plan.server, "seed": plan.engine_seed, "config_changes": changes},
    )


def _sglang(plan: EngineArguments) -> RolloutEngine:
    from isotrain.rollout.sglang import SglangEngine

    if plan.head_float32 and plan.device.type == "cpu":
        raise RolloutError(
            "model.head_dtype (float32): on a CPU, SGLang's float32 head multiplies weights that were packed "
            "for AMX, as if they were not; set rollout.engine: vllm or hf, or remove head_dtype"
        )
    if plan.pictures:
        raise RolloutError("rollout.engine: sglang is not given pictures yet; set vllm or hf")
    max_length = plan.room(8)  # it cuts responses 2 before the end, and refuses prompts of the last 7
    return SglangEngine(
        plan.directory,
        max_length=max_length,
        python=plan.rollout.server_python,
        head_float32=plan.head_float32,
        **plan.server,
    )


def _hf(plan: EngineArguments) -> RolloutEngine:
    from isotrain.rollout.hf import HfEngine

    exact = None
    if plan.rollout.exact:
        from isotrain.engine.build import build_alone

        assert plan.trained is not None, "how the ranks compute the model"
        exact = build_alone(plan.trained, device=plan.device)
    return HfEngine(
        plan.directory,
        name=plan.name,
        dtype=plan.dtype,
        head_float32=plan.head_float32,
        device=plan.device.activate(0),
        routes=plan.routes,
        exact=exact,
        token_budget=plan.token_budget,
        update_timeout=plan.rollout.update_timeout,
    )


ENGINES: dict[str, Callable[[EngineArguments], RolloutEngine]] = {"vllm": _vllm, "sglang": _sglang, "hf": _hf}
