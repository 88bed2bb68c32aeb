"""vLLM as a rollout engine, in this process, with weights through its own reload interface.

P: prompt tokens, N: response tokens, T: both.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from isotrain.data.pictures import Picture
from isotrain.data.trajectory import Trajectory
from isotrain.errors import EngineLost, RolloutError, WeightUpdateError
from isotrain.rollout.base import (
    More,
    Request,
    Sampling,
    check_idle,
    no_more,
    stop_tokens,
    trajectory_of,
)
from isotrain.rollout.vllm_import import import_vllm
from isotrain.rollout.vllm_pictures import PictureInputs, picture_options
from isotrain.weights.update import WeightUpdate, update_limit

# vLLM reads these when it is imported or when an engine starts.
FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process and dies with it
    "VLLM_NO_USAGE_STATS": "1",
    # A fork of a process that has touched a device cannot use it, and vLLM does not see every touch.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# Prompt tokens that are read in one step: more are hardly faster, and a device keeps memory for so many.
PREFILL_TOKENS = 8192
# Running responses of whose steps an NPU keeps graphs; those between take the next larger one.
CAPTURED = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
# What vLLM calls the parts of device memory that it frees when it sleeps.
PARTS = ("weights", "kv_cache")
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


_Waiting = tuple[npt.NDArray[np.int32], tuple[Picture, ...], Any]
"""Tokens, the pictures among them, and vLLM's sampling parameters."""


