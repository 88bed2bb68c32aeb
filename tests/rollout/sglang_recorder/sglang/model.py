"""Answers of a real model for the recording server: the reference engine, with weights as a file has them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine


class Model:
    def __init__(self, directory: str, dtype: str) -> None:
        self.engine = HfEngine(Path(directory), name="model", dtype=dtype, device=torch.device("cpu"))
        self.lock = threading.Lock()

    def write(self, prompt: list[int], parameters: dict[str, Any]) -> tuple[list[int], list[float]]:
        sampling = Sampling(parameters["max_new_tokens"], parameters["temperature"])
        request = Request(0, 0, 0, parameters["sampling_seed"], np.array(prompt, dtype=np.int32))
        with self.lock:
            (found,) = self.engine.generate([request], sampling)
        return found.response_N.tolist(), found.logp_N.tolist()

    def score(self, tokens: list[int]) -> list[float]:
        with self.lock:
            return self.engine.logps([np.array(tokens, dtype=np.int32)])[0].tolist()

    @torch.no_grad()
    def load(self, file: Path) -> None:
        parameters = dict(self.engine._model.named_parameters())
        for name, tensor in load_file(file).items():
            parameters[name].copy_(tensor)
