"""The contract with vLLM, and what a look into it shows: `python vllm_child.py WORK TENSOR_PARALLEL`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from contract_checks import Checks, requests
from vllm import LLM

from isotrain.children import in_background
from isotrain.rollout.base import Sampling
from isotrain.rollout.vllm import VllmEngine
from isotrain.weights.devices import BroadcastTransport, HostCarrier
from isotrain.weights.digest import HOST, Contents
from isotrain.weights.file import write_update
from isotrain.weights.transport import open_incoming
from isotrain.weights.update import WeightUpdate


class VllmChecks(Checks):
    engine: VllmEngine

    def __init__(self, work: Path, tensor_parallel: int) -> None:
        # The smallest blocks that there are on the host: prompts of the contract share some.
        with mock.patch("vllm.LLM", partial(LLM, block_size=32)):
            # A head of its own where there are several workers.
            super().__init__(work, "vllm", tied=tensor_parallel == 1, tensor_parallel=tensor_parallel)
        self.workers = tensor_parallel

    def nothing_left(self) -> None:
        iterator = self.engine.generate(requests(8), Sampling(max_tokens=40))
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
        scheduler = self.engine._engine.engine_core.engine_core.scheduler
        self.results["left"] = [
            self.engine._engine.get_num_unfinished_requests(),
            scheduler.get_num_unfinished_requests(),
        ]

    def reports(self) -> None:
        """A worker that has read or taken something else than was announced."""

        @contextmanager
        def other_file(*given: Any) -> Iterator[Contents]:
            with open_incoming(*given) as contents:
                yield replace(contents, digest="of another file")

        def other_count(*_: Any, **__: Any) -> list[dict[str, Any]]:
            return [{"version": update.version, "tensors": 3, "digest": update.digest, "error": ""}]

        update = write_update(self.tensors(), self.version + 1)
        found = self.results["reports"] = {}
        if self.workers == 1:  # in this process
            with mock.patch("isotrain.weights.second_buffer.open_incoming", other_file):
                found["digest"] = self.error(lambda: self.engine.update_weights(update))
        with mock.patch.object(self.engine._llm, "collective_rpc", other_count):
            found["tensors"] = self.error(lambda: self.engine.update_weights(update))
        self.update()

    def sent(self) -> None:
        """Weights that arrive one by one, at all workers; and a sender that gives up in the middle."""
        self.version += 1
        self.perturb()
        sender = BroadcastTransport().open("127.0.0.1", self.workers, 60.0, HOST)
        announced = sender.announce(self.version, 0, 60.0)
        sending = in_background(lambda: sender.send(self.tensors(), self.version))
        self.engine.update_weights(announced)
        tokens_T = requests(1)[0].prompt_P
        self.results["sent"] = {
            "tensors": [sending.result().tensors, sum(1 for _ in self.tensors())],
            "versions": [self.engine.version, self.version],
            "difference": self.scored_difference([tokens_T], self.engine.logps([tokens_T])),
        }

        def half() -> Iterator[Any]:
            yield from list(self.tensors())[:5]
            raise ValueError("no more")

        failed = sender.announce(self.version + 1, 0, 60.0)
        sending = in_background(lambda: sender.send(half(), self.version + 1))
        self.results["half"] = [
            self.error(lambda: self.engine.update_weights(failed)),
            repr(sending.exception()),
            self.error(lambda: self.engine.logps([tokens_T])),
        ]
        self.update()
        again = self.scored_difference([tokens_T], self.engine.logps([tokens_T]))
        self.results["after_half"] = again

    def buffered(self) -> None:
        """Weights that come while responses are written, and wait for their end."""
        self.version, before = self.version + 1, self.version
        self.perturb()
        sender = BroadcastTransport().open("127.0.0.1", self.workers, 60.0, HOST)
        announced = sender.announce(self.version, 0, 60.0)

        def send() -> WeightUpdate:
            # Many buckets, of which each worker keeps its own.
            with mock.patch.object(HostCarrier, "bucket_bytes", 1 << 14):
                return sender.send(self.tensors(), self.version)

        sending = in_background(send)
        begun: list[str] = []

        def more() -> list[Any]:
            if not begun:
                begun.append("receiving")
                self.engine.receive(announced)
            return []

        written = list(self.engine.generate(requests(4), Sampling(max_tokens=16), more))
        sent = sending.result()
        whole = replace(announced, tensors=sent.tensors, bytes=sent.bytes, digest=sent.digest)
        self.engine.update_weights(whole)
        tokens_T = requests(1)[0].prompt_P
        self.results["buffered"] = {
            "while": [sorted({int(v) for t in written for v in t.version_N}), [before]],
            "versions": [self.engine.version, self.version],
            "difference": self.scored_difference([tokens_T], self.engine.logps([tokens_T])),
        }

    def stale(self) -> None:
        """Each tensor in turn is taken by the loader and not written; then the copy of the tied head."""
        sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
        stale_weights = importlib.import_module("stale_weights")
        found = self.results["stale"] = {}
        for name, _ in self.tensors():
            update = write_update(self.tensors(), self.version + 1)
            with stale_weights.lost_write("vllm", name, self.engine):
                found[name] = self.error(lambda update=update: self.engine.update_weights(update))
        with mock.patch("isotrain.rollout.vllm_worker._pack_tied_layers"):
            found["packed head"] = self.error(lambda: self.engine.update_weights(update))
        self.update()
        tokens_T = requests(1)[0].prompt_P
        self.results["after_stale"] = self.scored_difference([tokens_T], self.engine.logps([tokens_T]))

    def other_device(self) -> None:
        self.results["other_device"] = self.error(
            lambda: VllmEngine(self.work, name="e", dtype="float32", device_type="cuda", max_length=9)
        )


if __name__ == "__main__":
    checks = VllmChecks(Path(sys.argv[1]), int(sys.argv[2]))
    inside = [checks.stale] if checks.workers == 1 else []  # in this process
    shared = (checks.nothing_left, checks.reports, checks.sent, checks.buffered)
    checks.run(*shared, *inside, checks.other_device)
