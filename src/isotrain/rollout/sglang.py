"""SGLang as a rollout engine: a server in a child process, over loopback HTTP.

Tested with SGLang 0.5.18 and 0.5.23 on the CPU, with the stand-ins of tests/rollout/sglang_cpu; not on
Ascend or CUDA.

P: prompt tokens, N: response tokens, T: tokens of a sequence.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.pictures import Picture
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import find_device
from isotrain.device.vendors import child_environment
from isotrain.errors import EngineLost, RolloutError, WeightUpdateError
from isotrain.models.config import attention_shapes, vocabulary_size
from isotrain.models.conversion import published_shapes, stored_buffers
from isotrain.models.load import build_causal_lm
from isotrain.rollout.base import (
    More,
    Request,
    Sampling,
    check_idle,
    check_tokens,
    no_more,
    stop_tokens,
)
from isotrain.rollout.local_server import HOST, Exchange, LocalServer, NoReply, free_port
from isotrain.rollout.sglang_messages import ask_logps, ask_response, read_logps, read_response
from isotrain.weights.file import open_update, path_of, private_directory
from isotrain.weights.update import WeightUpdate, update_limit

# What log-probs are: after temperature.
FIXED = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
# What a user who sets them means to have.
DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",  # an engine is on one host
    "TQDM_DISABLE": "1",  # bars of each update would push the cause of an end out of the log that is shown
}

# Where SGLang's own choice is wrong; on the CPU it would take kernels for AMX.
ATTENTION = {"npu": "ascend", "cpu": "torch_native"}

# Requests that the server has at the same time; what it cannot run yet waits there.
IN_FLIGHT = 256
# Without a reply for so long, the server's health is checked, which takes it up to 20 s.
SILENCE = 60.0
HEALTH = 30.0
# Calls that only pass something on.
PROMPT = 30.0
# The caller has a timeout of its own, `cluster.start_timeout`, which is the one to change.
START = 3600.0


class SglangEngine:
    """Refuses to generate from a failed update, or a sleep, until a good update."""

    # Its server can, but a reply names one version for all of its tokens.
    updates_in_flight = False

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        dtype: str,
        device_type: str,
        max_length: int,
        python: str | None = None,
        seed: int = 0,
        tensor_parallel: int = 1,
        memory_utilization: float = 0.5,
        cache_bytes: int = 2 << 30,
        eager: bool = True,
        update_timeout: float = 300.0,
        config_changes: Mapping[str, int] | None = None,
        head_float32: bool = False,
    ) -> None:
        self.name, self.version, self._timeout = name, 0, update_timeout
        self._unusable, self._lost, self._running, self._asleep = "", "", False, False
        self._ends = stop_tokens(directory)
        model = build_causal_lm(directory, "padded")
        tensors = {**dict(model.named_parameters()), **stored_buffers(model)}
        self._vocabulary = vocabulary_size(model)
        self._needed = set(published_shapes(model, tensors))
        # Tied ones have several names.
        self._shapes = published_shapes(model, tensors | dict(model.named_parameters(remove_duplicate=False)))
        self._directory = Path(tempfile.mkdtemp(prefix="sglang-", dir=private_directory()))
        port, key = free_port(), secrets.token_hex(32)
        chosen = _options(device_type, eager, head_float32)
        self.settings = {option: value or "on" for option, value in chosen.items()}
        options = chosen | {
            "model-path": str(directory.absolute()),
            "host": HOST,
            "port": str(port),
            "dtype": dtype,
            "tp-size": str(tensor_parallel),
            "context-length": str(max_length),
            "random-seed": str(seed),
            # On the host the cache has a size of its own; on a device it takes what its share leaves free.
            **(
                {"max-total-tokens": str(cache_bytes // _bytes_per_token(model.config, dtype))}
                if device_type == "cpu"
                else {"mem-fraction-static": str(memory_utilization)}
            ),
        }
        if config_changes:
            options["json-model-override-args"] = json.dumps(dict(config_changes))
        try:
            self._server = LocalServer(
                name,
                python or sys.executable,
                "sglang.launch_server",
                [*_words(options), "--config", str(self._write_key(key))],
                log=self._directory / "server.log",
                environment=_environment(device_type),
            )
        except BaseException:  # the key is in there
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._exchange = Exchange(name, self._server, port, key)
        try:
            self._wait_until_ready(directory, port)
        except BaseException:
            self.close()
            raise

    @property
    def at_once(self) -> int:
        return IN_FLIGHT

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        asked: list[Request] = []

        def ask(requests: Sequence[Request]) -> list[dict[str, Any]]:
            check_tokens([request.prompt_P for request in requests], self._vocabulary, self.name)
            asked.extend(requests)
            return [ask_response(request, sampling, self._ends) for request in requests]

        for index, reply in self._run(ask(requests), lambda: ask(more())):
            yield read_response(reply, asked[index], sampling, self.version, self.name)

    def logps(
        self, sequences: Sequence[npt.NDArray[np.int32]], pictures: Sequence[tuple[Picture, ...]] = ()
    ) -> list[npt.NDArray[np.float32]]:
        assert not any(pictures), "recipes with pictures are refused"
        check_tokens(sequences, self._vocabulary, self.name)
        logps = {
            index: read_logps(reply, sequences[index], self._vocabulary, self.version, self.name)
            for index, reply in self._run([ask_logps(tokens_T) for tokens_T in sequences])
        }
        return [logps[index] for index in range(len(sequences))]

    def update_weights(self, update: WeightUpdate) -> None:
        self._check_idle(WeightUpdateError)
        self._unusable = f"weight update {update.version} was not finished"
        self._wait_until_idle()
        # Until the server has read the file, its lock keeps the next version out of it.
        with open_update(update, self.name) as contents:
            self._check_complete(update, contents.tensors)
            contents.tensors = ()
            self._send(update)
        self.version, self._unusable = update.version, ""

    def receive(self, update: WeightUpdate) -> None:
        raise WeightUpdateError(f"{self.name}: SGLang takes weights from files only")

    def rehearse(self, update: WeightUpdate, timeout: float) -> None:
        self.receive(update)

    def sleep(self) -> None:
        self._check_idle()
        if self._asleep:
            return
        self._unusable = "it slept, and has no weights until the next update"
        self._wait_until_idle()
        self._control("/release_memory_occupation", {})
        self._asleep = True

    def wake(self, *, weights_only: bool = False) -> None:
        """Nothing for a server that is awake, which would not survive it; a new one starts awake."""
        self._check_idle()
        if self._asleep:
            self._control("/resume_memory_occupation", {})
            self._asleep = False

    def close(self) -> None:
        self._lost = "was closed"
        self._server.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_key(self, key: str) -> Path:
        """Loopback is open to every user of the host; arguments of a process are too, its files are not."""
        path = self._directory / "key.yaml"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(f'api-key: "{key}"\n')
        return path

    def _wait_until_ready(self, directory: Path, port: int) -> None:
        """Nobody but the server that was started gets the key."""
        deadline = time.monotonic() + START
        while True:
            if (ended := self._server.ended(0.2)) is not None:
                raise RolloutError(
                    f"{self.name}: SGLang did not start; check that rollout.server_python is the Python "
                    f"of its environment: {ended}"
                )
            if self._server.listens(port) and self._is_healthy():
                break
            if time.monotonic() > deadline:
                raise RolloutError(f"{self.name}: SGLang did not start within {START:g} s")
        info = self._model_info()
        if info.get("model_path") != str(directory.absolute()) or info.get("weight_version") != "0":
            raise RolloutError(f"{self.name}: its server has another model: {info}")

    def _is_healthy(self) -> bool:
        try:
            self._exchange.get("/health", HEALTH)
        except RolloutError:  # it is still loading
            return False
        return True

    def _model_info(self) -> dict[str, Any]:
        info = self._exchange.get("/model_info", PROMPT)
        if not isinstance(info, dict):
            raise RolloutError(f"{self.name}: the reply to /model_info is not an object: {info!r}")
        return info

    def _run(
        self, bodies: Sequence[dict[str, Any]], more: Callable[[], Sequence[dict[str, Any]]] = lambda: ()
    ) -> Iterator[tuple[int, Any]]:
        """Responses as they come; closing the iterator aborts the remaining requests."""
        if self._unusable and not self._lost:
            raise RolloutError(f"{self.name} does not generate: {self._unusable}")
        self._check_idle()
        self._running = True
        pool = ThreadPoolExecutor(IN_FLIGHT)  # which starts as many threads as it needs
        waiting: dict[Future[Any], int] = {}
        count = 0
        try:
            while True:
                for body in [*bodies, *more()]:
                    waiting[pool.submit(self._exchange.post, "/generate", body, None)] = count
                    count += 1
                if not waiting:
                    return
                bodies = ()
                done, _ = wait(waiting, SILENCE, FIRST_COMPLETED)
                if not done:
                    self._check_health()
                for future in done:
                    index = waiting.pop(future)
                    yield index, future.result()
        except NoReply as error:
            raise EngineLost(self._lose(error)) from error
        finally:
            self._give_up(list(waiting))
            pool.shutdown()
            self._running = False

    def _check_health(self) -> None:
        """A response may take long, but a server that is stuck does not reply to this either."""
        try:
            self._exchange.get("/health", HEALTH)
        except RolloutError as error:
            raise NoReply(f"{self.name}: its server is stuck: {error}") from error

    def _give_up(self, futures: list[Future[Any]]) -> None:
        running = [future for future in futures if not future.cancel()]
        deadline = time.monotonic() + PROMPT
        while running and not self._lost:
            try:
                # Again, because a request may reach the server after the first time.
                self._exchange.post("/abort_request", {"abort_all": True}, PROMPT)
                running = list(wait(running, 1.0).not_done)
                if running and time.monotonic() > deadline:
                    raise NoReply(f"{self.name}: its server does not abort its requests")
            except RolloutError as error:
                self._lose(error)

    def _lose(self, error: RolloutError) -> str:
        """End a server that cannot be relied on any more; returns what happened."""
        ended = self._server.ended(patience=2.0)
        self._server.kill()
        self._lost = "lost its server"
        return f"{self.name}: {ended}" if ended else str(error)

    def _wait_until_idle(self) -> None:
        """A server that sleeps or takes weights while an aborted request still runs does not survive it."""
        try:
            self._exchange.tell(f"/flush_cache?timeout={self._timeout:g}", self._timeout + PROMPT)
        except RolloutError as error:  # refused: requests are still running
            raise EngineLost(self._lose(error)) from error

    def _check_idle(self, kind: type[RolloutError] = RolloutError) -> None:
        if self._lost:
            raise EngineLost(f"{self.name} {self._lost}; it must be restarted")
        check_idle(self.name, self._running, kind)

    def _control(self, path: str, body: dict[str, Any], size: int = 0) -> Any:
        """`size`: bytes that the server reads for it."""
        try:
            return self._exchange.post(path, body, update_limit(self._timeout, size))
        except NoReply as error:
            raise EngineLost(self._lose(error)) from error

    def _check_complete(self, update: WeightUpdate, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """SGLang takes what it knows and says nothing of what is missing or left over."""
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors}
        wrong = {key for key, shape in shapes.items() if self._shapes.get(key) != shape}
        missing = self._needed - shapes.keys()
        for what, keys in (
            ("has tensors that do not match", wrong),
            ("lacks weights of parameters", missing),
        ):
            if keys:
                raise WeightUpdateError(
                    f"{self.name}: weight update {update.version} {what} ({len(keys)}): "
                    f"{', '.join(sorted(keys)[:5])}"
                )

    def _send(self, update: WeightUpdate) -> None:
        weights = self._directory / "weights"
        weights.mkdir(exist_ok=True)
        link = weights / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(path_of(update))
        body = {
            "model_path": str(weights),
            "load_format": "safetensors",
            "weight_version": str(update.version),
            "flush_cache": True,
        }
        try:
            reply = self._control("/update_weights_from_disk", body, update.bytes)
            if not isinstance(reply, dict) or reply.get("success") is not True:
                raise RolloutError(f"{self.name}: its server replied {reply!r}")
            version = self._model_info().get("weight_version")
            if version != str(update.version):
                raise RolloutError(f"{self.name}: its server has version {version!r} of the weights")
        except RolloutError as error:
            what = str(error).removeprefix(f"{self.name}: ")
            kind = EngineLost if isinstance(error, EngineLost) else WeightUpdateError
            raise kind(f"{self.name}: weight update {update.version} failed: {what}") from error


def _environment(device_type: str) -> dict[str, str]:
    """Variables of the server: this process's own without keys; it has the devices of the engine."""
    defaults = DEFAULTS | find_device(device_type).port_variables(os.environ)
    return {**defaults, **child_environment(os.environ), **FIXED}