class VllmEngine:
    """Refuses to generate from a failed update, or a sleep, until a good update."""

    updates_in_flight = True

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        dtype: str,
        device_type: str,
        max_length: int,
        seed: int = 0,
        seeded: bool = True,
        tensor_parallel: int = 1,
        memory_utilization: float = 0.5,
        cache_bytes: int = 2 << 30,
        eager: bool = True,
        update_timeout: float = 300.0,
        config_changes: Mapping[str, int | str] | None = None,
        load_format: Literal["dummy", "safetensors"] = "safetensors",
        pictures: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        special = _set_environment(device_type)
        options = {**few_graphs(device_type, eager, options or {}), **(options or {})}
        if eager:
            _compile_nothing()
        vllm, current_platform = import_vllm(device_type, dtype, vision=pictures > 0)
        self.name, self.version, self._timeout, self._seeded = name, 0, update_timeout, seeded
        self._unusable = "its weights are random until the first update" if load_format == "dummy" else ""
        self._lost, self._asleep = False, list[str]()
        self._serial, self._updates, self._workers, self._between_tokens = 0, 0, tensor_parallel, False
        self._starts: dict[str, list[tuple[int, int]]] = {}
        """The first token of each version that writes a running request, by request."""
        self._kept: list[Any] = []  # outputs that came while others were waited for
        self._ends = stop_tokens(directory)
        self._sleeps = bool(current_platform.is_sleep_mode_available()) and not current_platform.is_cpu()
        self.settings = {
            "vllm": vllm.__version__,
            "platform": current_platform.device_type,
            "eager": str(eager),
            "seeds": "one a response" if seeded else f"one an engine ({seed})",
            "sleep": "level 2" if self._sleeps else "not available",
            "weights": "layer-wise reload",
            **{name: str(value) for name, value in options.items()},
            **special,
        }
        llm: Any = vllm.LLM  # it names the types it takes one by one
        # On the host the cache has a size of its own; on a device it takes what its share leaves free.
        sizes: dict[str, Any] = {"gpu_memory_utilization": memory_utilization}
        if current_platform.is_cpu():
            sizes = {"kv_cache_memory_bytes": cache_bytes}
        _check_options(options, vllm)
        self._pictures = PictureInputs(directory) if pictures else None
        try:
            self._llm = llm(
                str(directory),
                **picture_options(pictures, vllm, on_cpu=current_platform.is_cpu()),
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
                **prefill(max_length, in_parts=_reads_in_parts(current_platform)) | options,
                enable_sleep_mode=self._sleeps,
                generation_config="vllm",  # sampling is what the request says, not what the model suggests
                logprobs_mode="processed_logprobs",
                worker_extension_cls="isotrain.rollout.vllm_worker.WeightReceiver",
                **sizes,
            )
        except Exception as error:  # of many kinds, from any depth of vLLM
            raise RolloutError(f"{name}: vLLM did not start: {error}") from error
        self._check_logps(wide_head="head_dtype" in (config_changes or {}))
        self._engine = self._llm.llm_engine
        self.at_once = int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    def _check_logps(self, wide_head: bool) -> None:
        """They must be of the distribution that is sampled, by a head that computes as it was told to."""
        for problem in filter(None, self._llm.collective_rpc("isotrain_report_sampled")):
            raise RolloutError(
                f"{self.name}: this vLLM cannot report log-probs after temperature, top-k and top-p: "
                f"{problem}; set rollout.engine: hf"
            )
        # A vLLM that does not know of the head's type would ignore it.
        for found in self._llm.collective_rpc("isotrain_head_dtype") if wide_head else ():
            if found != "torch.float32":
                raise RolloutError(
                    f"{self.name}: the head of this vLLM computes in {found or 'the type of the model'}, not "
                    "in float32; set model.head_dtype: model, or rollout.engine: hf"
                )

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        from vllm import SamplingParams

        def parameters(request: Request) -> Any:
            return SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=request.seed if self._seeded else None,
                max_tokens=request.room(sampling),
                logprobs=0,  # of the sampled token alone
                stop_token_ids=list(self._ends),
                **self._plain(),
            )

        asked: dict[int, Request] = {}
        numbers = itertools.count()  # as `_run` counts them

        def ask(requests: Sequence[Request]) -> list[_Waiting]:
            for request in requests:
                asked[next(numbers)] = request
            return [(request.prompt_P, request.pictures, parameters(request)) for request in requests]

        for index, output, version_N in self._run(ask(requests), lambda: ask(more())):
            yield _trajectory(asked.pop(index), output.outputs[0], version_N)

    def logps(
        self, sequences: Sequence[npt.NDArray[np.int32]], pictures: Sequence[tuple[Picture, ...]] = ()
    ) -> list[npt.NDArray[np.float32]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **self._plain())
        logps: dict[int, npt.NDArray[np.float32]] = {}
        each = pictures or [()] * len(sequences)
        waiting = [(tokens_T, seen, sampling) for tokens_T, seen in zip(sequences, each, strict=True)]
        for index, output, _ in self._run(waiting):
            table = output.prompt_logprobs  # the most likely token may stand beside the one asked for
            logps[index] = np.array(
                [table.logprobs[table.start_indices[place]] for place in range(1, len(sequences[index]))],
                dtype=np.float32,
            )
        return [logps[index] for index in range(len(sequences))]

    def update_weights(self, update: WeightUpdate) -> None:
        check_idle(self.name, bool(self._starts) and not self._between_tokens, WeightUpdateError)
        if self._lost:
            raise EngineLost(f"{self.name}: its workers stopped replying; it must be restarted")
        self._unusable = f"weight update {update.version} was not finished"
        try:
            with self._workers_watched():
                outcomes = self._llm.collective_rpc(
                    "isotrain_update",
                    timeout=update_limit(self._timeout, update.bytes),
                    args=(self.name, asdict(update), self._timeout),
                )
        except EngineLost:
            raise
        except Exception as error:
            self._lost = isinstance(error, TimeoutError)
            kind = EngineLost if self._lost else WeightUpdateError
            raise kind(f"{self.name}: weight update {update.version} failed: {error!r}") from error
        # Without a digest, each worker has compared what arrived with what its sender told at the end.
        announced = {"tensors": update.tensors, "digest": update.digest} if update.digest else {}
        for worker, outcome in enumerate(outcomes):
            problem = outcome["error"]
            for what, expected in {"version": update.version, **announced}.items():
                if not problem and outcome[what] != expected:
                    problem = (
                        f"{self.name}: worker {worker} reports {what} {outcome[what]} after weight update "
                        f"{update.version}, announced was {expected}"
                    )
            if problem:
                self._unusable = problem
                raise WeightUpdateError(problem)
        # While requests run, it cannot be emptied; salts keep new requests from what it holds.
        if not self._starts and not self._llm.reset_prefix_cache():
            raise WeightUpdateError(f"{self.name}: its prefix cache of the old weights is still in use")
        self.version, self._unusable = update.version, ""
        self._updates += 1
        for request_id, tokens in self._scheduled_tokens().items():
            self._starts[request_id].append((tokens, self.version))

    def receive(self, update: WeightUpdate) -> None:
        with self._workers_watched():
            self._llm.collective_rpc(
                "isotrain_receive", timeout=self._timeout, args=(self.name, asdict(update), self._timeout)
            )

    def _scheduled_tokens(self) -> dict[str, int]:
        """Tokens of each running request, with those of a step that was begun ahead."""
        requests: dict[str, Any] = self._engine.engine_core.engine_core.scheduler.requests
        counts = {
            name.split("-")[0]: int(request.num_output_tokens + request.num_output_placeholders)
            for name, request in requests.items()  # vLLM adds a dash and random digits to our names
        }
        return {name: counts[name] for name in self._starts if name in counts}

    def rehearse(self, update: WeightUpdate, timeout: float) -> None:
        arguments = (self.name, asdict(update), timeout)
        try:
            with self._workers_watched():
                errors = self._llm.collective_rpc(
                    "isotrain_rehearse", timeout=timeout + NOTICE, args=arguments
                )
        except TimeoutError as error:  # replies that come later would answer the next call
            self._lost = True
            raise EngineLost(f"{self.name}: its workers did not reply in time") from error
        if failed := [error for error in errors if error]:
            raise WeightUpdateError(failed[0])

    def sleep(self) -> None:
        if self._sleeps:
            self._unusable = "it slept, and has no weights until the next update"
            with self._workers_watched():
                self._llm.sleep(level=2)
            self._asleep = list(PARTS)

    def wake(self, *, weights_only: bool = False) -> None:
        # A part that is awake must not be woken again: its memory would be mapped twice.
        parts = [part for part in self._asleep if part == PARTS[0] or not weights_only]
        if parts:
            with self._workers_watched():
                self._llm.wake_up(tags=parts)
            self._asleep = [part for part in self._asleep if part not in parts]

    @property
    def llm(self) -> Any:
        """vLLM's own object, for diagnosis."""
        return self._llm

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

    def _run(
        self,
        waiting: Sequence[_Waiting],
        more: Callable[[], Sequence[_Waiting]] = lambda: (),
    ) -> Iterator[tuple[int, Any, npt.NDArray[np.int32]]]:
        """Outputs as they finish, with each token's version; closing the iterator aborts the rest.

        `more` may begin another run, of the weight check: the requests of this one go on meanwhile.
        """
        from vllm.inputs.engine import tokens_input

        self._check_usable()
        check_idle(self.name, bool(self._starts) and not self._between_tokens)
        running, count = dict[str, int](), 0
        try:
            while True:
                for tokens, pictures, parameters in [*waiting, *self._asked(more)]:
                    self._serial += 1
                    request_id = str(self._serial)
                    running[request_id], count = count, count + 1
                    self._starts[request_id] = [(0, self.version)]
                    salt = str(self._updates)
                    prompt: Any = tokens_input(tokens.tolist(), cache_salt=salt)
                    if pictures:
                        assert self._pictures is not None, "engines are told how many pictures come"
                        prompt = self._pictures.prompt(tokens, pictures, salt)
                    self._engine.add_request(request_id, prompt, parameters)
                if not running:
                    return
                waiting = ()
                for output in self._step(running):
                    yield running.pop(output.request_id), output, self._versions(output)
        except RolloutError:
            raise
        except (ValueError, RuntimeError) as error:
            raise RolloutError(f"{self.name}: {error}") from error
        finally:
            self._engine.abort_request(list(running))
            self._kept = [output for output in self._kept if output.request_id not in running]
            for request_id in running:
                self._starts.pop(request_id, None)

    def _asked(self, more: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Call `more`; weights may be updated meanwhile."""
        outer, self._between_tokens = self._between_tokens, True
        try:
            requests = more()
        finally:
            self._between_tokens = outer
        self._check_usable()  # an update may have failed
        return requests

    def _check_usable(self) -> None:
        if self._unusable:
            raise RolloutError(f"{self.name} does not generate: {self._unusable}")

    def _step(self, running: Mapping[str, int]) -> list[Any]:
        """Requests of this run that a step has finished; those of the run around it are kept for that."""
        with self._workers_watched():
            outputs = self._kept + self._engine.step()
        self._kept = [output for output in outputs if output.request_id not in running]
        return [output for output in outputs if output.request_id in running]

    def _versions(self, output: Any) -> npt.NDArray[np.int32]:
        version_N = np.zeros(len(output.outputs[0].token_ids), dtype=np.int32)
        for first, version in self._starts.pop(output.request_id):
            version_N[first:] = version
        return version_N


def _trajectory(request: Request, output: Any, version_N: npt.NDArray[np.int32]) -> Trajectory:
    # Such as of a request that was aborted: what it has is neither an ended response nor one that was cut.
    if output.finish_reason not in ("stop", "length"):
        raise RolloutError(f"vLLM ended a response with {output.finish_reason!r} ({output.stop_reason!r})")
    response_N = np.asarray(output.token_ids, dtype=np.int32)
    starts = output.logprobs.start_indices
    logp_N = np.array([output.logprobs.logprobs[start] for start in starts], dtype=np.float32)
    return trajectory_of(request, response_N, logp_N, version_N, output.finish_reason == "stop")


def _check_options(options: Mapping[str, Any], vllm: Any) -> None:
    if missing := sorted(set(options) - {item.name for item in fields(vllm.EngineArgs)}):
        names = ", ".join(f"rollout.engine_options.{name}" for name in missing)
        raise RolloutError(f"{names}: vLLM {vllm.__version__} has no such option; remove it")


def few_graphs(device_type: str, eager: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """On an NPU each captured graph takes streams, of which the collectives of a rank beside it have many."""
    if device_type != "npu" or eager or "compilation_config" in options:
        return {}
    most = int(options.get("max_num_seqs", CAPTURED[-1]))
    sizes = sorted({*(size for size in CAPTURED if size < most), min(most, CAPTURED[-1])})
    return {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}}


def prefill(max_length: int, *, in_parts: bool) -> dict[str, Any]:
    """vLLM's options for reading prompts; one that is read at once must fit into one step."""
    tokens = PREFILL_TOKENS if in_parts else max(PREFILL_TOKENS, max_length)
    return {"enable_chunked_prefill": in_parts, "max_num_batched_tokens": tokens}


def _reads_in_parts(platform: Any) -> bool:
    return not platform.is_cpu()  # a prompt read in parts rewinds its seed's generator


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


# From vllm-ascend 0.23.0's wheel, which a slow test reads again; not run on hardware yet.
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
