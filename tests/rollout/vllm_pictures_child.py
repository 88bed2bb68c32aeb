"""Gives pictures to vLLM and prints what it found: `python vllm_pictures_child.py WORK ARCHITECTURE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from isotrain.data.pictures import Picture, PictureProcessor
from isotrain.data.prepare.tiny_vision import make_tiny_vision
from isotrain.errors import WeightUpdateError
from isotrain.models.conversion import Publisher
from isotrain.rollout import vllm_pictures
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.vllm import VllmEngine
from isotrain.weights.check import TOLERANCE, WeightCheck
from isotrain.weights.file import write_update

Prompt = tuple[np.ndarray, tuple[Picture, ...]]


class Child:
    def __init__(self, work: Path, architecture: Any) -> None:
        make_tiny_vision(work, train_rows=8, validation_rows=1, architecture=architecture)
        directory = work / "model"
        self.process = PictureProcessor.of_model(directory)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self.publish, self.version = Publisher(self.model), 0
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        table = pyarrow.parquet.read_table(work / "pictures.parquet").to_pylist()
        files = [row["images"][0]["bytes"] for row in table]
        # One picture, two pictures, and a text: the last has nothing for the tower.
        self.prompts = [self.prompt(tokenizer, files[a:b]) for a, b in ((0, 1), (1, 2), (2, 4), (0, 0))]
        self.engine = VllmEngine(
            directory,
            name="engine 7",
            dtype="float32",
            device_type="cpu",
            max_length=128,
            cache_bytes=1 << 27,
            pictures=2,
            update_timeout=60.0,
        )

    def prompt(self, tokenizer: Any, files: Sequence[bytes]) -> Prompt:
        parts = [{"type": "image"}] * len(files) + [{"type": "text", "text": "What?"}]
        said = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        waiting, tokens, pictures = iter(files), list[int](), list[Picture]()
        for token in tokenizer(said, add_special_tokens=False)["input_ids"]:
            if token == self.pad:
                pictures.append(self.process(next(waiting), len(tokens)))
            tokens += [token] * (pictures[-1].tokens if token == self.pad else 1)
        return np.array(tokens, np.int32), tuple(pictures)

    def forward(self, tokens_T: np.ndarray, pictures: Sequence[Picture]) -> np.ndarray:
        """transformers' own log-probs."""
        ids = torch.from_numpy(tokens_T).long()[None]
        seen: dict[str, Any] = {}
        if pictures:
            patches = np.concatenate([self.process.normalised(picture.patches_PD) for picture in pictures])
            seen = {
                "pixel_values": torch.from_numpy(patches),
                "image_grid_thw": torch.tensor([picture.grid for picture in pictures]),
                "mm_token_type_ids": (ids == self.pad).int(),
            }
        with torch.no_grad():
            logp_TV = self.model(input_ids=ids, **seen).logits[0, :-1].log_softmax(-1)
        return np.asarray(logp_TV.gather(1, ids[0, 1:, None])[:, 0])

    def scored(self) -> float:
        """Largest difference of log-probs of the prompts."""
        logps = self.engine.logps([p[0] for p in self.prompts], [p[1] for p in self.prompts])
        pairs = zip(self.prompts, logps, strict=True)
        return max(float(np.abs(self.forward(*prompt) - logp_T).max()) for prompt, logp_T in pairs)

    def requests(self, n: int) -> list[Request]:
        return [
            Request(row, row, sample, seed=100 * row + sample, prompt_P=tokens_T, pictures=pictures)
            for row, (tokens_T, pictures) in enumerate(self.prompts)
            for sample in range(n)
        ]

    def generated(self, n: int, more: Callable[[], Sequence[Request]] = tuple) -> list[tuple[Any, float]]:
        """Trajectories and their largest differences."""
        found = []
        for trajectory in self.engine.generate(self.requests(n), Sampling(max_tokens=8), more):
            # transformers takes it for a picture, wherever it stands.
            if (trajectory.response_N == self.pad).any():
                continue
            ours = self.forward(trajectory.tokens_T, self.prompts[trajectory.row][1])
            gap = np.abs(ours[trajectory.prompt_length - 1 :] - trajectory.logp_N).max()
            found.append((trajectory, float(gap)))
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield from self.publish(name, parameter.detach())

    def update(self, part: str, without: str = "") -> None:
        """Change the weights whose names have `part`, and send all."""
        self.version += 1
        draw = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if part in name:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
        kept = ((name, tensor) for name, tensor in self.tensors() if not without or without not in name)
        self.engine.update_weights(write_update(kept, self.version))