def _options(device_type: str, eager: bool, head_float32: bool) -> dict[str, str]:
    """Options of every server on such a device; a flag has no value."""
    options = {
        "device": device_type,
        "skip-tokenizer-init": "",
        "load-format": "safetensors",  # never pickled weights
        "enable-deterministic-inference": "",  # otherwise seeds are taken and not used
        "sampling-backend": "pytorch",  # the only one with seeds that also gives log-probs after top-p
        "sampling-defaults": "openai",  # sampling is what the request says, not what the model suggests
        "sleep-on-idle": "",  # or its scheduler keeps a core of the host busy while the ranks train
        "weight-version": "0",
        "log-level": "warning",
    }
    if eager:
        options |= {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}
    if head_float32:
        options["enable-fp32-lm-head"] = ""
    if device_type != "cpu":  # the host frees nothing by sleeping
        options["enable-memory-saver"] = ""
    if device_type in ATTENTION:
        options["attention-backend"] = ATTENTION[device_type]
    return options


def _bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes of keys and values in all layers."""
    numbers = sum(2 * shape.key_heads * shape.head_size for shape in attention_shapes(config))
    return int(numbers * getattr(torch, dtype).itemsize)


def _words(options: Mapping[str, str]) -> list[str]:
    return [word for option, value in options.items() for word in (f"--{option}", value) if word]
