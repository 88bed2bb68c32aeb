"""Rows of the contract that tests ask for with other models, workers and versions too."""

from __future__ import annotations

from typing import Any

TOLERANCE = 1e-4
BAD = (
    "truncated",
    "flipped",
    "not delivered",
    "without self_attn.k_proj",
    "without mlp.up_proj",
    "without model.norm",
    "without input_layernorm",
    "without embed_tokens",
    "skipped",
    "wrong shape",
)


def check_same_weights(found: dict[str, Any]) -> None:
    updates = found["updates"]
    assert len(updates) == 10
    worst = {kind: max(update[kind] for update in updates) for kind in ("sampled", "probed")}
    print(f"largest mean difference of log-probs over {len(updates)} updates: {worst}")
    assert max(worst.values()) <= TOLERANCE
    for update in updates:
        assert update["versions"] == [update["version"]] == [update["expected"]]
        assert all(update["lengths"])


def check_bad_update(found: dict[str, Any], name: str) -> None:
    bad = found["bad"][name]
    assert bad["error"].startswith("WeightUpdateError: engine 7: ")
    assert bad["seconds"] < 20
    assert bad["refused"].startswith("RolloutError: engine 7 does not generate: ")
    assert bad["version_kept"]
    assert bad["difference_after"] <= TOLERANCE


def check_listening(found: dict[str, Any]) -> None:
    assert {address.rpartition(":")[0] for address in found["listening"]} <= {"127.0.0.1", "[::1]"}
