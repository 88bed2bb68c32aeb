"""The contract with vLLM, and what a look into it shows: `python vllm_child.py WORK TENSOR_PARALLEL`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from contract_checks import Checks, requests

from isotrain.rollout.base import Sampling, WeightUpdate
from isotrain.rollout.transfer import Contents, open_update, write_update
from isotrain.rollout.vllm import VllmEngine


class VllmChecks(Checks):
    engine: VllmEngine

    def __init__(self, work: Path, tensor_parallel: int) -> None:
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
        def other_file(update: WeightUpdate, engine: str) -> Iterator[Contents]:
            with open_update(update, engine) as contents:
                yield contents._replace(digest="of another file")

        def other_count(*_: Any, **__: Any) -> list[dict[str, Any]]:
            return [{"version": update.version, "tensors": 3, "digest": update.digest, "error": ""}]

        update = write_update(self.tensors(), self.version + 1)
        found = self.results["reports"] = {}
        if self.workers == 1:  # in this process
            with mock.patch("isotrain.rollout.vllm_worker.open_update", other_file):
                found["digest"] = self.error(lambda: self.engine.update_weights(update))
        with mock.patch.object(self.engine._llm, "collective_rpc", other_count):
            found["tensors"] = self.error(lambda: self.engine.update_weights(update))
        self.update()

    def other_device(self) -> None:
        self.results["other_device"] = self.error(
            lambda: VllmEngine(self.work, name="e", dtype="float32", device_type="cuda", max_length=9)
        )


if __name__ == "__main__":
    checks = VllmChecks(Path(sys.argv[1]), int(sys.argv[2]))
    checks.run(checks.nothing_left, checks.reports, checks.other_device)
