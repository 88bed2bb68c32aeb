"""SGLang's HTTP requests, and how its replies are read.

P: prompt tokens, N: response tokens, T: tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.data.trajectory import Trajectory
from isotrain.errors import RolloutError
from isotrain.rollout.base import Request, Sampling, trajectory_of


def ask_response(request: Request, sampling: Sampling, ends: Sequence[int]) -> dict[str, Any]:
    return {
        "input_ids": request.prompt_P.tolist(),
        "sampling_params": {
            "max_new_tokens": request.room(sampling),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "sampling_seed": request.seed,
            "stop_token_ids": list(ends),
        },
        "return_logprob": True,
        "return_sampling_mask": _is_cut(sampling),
    }


def ask_logps(tokens_T: npt.NDArray[np.int32]) -> dict[str, Any]:
    """Nothing is written; the log-probs are those of the prompt, from its first token on."""
    return {
        "input_ids": tokens_T.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def read_response(reply: Any, request: Request, sampling: Sampling, version: int, engine: str) -> Trajectory:
    """The trajectory of a response that is whole: nothing in it is repaired."""
    meta = _meta(reply, version, engine)
    tokens = reply.get("output_ids")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise _malformed(engine, "output_ids are not a list of tokens")
    most = request.room(sampling)
    if not 0 < len(tokens) <= most:
        raise _malformed(engine, f"{len(tokens)} tokens, expected 1 to {most}")
    finished = _finished(meta, tokens, engine)
    logps = _pairs(meta, "output_token_logprobs", tokens, engine)
    if _is_cut(sampling):
        # The other ones are those of the whole vocabulary, before top-k and top-p.
        logps = meta.get("output_token_sampling_logprobs") or []
        if not isinstance(logps, list) or len(logps) != len(tokens):
            raise _malformed(engine, f"output_token_sampling_logprobs are not those of {len(tokens)} tokens")
    response_N = np.array(tokens, dtype=np.int32)
    return trajectory_of(request, response_N, _finite(logps, engine), version, finished)


def read_logps(
    reply: Any, tokens_T: npt.NDArray[np.int32], vocabulary: int, version: int, engine: str
) -> npt.NDArray[np.float32]:
    # SGLang takes the last token of a vocabulary for an image's hash and names it 0; the log-prob is right.
    named = np.where(tokens_T < vocabulary - 1, tokens_T, 0)
    logps = _pairs(_meta(reply, version, engine), "input_token_logprobs", named.tolist(), engine)
    return _finite(logps[1:], engine)  # nothing stands before the first token


def _is_cut(sampling: Sampling) -> bool:
    """Whether tokens are drawn from a part of the vocabulary; log-probs of greedy ones are those of all."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _meta(reply: Any, version: int, engine: str) -> dict[str, Any]:
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict):
        raise _malformed(engine, "no meta_info")
    if meta.get("weight_version") != str(version):
        raise _malformed(engine, f"weight_version is {meta.get('weight_version')!r}, not '{version}'")
    return meta


def _finished(meta: dict[str, Any], tokens: list[int], engine: str) -> bool:
    """Whether the model ended the response itself, with a token that is part of it."""
    reason: Any = meta.get("finish_reason")
    kind: Any = reason.get("type") if isinstance(reason, dict) else None
    if kind == "abort":
        raise RolloutError(f"{engine}: a response was aborted: {reason.get('message')}")
    if kind == "length":
        return False
    # A text in place of a token is how SGLang says that logits were not numbers.
    if kind == "stop" and reason.get("matched") == tokens[-1]:
        return True
    raise _malformed(engine, f"finish_reason is {reason!r} after token {tokens[-1]}")


def _pairs(meta: dict[str, Any], field: str, tokens: list[int], engine: str) -> list[Any]:
    """The first of each `[log-prob, token, text]`, where the tokens are those that are expected."""
    entries = meta.get(field)
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) > 1 for entry in entries
    ):
        raise _malformed(engine, f"{field} are not a list of log-probs with tokens")
    if [entry[1] for entry in entries] != tokens:
        raise _malformed(engine, f"{field} are not those of its {len(tokens)} tokens")
    return [entry[0] for entry in entries]


def _finite(logps: list[Any], engine: str) -> npt.NDArray[np.float32]:
    for place, logp in enumerate(logps):
        if type(logp) not in (int, float) or not math.isfinite(logp):
            raise _malformed(engine, f"log-prob {place} is {logp!r}")
    return np.array(logps, dtype=np.float32)


def _malformed(engine: str, what: str) -> RolloutError:
    return RolloutError(f"{engine}: cannot use a reply of its server: {what}")
