"""Makes `msprobe_dumps.tar.xz` with the published msprobe on this machine's CPU; tests only read it.

    pip install mindstudio-probe
    python tests/tools/parity/levels/make_msprobe_dumps.py tests/tools/parity/levels/msprobe_dumps.tar.xz

Each dump has one or two steps of a Llama with two layers. Call stacks are left out: they have this machine's
paths.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    level: str = "mix"
    attention: str = "sdpa"
    dtype: str = "float32"
    scale: float = 1.0
    """Factor on the attention scale of the second layer; the mistake."""
    seed: int = 1
    """Of the tokens."""
    summary: str = "statistics"
    micro_batches: int = 1
    steps: int = 1


VARIANTS = {
    "reference": Variant(steps=2),
    "other-kernels": Variant(attention="eager", steps=2),
    "scale": Variant(scale=1.1),
    "scale-2-percent": Variant(scale=1.02),
    "reference-bf16": Variant(dtype="bfloat16"),
    "other-kernels-bf16": Variant(dtype="bfloat16", attention="eager"),
    "scale-bf16": Variant(dtype="bfloat16", scale=1.1),
    "modules": Variant(level="L0", steps=2),
    "modules-scale": Variant(level="L0", scale=1.1),
    "apis": Variant(level="L1"),
    "apis-scale": Variant(level="L1", scale=1.1),
    "other-tokens": Variant(seed=2),
    "checksums": Variant(level="L0", summary="md5"),
    "accumulated": Variant(level="L0", micro_batches=2),
    "accumulated-other-kernels": Variant(level="L0", micro_batches=2, attention="eager"),
}


def dump(variant: Variant, directory: Path) -> None:
    """In a process of its own: msprobe has one debugger in each."""
    import torch
    from msprobe.pytorch import PrecisionDebugger
    from transformers import LlamaConfig, LlamaForCausalLM

    config = directory.with_suffix(".json")
    settings = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": variant.summary}
    config.write_text(
        json.dumps(
            {
                "task": "statistics",
                "dump_path": str(directory),
                "rank": [],
                "step": [],
                "level": variant.level,
                "statistics": settings,
            }
        )
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            # Large enough that attention is not a plain average.
            initializer_range=0.2,
            attn_implementation=variant.attention,
        )
    ).to(getattr(torch, variant.dtype))
    model.model.layers[1].self_attn.scaling *= variant.scale
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(variant.seed)
    debugger = PrecisionDebugger(config_path=str(config))
    for _ in range(variant.steps):
        debugger.start(model=model)
        for _ in range(variant.micro_batches):
            tokens = torch.randint(0, 64, (2, 16), generator=draw)
            model(input_ids=tokens, labels=tokens).loss.backward()
        debugger.stop()
        debugger.step()
        optimizer.step()
        optimizer.zero_grad()


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        for name, variant in VARIANTS.items():
            if (child := os.fork()) == 0:
                try:
                    dump(variant, Path(work, name))
                except BaseException as error:
                    print(name, repr(error), file=sys.stderr)
                    os._exit(1)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                raise SystemExit(f"{name} could not be dumped")
        with tarfile.open(archive, "w:xz", preset=9) as file:
            for path in sorted(Path(work).glob("*/**/*.json")):
                if path.name != "stack.json":
                    member = file.gettarinfo(path, str(path.relative_to(work)))
                    member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
                    with path.open("rb") as content:
                        file.addfile(member, content)


if __name__ == "__main__":
    import msprobe.pytorch  # noqa: F401  once, before the processes are forked
    import transformers  # noqa: F401

    main(Path(sys.argv[1]))
