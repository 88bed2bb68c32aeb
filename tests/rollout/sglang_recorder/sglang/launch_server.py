"""A server that speaks SGLang's HTTP interface, records what it is asked, and misbehaves on request.

It behaves as SGLang 0.5.18 was seen to: it ignores unknown fields of a request but records them, fails on
unknown sampling parameters, refuses to flush its cache while requests run, and ends when it is put to sleep
then, or woken while it is awake. Tokens and log-probs follow rules that a test can
compute. Faults are read from a file before each request.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

WORK = Path(os.environ["SGLANG_RECORDER"])
INTERFACE = json.loads(Path(__file__).parents[2].joinpath("sglang_interface.json").read_text())
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
LOCK = threading.Lock()


def parse(words: list[str]) -> dict[str, str]:
    """Options as SGLang reads them; the file after `--config` holds more of them."""
    flags, values = INTERFACE["flags"].split(), [*INTERFACE["options"].split(), "config"]
    options: dict[str, str] = {}
    while words:
        word = words.pop(0)
        name = word.removeprefix("--")
        if name in flags:
            options[name] = "true"
        elif name in values and not words[0].startswith("-"):
            options[name] = words.pop(0)
        else:
            sys.exit(f"error: unrecognized arguments: {word}")
    path = Path(options.pop("config"))
    assert path.suffix == ".yaml" and path.stat().st_mode & 0o077 == 0
    key, _, value = path.read_text().strip().partition(": ")
    options[key] = value.strip('"')
    return options


def misfits(body: dict[str, Any], fields: dict[str, str]) -> list[str]:
    found = [f"{name}: unknown field" for name in body.keys() - fields.keys()]
    found += [
        f"{name}: missing" for name, kinds in fields.items() if "required" in kinds and name not in body
    ]
    for name in body.keys() & fields.keys():
        kinds = fields[name].split()
        allowed = tuple(kind for word in kinds for kind in JSON_TYPES.get(word, ()))
        is_bool = isinstance(body[name], bool) and "boolean" not in kinds
        if "any" not in kinds and (is_bool or not isinstance(body[name], allowed)):
            found.append(f"{name}: {body[name]!r} is not {fields[name]}")
    return found


class Rules:
    """Seeds that are odd end their answers."""

    def write(self, parameters: dict[str, Any]) -> tuple[list[int], list[float]]:
        seed, count = parameters["sampling_seed"], parameters["max_new_tokens"]
        tokens = [(seed + place) % 7 + 10 for place in range(count)]
        if seed % 2:
            tokens = [*tokens[: count // 2], parameters["stop_token_ids"][0]]
        return tokens, [-token / 8 for token in tokens]

    def score(self, tokens: list[int]) -> list[float]:
        return [-token / 4 for token in tokens[1:]]


class Server:
    """What a real one keeps: the version and the names of its weights, and whether it sleeps."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options, self.key = options, options["api-key"]
        self.version, self.sleeping, self.starting = options["weight-version"], False, 1
        self.aborted, self.running = threading.Event(), 0
        self.writer = Rules()

    def generate(self, body: dict[str, Any], fault: str) -> tuple[int, Any]:
        parameters, prompt = body["sampling_params"], body["input_ids"]
        if wrong := misfits(parameters, INTERFACE["sampling_params"]):
            return 500, {"error": {"message": "; ".join(wrong)}}
        count = parameters["max_new_tokens"]
        if len(prompt) + count > int(self.options["context-length"]):
            return 400, {"error": {"message": "more tokens than the context has"}}
        if self.sleeping:
            return 400, {"error": {"message": "asleep"}}
        aborted = fault == "slow" and self.aborted.wait(20)
        tokens, logps = self.writer.write(parameters) if count else ([], [])
        reason: dict[str, Any] = {"type": "length", "length": count}
        if tokens and tokens[-1] in parameters["stop_token_ids"]:
            reason = {"type": "stop", "matched": tokens[-1]}
        if aborted:
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "output_token_logprobs": [[logp, token, None] for logp, token in zip(logps, tokens, strict=True)],
            "output_token_logprobs_length": len(tokens),
            "input_token_logprobs": [],
        }
        if body.get("logprob_start_len") == 0:
            scores = [None, *self.writer.score(prompt)]
            meta["input_token_logprobs"] = [
                [logp, token, None] for logp, token in zip(scores, prompt, strict=True)
            ]
        if body.get("return_sampling_mask"):
            if parameters["top_p"] == 1 and parameters["top_k"] < 1:
                return 400, {"error": {"message": "return_sampling_mask needs top_p or top_k"}}
            meta["output_token_sampling_mask"] = [[token] for token in tokens]
            meta["output_token_sampling_logprobs"] = [-token / 16 for token in tokens]
        return 200, {"output_ids": tokens, "meta_info": meta}

    def update(self, body: dict[str, Any], fault: str) -> tuple[int, Any]:
        if fault == "slow":
            time.sleep(20)
        if fault == "refused":
            return 400, {"success": False, "message": "out of memory", "num_paused_requests": 0}
        (file,) = Path(body["model_path"]).glob("*.safetensors")
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        record({"loaded": sorted(header), "load_format": body["load_format"]})
        if fault != "version":
            self.version = body["weight_version"]
        return 200, {"success": fault != "failed", "message": "done", "num_paused_requests": 0}

    def answer(self, path: str, body: dict[str, Any], fault: str) -> tuple[int, Any]:
        if path == "/generate":
            with LOCK:
                self.running += 1
            try:
                return self.generate(body, fault)
            finally:
                with LOCK:
                    self.running -= 1
        if path == "/flush_cache":
            return (400, {"message": "requests are running"}) if self.running else (200, "flushed")
        if path == "/update_weights_from_disk":
            return self.update(body, fault)
        if path == "/model_info":
            return 200, {"model_path": self.options["model-path"], "weight_version": self.version}
        if path == "/abort_request":
            self.aborted.set()
            return 200, ""
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            if self.running or self.sleeping == path.startswith("/release"):
                end("should be called only when server is idle" if self.running else "KeyError: 'kv_cache'")
            self.sleeping = path.startswith("/release")
            return 200, None
        return 404, {"detail": "Not Found"}


