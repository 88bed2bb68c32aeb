"""SGLang as an engine, against a recording server: what it is asked, and faults that no real one can have.

The contract with a real server is in contract/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sglang_recording import RECORDER, Recorder
from transformers import AutoModelForCausalLM

from isotrain.device.detect import choose_device
from isotrain.errors import EngineLost, RolloutError, WeightUpdateError
from isotrain.recipe.online import RolloutSection
from isotrain.rollout import sglang
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.build import build_rollout
from isotrain.rollout.sglang import SglangEngine
from isotrain.weights.file import private_directory, write_update
from isotrain.weights.update import FileSource, WeightUpdate

pytestmark = pytest.mark.heavy

PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9)]
END = 2
SAMPLING = Sampling(max_tokens=6, temperature=0.7)


def requests(n: int = 2) -> list[Request]:
    return [
        Request(row=row, prompt_index=row, sample=sample, seed=100 * row + sample, prompt_P=prompt)
        for row, prompt in enumerate(PROMPTS)
        for sample in range(n)
    ]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("PYTHONPATH", str(RECORDER))
    monkeypatch.setenv("SGLANG_RECORDER", str(tmp_path))
    return Recorder(tmp_path)


Start = Callable[..., SglangEngine]


@pytest.fixture
def start(tiny: Path, recorder: Recorder) -> Iterator[Start]:
    started: list[SglangEngine] = []

    def begin(device_type: str = "npu", head_float32: bool = False, **section: Any) -> SglangEngine:
        engine = build_rollout(
            RolloutSection(engine="sglang", max_tokens=6, **section),
            str(tiny / "model"),
            "float32",
            device=choose_device(device_type),
            max_prompt=20,
            seed=3,
            name="engine 7",
            head_float32=head_float32,
        )
        assert isinstance(engine, SglangEngine)
        started.append(engine)
        return engine

    yield begin
    for engine in started:
        engine.close()


@pytest.fixture
def engine(start: Start) -> SglangEngine:
    return start()


@pytest.fixture(scope="module")
def weights(tiny: Path) -> list[tuple[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def test_how_the_server_is_started(tiny: Path, start: Start, recorder: Recorder) -> None:
    engine = start(memory_utilization=0.4, eager=True)
    began = recorder.start()
    options = began["options"]
    assert len(options.pop("api-key")) == 64 and int(options.pop("port")) > 1023
    assert options == {
        "model-path": str(tiny / "model"),
        "host": "127.0.0.1",
        "dtype": "float32",
        "device": "npu",
        "attention-backend": "ascend",
        "tp-size": "1",
        "context-length": "34",
        "mem-fraction-static": "0.4",
        "random-seed": "3",
        "load-format": "safetensors",
        "sampling-backend": "pytorch",
        "sampling-defaults": "openai",
        "weight-version": "0",
        "log-level": "warning",
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "skip-tokenizer-init": "true",
        "enable-deterministic-inference": "true",
        "sleep-on-idle": "true",
        "enable-memory-saver": "true",
    }
    assert (
        began["environment"].items()
        >= {
            "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
            "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        }.items()
    )
    server = psutil.Process(began["pid"])
    listening = [c.laddr.ip for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]
    assert not any("key" in word and ".yaml" not in word for word in server.cmdline()[-20:])
    engine.close()
    assert not server.is_running()
    assert not list(private_directory().glob("sglang-*"))


def test_starts_the_server_for_other_devices(
    start: Start, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050")  # the user's own stays
    monkeypatch.setenv("HF_TOKEN", "secret")
    start(tensor_parallel=2, eager=False, head_float32=True)
    began = recorder.start()
    assert "HF_TOKEN" not in began["environment"]
    assert began["environment"]["HCCL_NPU_SOCKET_PORT_RANGE"] == "61000-61050"
    assert began["options"]["tp-size"] == "2"
    assert not any("graph" in option for option in began["options"])
    assert began["options"]["enable-fp32-lm-head"] == "true"
    plain = sglang._options("cuda", eager=True, head_float32=False)
    assert not {"attention-backend", "enable-fp32-lm-head"} & plain.keys()


def test_refuses_a_float32_head_on_a_cpu(start: Start) -> None:
    with pytest.raises(RolloutError, match="packed for AMX"):
        start("cpu", head_float32=True)


def test_on_the_host_the_cache_has_a_size_of_its_own(start: Start, recorder: Recorder) -> None:
    start("cpu", kv_cache_gb=0.25)
    options = recorder.start()["options"]
    assert (options["device"], options["attention-backend"]) == ("cpu", "torch_native")
    assert "mem-fraction-static" not in options and "enable-memory-saver" not in options
    # Two layers, two heads of 16 numbers of 4 bytes, keys and values.
    assert options["max-total-tokens"] == str(2**28 // (2 * 2 * 2 * 16 * 4))


def test_tells_the_server_of_stretched_positions(tiny: Path, start: Start, recorder: Recorder) -> None:
    """SGLang refuses lengths beyond a config's limit unless it is told of a larger one."""
    file = tiny / "model" / "config.json"
    config = json.loads(file.read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    file.write_text(json.dumps(config | {"max_position_embeddings": 16, "rope_parameters": rope}))
    try:
        start()
    finally:
        file.write_text(json.dumps(config))
    options = recorder.start()["options"]
    assert options["context-length"] == "34"
    assert json.loads(options["json-model-override-args"]) == {"max_position_embeddings": 64}


def test_responses_have_tokens_log_probs_and_versions(engine: SglangEngine, recorder: Recorder) -> None:
    found = {(t.row, t.sample): t for t in engine.generate(requests(), SAMPLING)}
    assert len(found) == len(requests())
    for request in requests():
        trajectory = found[request.row, request.sample]
        assert trajectory.seed == request.seed and trajectory.prompt_index == request.prompt_index
        assert trajectory.prompt_length == len(request.prompt_P)
        assert (trajectory.tokens_T[: trajectory.prompt_length] == request.prompt_P).all()
        expected = [(request.seed + place) % 7 + 10 for place in range(6)]
        if request.seed % 2:
            expected = [*expected[:3], END]
        assert trajectory.response_N.tolist() == expected
        assert trajectory.finished == (request.seed % 2 == 1)
        np.testing.assert_allclose(trajectory.logp_N, -np.array(expected) / 8)
        assert trajectory.mask_N.all() and (trajectory.version_N == 0).all()
    bodies = sorted(recorder.asked("/generate"), key=lambda body: body["sampling_params"]["sampling_seed"])
    assert bodies == [
        {
            "input_ids": request.prompt_P.tolist(),
            "sampling_params": {
                "max_new_tokens": 6,
                "temperature": 0.7,
                "top_p": 1.0,
                "top_k": -1,
                "sampling_seed": request.seed,
                "stop_token_ids": [END],
            },
            "return_logprob": True,
            "return_sampling_mask": False,
        }
        for request in requests()
    ]
    assert list(engine.generate([], SAMPLING)) == []


def test_log_probs_after_top_p_and_of_greedy_responses(engine: SglangEngine) -> None:
    for sampling, scale in (
        (replace(SAMPLING, top_p=0.9), 16),
        (replace(SAMPLING, top_k=5), 16),
        (replace(SAMPLING, temperature=0.0, top_p=0.9), 8),
    ):
        for trajectory in engine.generate(requests(), sampling):
            np.testing.assert_allclose(trajectory.logp_N, -trajectory.response_N / scale)


def test_returns_log_probs_of_sequences(engine: SglangEngine, recorder: Recorder) -> None:
    found = engine.logps(PROMPTS)
    for tokens_T, logps in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(logps, -tokens_T[1:] / 4)
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in recorder.asked("/generate"))


