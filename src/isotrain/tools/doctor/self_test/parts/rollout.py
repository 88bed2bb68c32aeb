"""The generation engine beside the same model on the host: start, generation, weight updates, sleep.

P: prompt tokens, N: response tokens, T: both.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from isotrain.device.detect import choose_device
from isotrain.errors import WeightUpdateError
from isotrain.recipe.online import RolloutSection
from isotrain.rollout.base import Request, RolloutEngine, Sampling
from isotrain.rollout.build import build_rollout
from isotrain.tools.doctor.self_test.verdicts import (
    Reporter,
    SelfTestSetting,
    Stage,
    StageFailed,
    StageSkipped,
    own_setting,
)
from isotrain.weights.file import write_update

PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9, 17, 30)]
SAMPLING = Sampling(max_tokens=24, temperature=0.8)
# Mean differences of log-probs; an update changes them by more than ten times as much.
ALLOWED = {"float32": 1e-3, "bfloat16": 5e-2}
CHANGE = 0.03


class HostModel:
    """The model on the host, in float32 with weights that the engine's type holds exactly."""

    def __init__(self, setting: SelfTestSetting) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(setting.tiny / "model", dtype=torch.float32)
        self.model, self.dtype = model, getattr(torch, setting.dtype)
        self.version = 0
        self._round()

    @torch.no_grad()
    def change(self) -> None:
        """As an optimizer does, in one large step."""
        self.version += 1
        draw = torch.Generator().manual_seed(self.version)
        for parameter in self.model.parameters():
            parameter += CHANGE * torch.randn(parameter.shape, generator=draw)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(parameter.to(self.dtype))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(self.dtype)

    @torch.no_grad()
    def logps(self, tokens_T: npt.NDArray[np.int32], temperature: float = 1.0) -> npt.NDArray[np.float32]:
        """Log-probs of the tokens from the second on."""
        ids_1T = torch.from_numpy(tokens_T).long()[None]
        logits_TV = self.model(ids_1T).logits[0, :-1] / temperature
        logps: npt.NDArray[np.float32] = (
            logits_TV.log_softmax(-1).gather(1, ids_1T[0, 1:, None])[:, 0].numpy()
        )
        return logps


