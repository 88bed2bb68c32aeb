"""Makes our way of receiving weights known to vLLM, in each of its processes."""

from __future__ import annotations

BACKEND = "isotrain"


def register() -> None:
    """vLLM calls this at its start; what it names is imported when an engine asks for it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "isotrain.rollout.vllm_worker", "WeightReceiver")
