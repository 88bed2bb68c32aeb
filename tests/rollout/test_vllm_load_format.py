"""vLLM starts with random weights, which it never generates with, and never reads pickled ones."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CHILD = """
    import sys
    from pathlib import Path
    import numpy as np, torch
    from transformers import AutoModelForCausalLM
    from isotrain.device.detect import choose_device
    from isotrain.errors import RolloutError
    from isotrain.recipe.online import RolloutSection
    from isotrain.rollout.build import build_rollout
    from isotrain.weights.file import write_update

    directory, section = Path(sys.argv[1]), RolloutSection(
        max_tokens=8, kv_cache_gb=0.1, engine_options={"max_num_seqs": 3}
    )
    common = {"device": choose_device("cpu"), "max_prompt": 16, "seed": 0, "name": "e"}
    engine = build_rollout(section, str(directory), "float32", **common)
    assert engine.at_once == 3 and engine.settings["max_num_seqs"] == "3"
    tokens_T = np.arange(3, 15, dtype=np.int32)
    try:
        engine.logps([tokens_T])
        raise SystemExit("it generates with random weights")
    except RolloutError as error:
        assert "its weights are random until the first update" in str(error), error
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine.update_weights(write_update(model.named_parameters(), 1))
    logits_TV = model(torch.from_numpy(tokens_T).long()[None]).logits[0, :-1].float()
    wanted = logits_TV.log_softmax(-1).gather(1, torch.from_numpy(tokens_T[1:]).long()[:, None])[:, 0]
    found = engine.logps([tokens_T])[0]
    print("difference", float(np.abs(found - wanted.detach().numpy()).max()))
    engine.close()
"""


def run(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHILD), str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_random_weights_are_replaced_before_the_first_response(tiny: Path) -> None:
    done = run(tiny / "model")
    assert done.returncode == 0, done.stderr
    (difference,) = [line for line in done.stdout.splitlines() if line.startswith("difference")]
    assert float(difference.split()[1]) < 1e-4