class EngineCheck:
    def __init__(self, setting: SelfTestSetting) -> None:
        self.setting, self.reporter = setting, Reporter(setting.verdicts)
        self.allowed = ALLOWED[setting.dtype]
        self.device = choose_device(setting.device)
        self.host = HostModel(setting)

    def start(self, eager: bool, tensor_parallel: int = 1) -> RolloutEngine:
        section = RolloutSection(
            engine=self.setting.engine,
            max_tokens=SAMPLING.max_tokens,
            eager=eager,
            tensor_parallel=tensor_parallel,
            memory_utilization=0.3,
            kv_cache_gb=0.25,
            load_format="safetensors",
            update_timeout=60.0,
        )
        path, prompt = str(self.setting.tiny / "model"), max(map(len, PROMPTS))
        return build_rollout(
            section,
            path,
            self.setting.dtype,
            device=self.device,
            max_prompt=prompt,
            seed=0,
            name=self.setting.engine,
        )

    def agrees(self, stage: Stage, engine: RolloutEngine, when: str) -> None:
        """Compare its samples and its log-probs of whole sequences with the host's model of this version."""
        requests = [
            Request(row=row, prompt_index=row, sample=sample, seed=100 * row + sample, prompt_P=prompt_P)
            for row, prompt_P in enumerate(PROMPTS)
            for sample in range(2)
        ]
        responses = list(engine.generate(requests, SAMPLING))
        if len(responses) != len(requests):
            raise StageFailed(f"{len(responses)} responses for {len(requests)} requests {when}")
        sampled = [
            np.abs(self.host.logps(t.tokens_T, SAMPLING.temperature)[t.prompt_length - 1 :] - t.logp_N).mean()
            for t in responses
        ]
        stage.at_most(f"difference of sampled log-probs {when}", float(np.mean(sampled)), self.allowed)
        stage.at_most(f"difference of log-probs {when}", self.difference(engine), self.allowed)
        versions = {int(version) for t in responses for version in t.version_N}
        if versions != {self.host.version}:
            raise StageFailed(f"responses of weight version {versions} {when}, not {self.host.version}")

    def difference(self, engine: RolloutEngine) -> float:
        pairs = zip(PROMPTS, engine.logps(PROMPTS), strict=True)
        return float(np.mean([np.abs(self.host.logps(tokens_T) - logps).mean() for tokens_T, logps in pairs]))

    def update(self, stage: Stage, engine: RolloutEngine) -> None:
        """Weights so different that old ones would be noticed."""
        before = [self.host.logps(tokens_T) for tokens_T in PROMPTS]
        self.host.change()
        changes = [np.abs(self.host.logps(t) - b).mean() for t, b in zip(PROMPTS, before, strict=True)]
        stage.at_least("change of log-probs by an update", float(np.mean(changes)), 10 * self.allowed)
        engine.update_weights(write_update(self.host.tensors(), self.host.version))
        self.agrees(stage, engine, f"after update {self.host.version}")

    def refuses(self, engine: RolloutEngine) -> None:
        update = write_update(self.host.tensors(), self.host.version + 1)
        try:
            engine.update_weights(replace(update, digest="0" * 64))
        except WeightUpdateError:
            return
        raise StageFailed("the engine took a weight update whose digest is wrong")

    def sleep(self, stage: Stage, engine: RolloutEngine) -> None:
        if self.device.type == "cpu":
            raise StageSkipped("on the host engines do not sleep: there is no device memory to give back")
        before = self.device.memory().free
        engine.sleep()
        freed = self.device.memory().free - before
        weights = sum(tensor.numel() * tensor.element_size() for _, tensor in self.host.tensors())
        stage.at_least("bytes that a sleeping engine frees", float(freed), 0.9 * weights)
        engine.wake()
        self.update(stage, engine)
        stage.result = f"{freed / 2**20:.1f} MB freed, {_worst(stage)}"


@contextmanager
def closed(engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """The engine, closed at the end; that it cannot be closed must not hide what happened before."""
    try:
        yield engine
    finally:
        try:
            engine.close()
        except Exception:
            traceback.print_exc()


def main() -> None:
    check = EngineCheck(own_setting())
    {"": all_stages, "graphs": graphs, "tensor-parallel": tensor_parallel}[check.setting.mode](check)


def all_stages(check: EngineCheck) -> None:
    stage_of = check.reporter.stage
    with stage_of("engine-start") as stage:
        engine = check.start(eager=True)
        stage.result = ", ".join(f"{name} {value}" for name, value in engine.settings.items()) or "started"
    with closed(engine):
        with stage_of("generation") as stage:
            check.agrees(stage, engine, "before any update")
            stage.result = _worst(stage)
        with stage_of("weight-update") as stage:
            check.update(stage, engine)
            check.refuses(engine)
            check.update(stage, engine)
            stage.result = f"2 taken, 1 with a wrong digest refused, {_worst(stage)}"
        with stage_of("sleep") as stage:
            check.sleep(stage, engine)


def graphs(check: EngineCheck) -> None:
    with check.reporter.stage("graphs") as stage, closed(check.start(eager=False)) as engine:
        check.agrees(stage, engine, "before any update")
        for _ in range(2):
            check.update(stage, engine)
        stage.result = f"2 updates, {_worst(stage)}"


def tensor_parallel(check: EngineCheck) -> None:
    with (
        check.reporter.stage("tensor-parallel") as stage,
        closed(check.start(eager=True, tensor_parallel=2)) as engine,
    ):
        check.agrees(stage, engine, "before any update")
        check.update(stage, engine)
        stage.result = f"1 update, {_worst(stage)}"


def _worst(stage: Stage) -> str:
    worst = max(value for name, value in stage.metrics.items() if name.startswith("difference"))
    return f"log-probs within {worst:.1e} of the host's"


if __name__ == "__main__":
    main()