def test_generates_more_responses_than_are_in_flight(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "IN_FLIGHT", 16)
    assert len(list(engine.generate(requests(60), SAMPLING))) == 120


def test_loads_a_weight_update(
    engine: SglangEngine, recorder: Recorder, weights: list[tuple[str, torch.Tensor]], tmp_path: Path
) -> None:
    update = write_update(weights, 5, tmp_path)
    engine.update_weights(update)
    assert engine.version == 5
    assert all((t.version_N == 5).all() for t in engine.generate(requests(), SAMPLING))
    (body,) = recorder.asked("/update_weights_from_disk")
    assert body["weight_version"] == "5" and body["flush_cache"] is True
    (loaded,) = (entry for entry in recorder.entries() if "loaded" in entry)
    assert loaded["load_format"] == "safetensors"
    assert loaded["loaded"] == sorted(["__metadata__", *(name for name, _ in weights)])
    # The server has read the file: the next version can be written over it.
    assert write_update(weights, 6, tmp_path).sources != write_update(weights, 7, tmp_path).sources


def test_does_not_generate_between_sleep_and_update(
    engine: SglangEngine, recorder: Recorder, weights: list[tuple[str, torch.Tensor]]
) -> None:
    engine.wake()  # a server that is awake would not survive it
    engine.sleep()
    engine.sleep()
    with pytest.raises(RolloutError, match="engine 7 does not generate: it slept"):
        engine.logps(PROMPTS)
    engine.wake()
    with pytest.raises(RolloutError, match="engine 7 does not generate: it slept"):
        engine.logps(PROMPTS)
    engine.update_weights(write_update(weights, 1))
    engine.wake()  # awake again: the server is not told twice
    assert len(engine.logps(PROMPTS)) == 2
    assert len(recorder.asked("/resume_memory_occupation")) == 1


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "not JSON": ({"text": "<html>"}, "reply to /generate is not JSON"),
    "empty": ({"text": ""}, "no meta_info"),
    "a list": ({"text": "[]"}, "no meta_info"),
    "no tokens": ({"edit": {"output_ids": []}}, "0 tokens, expected 1 to 6"),
    "text for tokens": ({"edit": {"output_ids": ["a"]}}, "output_ids are not a list of tokens"),
    "too many tokens": ({"edit": {"output_ids": [9] * 7}}, "7 tokens, expected 1 to 6"),
    "no log-probs": ({"edit": {"meta_info.output_token_logprobs": None}}, "are not a list of log-probs"),
    "bare log-probs": ({"edit": {"meta_info.output_token_logprobs": [-1.0]}}, "not a list of log-probs"),
    "others' log-probs": (
        {"edit": {"meta_info.output_token_logprobs": [[-1.0, 3, None]] * 6}},
        "are not those of its 6 tokens",
    ),
    "not a number": (
        {"edit": {"output_ids": [9], "meta_info.output_token_logprobs": [[float("nan"), 9, None]]}},
        "log-prob 0 is nan",
    ),
    "other weights": ({"edit": {"meta_info.weight_version": "4"}}, "weight_version is '4', not '0'"),
    "no reason": ({"edit": {"meta_info.finish_reason": None}}, "finish_reason is None"),
    "logits that are not numbers": (
        {"edit": {"meta_info.finish_reason": {"type": "stop", "matched": "NaN happened"}}},
        "finish_reason is .*NaN happened",
    ),
    "given up": (
        {"edit": {"meta_info.finish_reason": {"type": "abort", "message": "queue is full"}}},
        "a response was aborted: queue is full",
    ),
    "refused": ({"status": 400}, "server refused /generate with 400"),
    "a reason": ({"status": 503, "text": '{"error": {"message": "busy"}}'}, "refused .* with 503: busy"),
    "another reason": ({"status": 500, "text": '{"object": "error", "message": "oops"}'}, "with 500: oops"),
}


