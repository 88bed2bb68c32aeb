"""One vLLM engine over two workers, as a run has it, in a process that no simulated device is loaded in.

`python two_workers_child.py WORK` makes a tiny model in WORK; its last line of output is the result as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from online_runs import online_recipe
from transformers import AutoModelForCausalLM

from isotrain.cluster.connect import join_cluster
from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.objects import fetch
from isotrain.cluster.placement import Demand, engine_environments, place
from isotrain.cluster.workers import Member, WorkerGroup, next_item
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.rollout.base import Sampling
from isotrain.trainers.build import TRAIN
from isotrain.trainers.online.engines import Engines, Weights
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.weights.check import Tolerance
from isotrain.weights.file import write_update

CHECK_T = np.arange(3, 35, dtype=np.int32)


class Checks:
    def __init__(self, work: Path, engines: Engines) -> None:
        self.engines, self.version, self.results = engines, 0, dict[str, Any]()
        self.model: Any = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)

    def forward(self, tokens_T: np.ndarray) -> np.ndarray:
        ids_T = torch.from_numpy(tokens_T).long()
        with torch.no_grad():
            logp_TV = self.model(ids_T[None]).logits[0, :-1].log_softmax(-1)
        return logp_TV.gather(1, ids_T[1:, None])[:, 0].numpy()

    def update(self) -> float:
        """A good deal further; returns the largest difference in the weight check."""
        self.version += 1
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        update = write_update(self.model.named_parameters(), self.version)
        self.engines.send(Weights(self.version, [update], self.forward(CHECK_T)))
        return self.engines.settle()

    def responses(self) -> float:
        """The largest mean difference of a response's log-probs from those of a plain forward."""
        prompt_requests = [PromptRequest(prompt_index, prompt_index) for prompt_index in range(4)]
        task = self.engines.stream(0, RolloutWorker.generate, TRAIN, prompt_requests, 2, Sampling(12))
        handles = []
        while True:
            try:
                handles.append(next_item(self.engines.group, task.work)[1])
            except StopIteration:
                break
        found = [trajectory for group in fetch(handles) for trajectory in group or ()]
        assert len(found) == 8
        return max(
            float(np.abs(self.forward(t.tokens_T)[t.prompt_length - 1 :] - t.logp_N).mean()) for t in found
        )

    def weights(self) -> None:
        (before,) = self.engines.group.call(RolloutWorker.weight_check, [CHECK_T])
        first = self.update()
        (after,) = self.engines.group.call(RolloutWorker.weight_check, [CHECK_T])
        self.results["weights"] = {
            "moved": float(np.abs(after - before).mean()),
            "weight_check": max(first, self.update()),
            "responses": self.responses(),
        }

    def kill(self, number: int) -> None:
        """One of the processes that vLLM has started."""
        (engine,) = self.engines.group.locations
        children = psutil.Process(engine.pid).children(recursive=True)
        workers = [child for child in children if "Worker" in " ".join(child.cmdline())]
        assert len(workers) == 2, [child.cmdline() for child in children]
        os.kill(workers[number].pid, signal.SIGKILL)

    def killed_idle(self) -> None:
        self.kill(1)
        self.update()
        self.results["idle"] = {
            "weight_check": self.update(),
            "responses": self.responses(),
            "deaths": list(self.engines.deaths),
        }

    def killed_generating(self) -> None:
        prompt_requests = [PromptRequest(prompt_index, prompt_index) for prompt_index in range(16)]
        task = self.engines.stream(0, RolloutWorker.generate, TRAIN, prompt_requests, 4, Sampling(400))
        time.sleep(1.0)
        self.kill(0)
        try:
            while True:
                next_item(self.engines.group, task.work)
        except WorkerDied as death:
            self.engines.replace(task, death)
            told = str(death)
        self.results["generating"] = {
            "told": told,
            "weight_check": self.update(),
            "responses": self.responses(),
            "deaths": list(self.engines.deaths),
        }


def main() -> None:
    work = Path(sys.argv[1])
    make_tiny(work, hidden=128, heads=4, kv_heads=2, train_rows=20, validation_rows=2)
    recipe = online_recipe(
        work,
        work / "run",
        device={"type": "cpu", "ranks": 2},
        rollout={"engine": "vllm", "n": 2, "max_tokens": 400, "tensor_parallel": 2, "kv_cache_gb": 0.25},
    )
    device, demand = choose_device("cpu"), Demand(ranks=2, engines=1, tensor_parallel=2)
    with (
        join_cluster(ClusterSection(address="local"), device, cpus=2) as joined,
        place(joined, device, demand, 60.0) as placement,
    ):
        (environment,) = engine_environments(placement.engines, device)
        member = Member((resolved(recipe), "rollout engine 0"), environment, placement.engines[0])
        with WorkerGroup("rollout engine", RolloutWorker, [member]) as group:
            group.within(300).call(RolloutWorker.start)
            said: list[str] = []
            exact = Tolerance.fixed(1e-3)
            engines = Engines(
                group, 300.0, said.append, check_prompts=[CHECK_T], timeout=60.0, tolerance=exact
            )
            checks = Checks(work, engines)
            checks.weights()
            checks.killed_idle()
            checks.killed_generating()
            print(json.dumps(checks.results | {"said": said}))


if __name__ == "__main__":
    main()