def vllm_model(child: Child) -> Any:
    core = child.engine.llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.get_model()


def encoded_once(child: Child) -> list[int]:
    """Pictures that the tower sees for groups of eight with the same pictures."""
    model, counts = vllm_model(child), list[int]()
    inner = model.embed_multimodal

    def counted(**inputs: Any) -> Any:
        counts.append(len(inputs["image_grid_thw"]))
        return inner(**inputs)

    model.embed_multimodal = counted
    child.update("visual")
    for _ in child.engine.generate(child.requests(8), Sampling(max_tokens=4)):
        pass
    model.embed_multimodal = inner
    return counts


def in_flight(child: Child) -> dict[str, Any]:
    """The tower changes between two tokens; then the same pictures come again."""
    calls = 0

    def more() -> Sequence[Request]:
        nonlocal calls
        calls += 1
        if calls != 4:
            return ()
        child.update("visual")
        return child.requests(1)

    before = child.engine.version
    found = child.generated(1, more)
    after = [gap for trajectory, gap in found if (trajectory.version_N == before + 1).all()]
    mixed = sum(len(set(trajectory.version_N.tolist())) > 1 for trajectory, _ in found)
    return {"after": after, "mixed": mixed, "scored": child.scored()}


def unsalted(child: Child) -> dict[str, Any]:
    """What an engine does whose hashes do not name the weights, and what the weight check says of it."""
    inner = vllm_pictures.picture_hash
    vllm_pictures.picture_hash = lambda picture, salt: picture.digest
    check = WeightCheck(TOLERANCE["float32"])

    def problem() -> str:
        child.update("visual")
        prompts = child.prompts[:1]
        logps = child.engine.logps([p[0] for p in prompts], [p[1] for p in prompts])
        return check.problem(0, child.version, logps[0], child.forward(*prompts[0]))

    try:
        first, second = problem(), problem()
    finally:
        vllm_pictures.picture_hash = inner
    return {"problems": [first, second], "after": child.scored()}


def twice(child: Child) -> float:
    """Log-probs if vLLM normalised as well, which it does by itself."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

    config = child.engine.llm.llm_engine.vllm_config
    norms = {n: m for n, m in vllm_model(child).named_modules() if type(m).__name__ == "IdentityInputNorm"}
    config.model_config.multimodal_config.mm_device_do_normalize = True
    for name in norms:
        with set_current_vllm_config(config):
            vllm_model(child).set_submodule(name, build_mm_input_norm(config.model_config))
    child.update("nothing")
    gap = child.scored()
    for name, norm in norms.items():
        vllm_model(child).set_submodule(name, norm)
    child.update("nothing")
    return gap


def main(work: Path, architecture: str) -> None:
    child = Child(work, architecture)
    results: dict[str, Any] = {"start": [child.scored(), max(gap for _, gap in child.generated(2))]}
    other = child.prompts[0][0], child.prompts[1][1]
    results["other picture"] = float(np.abs(child.forward(*other) - child.forward(*child.prompts[0])).max())
    updates = []
    for part in ("visual", "", "visual"):
        before = child.forward(*child.prompts[0])
        child.update(part)
        moved = float(np.abs(child.forward(*child.prompts[0]) - before).max())
        updates.append((child.scored(), max(gap for _, gap in child.generated(2)), moved))
    results["updates"] = updates
    results["digests"] = [
        list(t.pictures) == [p.digest for p in child.prompts[t.row][1]] for t, _ in child.generated(1)
    ]
    results["in flight"] = in_flight(child)
    results["encoded"] = encoded_once(child)
    results["unsalted"] = unsalted(child)
    try:
        child.update("visual", without="visual.blocks.1.attn.qkv.weight")
    except WeightUpdateError as error:
        results["missing"] = str(error)
    child.update("visual")
    results["after missing"] = child.scored()
    print(json.dumps(results), flush=True)
    results["twice"] = [twice(child), child.scored()]
    child.engine.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