def end(words: str) -> NoReturn:
    print(words, file=sys.stderr, flush=True)
    os._exit(3)


def record(entry: dict[str, Any]) -> None:
    with LOCK, (WORK / "requests.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def edited(answer: Any, edits: dict[str, Any]) -> Any:
    """An answer with some values replaced, by dotted path; `null` as a whole removes the field."""
    for path, value in edits.items():
        *parents, last = path.split(".")
        place = answer
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return answer


class Handler(BaseHTTPRequestHandler):
    server_state: Server

    def do_GET(self) -> None:
        self.handle_any({})

    def do_POST(self) -> None:
        self.handle_any(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def handle_any(self, body: dict[str, Any]) -> None:
        state, path = self.server_state, self.path.partition("?")[0]
        fault = json.loads((WORK / "fault.json").read_text()).get(path, {})
        if path == "/health":
            state.starting -= 1
            self.reply(503 if state.starting >= 0 or fault else 200, b"")
            return
        wrong = misfits(body, INTERFACE["requests"].get(path, {}))
        known = self.headers["Authorization"] == f"Bearer {state.key}"
        record({"path": path, "body": body, "key": known, "unknown": wrong})
        if fault.get("kind") == "dies":
            end("CUDA error: an illegal memory access")
        if fault.get("kind") == "hangs up":
            self.connection.close()
            return
        if not known:
            status, answer = 401, {"error": "Unauthorized"}
        else:
            status, answer = state.answer(path, body, fault.get("kind", ""))
        if status == 200:
            answer = edited(answer, fault.get("edit", {}))
        text = fault.get("text", json.dumps(answer) if answer != "" else "")
        self.reply(fault.get("status", status), text.encode())

    def reply(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    fault = json.loads((WORK / "fault.json").read_text()).get("start")
    if fault:
        sys.exit(fault)
    options = parse(sys.argv[1:])
    record(
        {
            "options": options,
            "environment": dict(os.environ),
            "pid": os.getpid(),
        }
    )
    Handler.server_state = Server(options)
    ThreadingHTTPServer.request_queue_size = 512
    server = ThreadingHTTPServer((options["host"], int(options["port"])), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
