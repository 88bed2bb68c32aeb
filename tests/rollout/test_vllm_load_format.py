"""vLLM starts with random weights, which it never generates with, and with the head that it is asked for."""

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


HEAD = """
    import sys
    from pathlib import Path
    import numpy as np, torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM
    from isotrain.device.detect import choose_device
    from isotrain.recipe.online import RolloutSection
    from isotrain.rollout.build import build_rollout
    from isotrain.weights.file import write_update

    directory, wide = Path(sys.argv[1]), sys.argv[2] == "float32"
    common = {"device": choose_device("cpu"), "max_prompt": 40, "seed": 0, "name": "e", "head_float32": wide}
    section = RolloutSection(max_tokens=8, kv_cache_gb=0.1)
    engine = build_rollout(section, str(directory), "bfloat16", **common)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight *= 30  # logits of tens, of which bfloat16 has steps of an eighth
    tokens_T = np.arange(3, 35, dtype=np.int32)
    engine.update_weights(write_update(model.named_parameters(), 1))
    ids_T = torch.from_numpy(tokens_T).long()
    with torch.no_grad():
        hidden_TD = model.get_decoder()(ids_T[None]).last_hidden_state[0, :-1]
        logits_TV = F.linear(hidden_TD.float(), model.lm_head.weight.float())
    logp_T = logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].numpy()
    print("difference", float(np.abs(engine.logps([tokens_T])[0] - logp_T).mean()))
    engine.close()
"""


def run(model: Path, code: str = CHILD, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(model), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_random_weights_are_replaced_before_the_first_response(tiny: Path) -> None:
    done = run(tiny / "model")
    assert done.returncode == 0, done.stderr
    (difference,) = [line for line in done.stdout.splitlines() if line.startswith("difference")]
    assert float(difference.split()[1]) < 1e-4


def test_a_float32_head_rounds_no_logits(tiny: Path) -> None:
    differences = {}
    for dtype in ("float32", "model"):
        done = run(tiny / "model", HEAD, dtype)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("difference")]
        differences[dtype] = float(line.split()[1])
    assert differences["float32"] < differences["model"] / 2, differences
