"""Type checkers see through calls to workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

GOOD = """
from isotrain.cluster.workers import WorkerGroup
from isotrain.trainers.online.engines import Engines
from isotrain.trainers.online.messages import RankPlan
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.weights.send import SendOrder, Sent


def step(
    ranks: WorkerGroup[PolicyRank], engines: Engines, plans: list[RankPlan], order: SendOrder
) -> None:
    lost: list[list[int]] = ranks.call_each(PolicyRank.load, plans)
    sent: Sent = ranks.within(60).call_on(0, PolicyRank.send_weights, order)
    engines.on_all(RolloutWorker.sleep, 60)
"""
WRONG = {
    "ranks.call_each(PolicyRank.load, [3])": "arg-type",
    'ranks.within(60).call_on(0, PolicyRank.send_weights, "3")': "arg-type",
    "ranks.call(PolicyRank.send_weights)": "call-arg",
    "ranks.call(PolicyRank.send_weights, order, timeout=60)": "call-arg",
    "ranks.call(RolloutWorker.sleep)": "arg-type",
    'ranks.call("send_weights", order)': "arg-type",
    "version: str = engines.group.call_on(0, RolloutWorker.update, sent.update)": "assignment",
    "engines.on_all(RolloutWorker.update, 60)": "arg-type",
    "ranks.stream(0, PolicyRank.send_weights, order)": "arg-type",
}


@pytest.mark.heavy
def test_wrong_arguments_to_a_worker_are_found(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(
        GOOD + "    assert sent.update is not None\n" + "".join(f"    {line}\n" for line in WRONG)
    )
    found, problems, _ = api.run(["--strict", "--no-error-summary", "--hide-error-context", str(file)])
    assert not problems, problems
    first = GOOD.count("\n") + 2
    codes: dict[int, set[str]] = {}
    for line in found.splitlines():
        if ": error: " in line:
            codes.setdefault(int(line.split(":")[1]), set()).add(line.rpartition("[")[2].rstrip("]"))
    assert sorted(codes) == list(range(first, first + len(WRONG))), found
    for number, code in enumerate(WRONG.values(), start=first):
        assert code in codes[number], found
