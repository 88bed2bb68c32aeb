"""The protocol that every generation engine follows.

P: prompt tokens, N: response tokens, T: tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from isotrain.data.pictures import Picture
from isotrain.data.trajectory import Trajectory
from isotrain.errors import RolloutError
from isotrain.models.config import model_end_tokens
from isotrain.weights.update import WeightUpdate


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Request:
    """One response that is wanted; an engine that uses its seed makes it independent of its neighbours."""

    row: int
    prompt_index: int
    sample: int
    seed: int
    prompt_P: npt.NDArray[np.int32]
    max_tokens: int | None = None
    """Where it is less than that of the sampling."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt, whose placeholder tokens it has."""

    def room(self, sampling: Sampling) -> int:
        """Tokens that the response may have."""
        return sampling.max_tokens if self.max_tokens is None else min(sampling.max_tokens, self.max_tokens)


def trajectory_of(
    request: Request,
    response_N: npt.NDArray[np.int32],
    logp_N: npt.NDArray[np.float32],
    version: int | npt.NDArray[np.int32],
    finished: bool,
    routes_TLK: npt.NDArray[np.int16] | None = None,
) -> Trajectory:
    """The trajectory of a response in one piece: all of its tokens are the model's.

    `version` is that of all tokens or, where new weights came in between, of each.
    """
    if not np.isfinite(logp_N).all():
        raise RolloutError(
            f"prompt {request.prompt_index}, response {request.sample}: the engine's log-prob of token "
            f"{int(np.isfinite(logp_N).argmin())} is not finite; its weights or its logits are not"
        )
    return Trajectory(
        row=request.row,
        prompt_index=request.prompt_index,
        sample=request.sample,
        seed=request.seed,
        prompt_length=len(request.prompt_P),
        tokens_T=np.concatenate([request.prompt_P, response_N]),
        mask_N=np.ones(len(response_N), dtype=np.bool_),
        logp_N=logp_N,
        version_N=np.full(len(response_N), version, dtype=np.int32),
        finished=finished,
        routes_TLK=routes_TLK,
        pictures=tuple(picture.digest for picture in request.pictures),
    )


def check_idle(engine: str, generating: bool, kind: type[RolloutError] = RolloutError) -> None:
    """One `generate` at a time; an update within one comes between two tokens, from `more`."""
    if generating:
        raise kind(f"{engine} is generating; finish or close that iterator first")


def check_tokens(sequences: Sequence[npt.NDArray[np.int32]], vocabulary: int, engine: str) -> None:
    """For engines that would not survive a token that the model does not have."""
    for tokens_T in sequences:
        if tokens_T.size and not 0 <= int(tokens_T.min()) <= int(tokens_T.max()) < vocabulary:
            raise RolloutError(
                f"{engine}: a sequence has tokens {tokens_T.min()} to {tokens_T.max()}, the model has 0 to "
                f"{vocabulary - 1}; the tokenizer is not the model's"
            )


def stop_tokens(directory: Path) -> tuple[int, ...]:
    """Tokens at which every engine stops; the one that came is part of the response."""
    from isotrain.data.chat import end_tokens  # with transformers, unlike dry runs
    from isotrain.models.files import load_tokenizer

    model_ends = model_end_tokens(directory)
    if any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return end_tokens(model_ends, load_tokenizer(directory))
    return model_ends


More = Callable[[], Sequence[Request]]
"""Requests that have come since it was asked last; `RolloutEngine.updates_in_flight` says what it may do."""


def no_more() -> Sequence[Request]:
    return ()


class RolloutEngine(Protocol):
    @property
    def name(self) -> str:
        """The name of this engine in errors."""

    @property
    def version(self) -> int:
        """Version of the weights it generates with; 0 for the model as it was loaded."""

    @property
    def settings(self) -> dict[str, str]:
        """Settings beyond the recipe, to be recorded with the run."""

    @property
    def at_once(self) -> int:
        """Responses that it generates at the same time; further ones wait."""

    @property
    def updates_in_flight(self) -> bool:
        """Whether `more` is asked between tokens and may call `update_weights` and `logps`.

        Responses that are under way go on with the new weights, and with their KV cache of the old ones.
        """

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        """Trajectories in the order in which they are finished, not in that of the requests.

        `more` is asked again and again, and for the last time when nothing is left to do.
        """

    def logps(
        self, sequences: Sequence[npt.NDArray[np.int32]], pictures: Sequence[tuple[Picture, ...]] = ()
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probs of each sequence's tokens from the second on, at temperature 1, with its weights.

        `pictures` are those of each sequence, if any has some.
        """

    def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights; raises `WeightUpdateError` where they are not those that `update` describes."""

    def receive(self, update: WeightUpdate) -> None:
        """Begin to take what is sent into a second buffer, beside generation; between two tokens, as `more`.

        `update_weights` of the same update then loads it from there.
        """

    def rehearse(self, update: WeightUpdate, timeout: float) -> None:
        """Receive what is sent, as for an update, and drop it; raises in time what an update would raise."""

    def sleep(self) -> None:
        """Free device memory, where the device can; the next update brings the weights back."""

    def wake(self, *, weights_only: bool = False) -> None:
        """Be ready to take weights and generate; with `weights_only` there is no memory to generate yet."""

    def close(self) -> None:
        """End every process and free everything."""