@pytest.fixture(scope="module")
def lasting(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangEngine, Recorder]]:
    """One server for all faults that it survives."""
    with pytest.MonkeyPatch.context() as patch:
        work = tmp_path_factory.mktemp("sglang")
        patch.setenv("PYTHONPATH", str(RECORDER))
        patch.setenv("SGLANG_RECORDER", str(work))
        recorder = Recorder(work)
        engine = SglangEngine(
            tiny / "model", name="engine 7", dtype="float32", device_type="cuda", max_length=60
        )
    yield engine, recorder
    engine.close()


@pytest.mark.parametrize("logps", [[-1.0], "abcdef"])
def test_log_probs_after_top_p_that_cannot_be_used(
    lasting: tuple[SglangEngine, Recorder], logps: object
) -> None:
    engine, recorder = lasting
    recorder.misbehave({"/generate": {"edit": {"meta_info.output_token_sampling_logprobs": logps}}})
    with pytest.raises(RolloutError, match="output_token_sampling_logprobs are not those of 6 tokens"):
        list(engine.generate(requests(1)[:1], replace(SAMPLING, top_p=0.9)))
    recorder.misbehave({})


@pytest.mark.parametrize("fault", MALFORMED)
def test_responses_that_cannot_be_used(lasting: tuple[SglangEngine, Recorder], fault: str) -> None:
    engine, recorder = lasting
    change, message = MALFORMED[fault]
    recorder.misbehave({"/generate": change})
    with pytest.raises(RolloutError, match=f"^engine 7: .*{message}"):
        list(engine.generate(requests(1)[:1], SAMPLING))
    recorder.misbehave({})
    assert len(list(engine.generate(requests(), SAMPLING))) == 4


def test_the_recorder_knows_the_published_fields(
    lasting: tuple[SglangEngine, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = lasting
    for parameters, message in (
        ({"max_new_tokens": 1, "seed": 2}, "with 500: seed: unknown field"),
        ({"max_new_tokens": True}, "with 500: max_new_tokens: True is not integer"),
    ):
        with pytest.raises(RolloutError, match=message):
            engine._exchange.post("/generate", {"input_ids": [1], "sampling_params": parameters}, 10)
    body = {"input_ids": [1], "max_tokens": 1, "sampling_params": {"max_new_tokens": 0}}
    engine._exchange.post("/generate", body, 10)  # as SGLang does: nothing is said
    assert recorder.entries()[-1]["unknown"] == ["max_tokens: unknown field"]
    monkeypatch.setattr(engine._exchange, "_key", "guessed")
    with pytest.raises(RolloutError, match=r"refused .* with 401"):
        engine.logps(PROMPTS[:1])


def test_refuses_bad_updates(
    lasting: tuple[SglangEngine, Recorder], weights: list[tuple[str, torch.Tensor]], tmp_path: Path
) -> None:
    engine, recorder = lasting

    def write(tensors: list[tuple[str, torch.Tensor]], version: int = 6) -> WeightUpdate:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        return write_update(tensors, version, directory)

    good = write(weights)
    shaped = [(n, p[:-1] if n == "model.norm.weight" else p) for n, p in weights]
    path = "/update_weights_from_disk"
    for update, faults, message in (
        (replace(good, digest="0" * 64), {}, "is damaged: digest"),
        (replace(good, sources=(FileSource(f"{good.source()}x"),)), {}, "is not there"),
        (write(weights[1:]), {}, r"lacks weights of parameters \(1\): model.embed_tokens.weight"),
        (
            write([*weights, ("model.extra", torch.zeros(1))]),
            {},
            r"do not match \(1\): model.extra",
        ),
        (write(shaped), {}, r"do not match \(1\): model.norm.weight"),
        (good, {path: {"kind": "refused"}}, "failed: the server refused .* with 400: out of memory"),
        (good, {path: {"kind": "failed"}}, "failed: its server replied .*'success': False"),
        (good, {path: {"kind": "version"}}, "failed: its server has version .* of the weights"),
        (good, {path: {"text": "{"}}, "failed: the reply to .* is not JSON"),
        (good, {"/model_info": {"text": "[]"}}, "failed: the reply to /model_info is not an object"),
    ):
        before = engine.version
        recorder.misbehave(faults)
        with pytest.raises(WeightUpdateError, match=f"^engine 7: weight update 6 .*{message}"):
            engine.update_weights(update)
        recorder.misbehave({})
        with pytest.raises(
            RolloutError, match="engine 7 does not generate: weight update 6 was not finished"
        ):
            list(engine.generate(requests(1), SAMPLING))
        assert engine.version == before
        engine.update_weights(write(weights, 5))
        assert len(list(engine.generate(requests(1), SAMPLING))) == 2


def test_an_iterator_that_is_not_finished(lasting: tuple[SglangEngine, Recorder]) -> None:
    engine, _ = lasting
    responses = engine.generate(requests(8), SAMPLING)
    next(responses)
    with pytest.raises(RolloutError, match="engine 7 is generating"):
        next(engine.generate(requests(), SAMPLING))
    with pytest.raises(WeightUpdateError, match="engine 7 is generating"):
        engine.update_weights(write_update([], 1))
    with pytest.raises(RolloutError, match="engine 7 is generating"):
        engine.sleep()
    responses.close()  # type: ignore[attr-defined]
    assert len(list(engine.generate(requests(), SAMPLING))) == 4


def test_slow_responses_are_waited_for_and_given_up(
    start: Start, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    monkeypatch.setattr(sglang, "SILENCE", 0.2)
    recorder.misbehave({"/generate": {"kind": "slow"}})
    checks = count(1)
    check_health = engine._check_health

    def abort_after_some_silence() -> None:
        check_health()
        if next(checks) == 3:
            engine._exchange.post("/abort_request", {"abort_all": True}, 10)

    monkeypatch.setattr(engine, "_check_health", abort_after_some_silence)
    with pytest.raises(RolloutError, match="engine 7: a response was aborted: Aborted"):
        list(engine.generate(requests(), SAMPLING))
    assert next(checks) > 3  # the server was healthy each time, and so it was waited for
    recorder.misbehave({})
    assert len(list(engine.generate(requests(), SAMPLING))) == 4


def check_lost(engine: SglangEngine, recorder: Recorder, weights: list[tuple[str, torch.Tensor]]) -> None:
    assert not psutil.pid_exists(recorder.start()["pid"])
    recorder.misbehave({})
    with pytest.raises(EngineLost, match="engine 7 lost its server; it must be restarted"):
        list(engine.generate(requests(), SAMPLING))
    with pytest.raises(EngineLost, match="engine 7 lost its server; it must be restarted"):
        engine.update_weights(write_update(weights, 9))
    with pytest.raises(EngineLost, match="engine 7 lost its server"):
        engine.wake()
    engine.close()


def test_a_server_that_is_stuck(
    engine: SglangEngine,
    recorder: Recorder,
    weights: list[tuple[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang, "SILENCE", 0.2)
    recorder.misbehave({"/generate": {"kind": "slow"}, "/health": {"kind": "stuck"}})
    with pytest.raises(EngineLost, match=r"^engine 7: its server is stuck: .* refused /health with 503"):
        list(engine.generate(requests(), SAMPLING))
    check_lost(engine, recorder, weights)


@pytest.mark.parametrize("call", ["generate", "logps", "update", "sleep"])
def test_is_lost_when_its_server_dies(
    engine: SglangEngine, recorder: Recorder, weights: list[tuple[str, torch.Tensor]], call: str
) -> None:
    paths = ("/generate", "/update_weights_from_disk", "/release_memory_occupation")
    recorder.misbehave({path: {"kind": "dies"} for path in paths})
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: list(engine.generate(requests(8), SAMPLING)),
        "logps": lambda: engine.logps(PROMPTS),
        "update": lambda: engine.update_weights(write_update(weights, 1)),
        "sleep": engine.sleep,
    }
    with pytest.raises(EngineLost, match=r"(?s)^engine 7: .*ended with exit code 3; .*illegal memory access"):
        calls[call]()
    check_lost(engine, recorder, weights)


def test_is_lost_when_its_server_hangs_up(
    engine: SglangEngine, recorder: Recorder, weights: list[tuple[str, torch.Tensor]]
) -> None:
    recorder.misbehave({"/generate": {"kind": "hangs up"}})
    with pytest.raises(EngineLost, match=r"^engine 7: no reply to /generate \("):
        list(engine.generate(requests(), SAMPLING))
    check_lost(engine, recorder, weights)


def test_an_update_that_does_not_end(
    start: Start, recorder: Recorder, weights: list[tuple[str, torch.Tensor]]
) -> None:
    engine = start(update_timeout=0.5)
    recorder.misbehave({"/update_weights_from_disk": {"kind": "slow"}})
    with pytest.raises(EngineLost, match=r"^engine 7: weight update 4 failed: .* within 0.5\d* s"):
        engine.update_weights(write_update(weights, 4))
    # It was given up before the server had read it.
    assert len(recorder.asked("/update_weights_from_disk")) == 1
    assert not any("loaded" in entry for entry in recorder.entries())
    check_lost(engine, recorder, weights)


def test_servers_that_do_not_start(start: Start, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.misbehave({"start": "no device found"})
    with pytest.raises(RolloutError, match=r"(?s)^engine 7: SGLang did not start; .*no device found"):
        start()
    recorder.misbehave({"/model_info": {"edit": {"model_path": "another"}}})
    with pytest.raises(RolloutError, match="engine 7: its server has another model"):
        start()
    with pytest.raises(RolloutError, match=r"engine 7: cannot start its server: .*nowhere"):
        start(server_python="/nowhere/python")
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(
        RolloutError, match=r"(?s)^engine 7: SGLang did not start; .*No module named 'sglang'"
    ):
        start(server_python=sys.executable)


def test_the_server_ends_with_its_parent(tmp_path: Path, recorder: Recorder) -> None:
    code = """
import os, signal, sys, time
from pathlib import Path
from isotrain.rollout.local_server import LocalServer, free_port
work, port = Path(sys.argv[1]), str(free_port())
arguments = ["--bind", "127.0.0.1", port]
server = LocalServer("e", sys.executable, "http.server", arguments, log=work / "log", environment=os.environ)
while b"Serving" not in (work / "log").read_bytes():
    assert server.ended() is None
    time.sleep(0.05)
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    source = str(Path(sglang.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -9, done.stderr
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(done.stdout))
