"""What every engine must do, checked beside the model whose weights it got.

Each engine runs in a process of its own, where no simulated device is loaded: `python vllm_child.py WORK ...`
makes a tiny model in WORK, and its last line of output is what was found, as JSON.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotrain.data.prepare.tiny import make_tiny
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.errors import RolloutError
from isotrain.recipe.online import RolloutSection
from isotrain.rollout.base import Request, RolloutEngine, Sampling
from isotrain.rollout.build import build_rollout
from isotrain.weights.file import path_of, write_update

VOCABULARY, MAX_PROMPT, MAX_TOKENS = 500, 36, 60
PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9, 17, 30)]
# The last one fills a block of a prefix cache.
IN_FLIGHT = [*PROMPTS, np.arange(5, 5 + MAX_PROMPT, dtype=np.int32)]
UPDATES = 10
END_OF_TEXT, END_OF_TURN = 0, 2


def requests(n: int = 1, prompts: Sequence[np.ndarray] = PROMPTS) -> list[Request]:
    return [
        Request(row=row, prompt_index=row, sample=sample, seed=1000 * row + sample, prompt_P=prompt)
        for row, prompt in enumerate(prompts)
        for sample in range(n)
    ]


def _end_elsewhere(model: Path) -> None:
    """As a base model after SFT: only its chat template knows the token with which it ends a turn."""
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        assert settings["eos_token_id"] == END_OF_TURN
        (model / name).write_text(json.dumps({**settings, "eos_token_id": END_OF_TEXT}))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(END_OF_TEXT)
    tokenizer.save_pretrained(model)


class Checks:
    """Built as a run builds it, and asked for nothing but what the protocol names."""

    def __init__(self, work: Path, engine: str, *, tied: bool = True, **section: Any) -> None:
        # Heads of 32: vLLM's attention on the host knows no smaller ones. A vocabulary that it must pad.
        make_tiny(
            work,
            hidden=128,
            vocab=VOCABULARY,
            tie_word_embeddings=tied,
            train_rows=2,
            validation_rows=2,
        )
        _end_elsewhere(work / "model")
        self.work = work
        self.model: Any = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        started = time.perf_counter()
        self.engine: RolloutEngine = build_rollout(
            RolloutSection(
                engine=engine, max_tokens=MAX_TOKENS, kv_cache_gb=0.25, update_timeout=20.0, **section
            ),
            str(work / "model"),
            "float32",
            device=choose_device("cpu"),
            max_prompt=MAX_PROMPT,
            seed=0,
            name="engine 7",
        )
        self.results: dict[str, Any] = {"start_s": time.perf_counter() - started}
        self.version = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.model.named_parameters())

    def perturb(self) -> None:
        """As an optimizer does: a step of its own size for each weight."""
        draw = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw)

    def forward(self, tokens_T: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        ids = torch.from_numpy(tokens_T).long()[None]
        with torch.no_grad():
            logits = self.model(ids).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()

    def update(self) -> None:
        self.version += 1
        self.perturb()
        self.engine.update_weights(write_update(self.tensors(), self.version))

    def update_to_uniform(self) -> None:
        """With a norm of zero all tokens are equally likely."""
        self.version += 1
        flat = {name: weight.detach() for name, weight in self.tensors()}
        flat["model.norm.weight"] = torch.zeros_like(flat["model.norm.weight"])
        self.engine.update_weights(write_update(flat.items(), self.version))

    def scored_difference(
        self, sequences: Sequence[np.ndarray], scored: Sequence[npt.NDArray[np.float32]]
    ) -> float:
        """Of log-probs that the engine gave to whole sequences; the largest of their means."""
        return max(
            float(np.abs(self.forward(tokens_T) - logps).mean())
            for tokens_T, logps in zip(sequences, scored, strict=True)
        )

    def difference(self, trajectory: Trajectory, temperature: float) -> float:
        ours = self.forward(trajectory.tokens_T, temperature)[trajectory.prompt_length - 1 :]
        return float(np.abs(ours - trajectory.logp_N).mean())

    def same_weights(self) -> None:
        sampling = Sampling(max_tokens=24, temperature=0.8)
        rows = []
        for _ in range(UPDATES):
            self.update()
            found = list(self.engine.generate(requests(2), sampling))
            probed = self.engine.logps([t.tokens_T for t in found])
            rows.append(
                {
                    "sampled": max(self.difference(t, 0.8) for t in found),
                    "probed": self.scored_difference([t.tokens_T for t in found], probed),
                    "lengths": [len(p) == len(t) - 1 for t, p in zip(found, probed, strict=True)],
                    "versions": sorted({int(v) for t in found for v in t.version_N}),
                    "version": self.engine.version,
                    "expected": self.version,
                }
            )
        self.results["updates"] = rows

    def responses(self) -> None:
        sampling = Sampling(max_tokens=12, temperature=1.0)

        def key(found: Iterator[Trajectory]) -> dict[str, list[int]]:
            return {f"{t.row}/{t.sample}": t.tokens_T.tolist() for t in found}

        together = key(self.engine.generate(requests(4), sampling))
        alone: dict[str, list[int]] = {}
        for request in reversed(requests(4)):
            alone |= key(self.engine.generate([request], sampling))
        later = iter([requests(4)[:1], requests(4)[1:3]])
        one_by_one = key(self.engine.generate(requests(4)[3:], sampling, lambda: next(later, [])))
        greedy = list(self.engine.generate(requests(2), replace(sampling, temperature=0.0)))
        narrow = list(self.engine.generate(requests(1), replace(sampling, top_k=1)))
        with torch.no_grad():
            best = [
                int(self.model(torch.from_numpy(t.tokens_T[:-1]).long()[None]).logits[0, -1].argmax())
                for t in greedy
            ]
        self.results["responses"] = {
            "count": len(together),
            "distinct": len({tuple(tokens) for tokens in together.values()}),
            "same_alone": together == alone,
            "same_one_by_one": together == one_by_one,
            "greedy_is_best": best == [int(t.tokens_T[-1]) for t in greedy],
            "greedy_pairs_equal": len({tuple(t.tokens_T.tolist()) for t in greedy}) == len(PROMPTS),
            "greedy_difference": max(self.difference(t, 1.0) for t in greedy),
            "top_k_1_logp": max(float(np.abs(t.logp_N).max()) for t in narrow),
            "prompts_kept": all((t.tokens_T[: t.prompt_length] == PROMPTS[t.row]).all() for t in greedy),
        }

    def ends(self) -> None:
        """Where all tokens are equally likely, some responses end early, others do not."""
        self.update_to_uniform()
        found = list(self.engine.generate(requests(8), Sampling(max_tokens=60)))
        self.results["uniform"] = {
            "finished": [t.finished for t in found],
            "last_is_end": [int(t.tokens_T[-1]) in (END_OF_TEXT, END_OF_TURN) for t in found],
            "inner_ends": sum(
                int(np.isin(t.response_N[:-1], (END_OF_TEXT, END_OF_TURN)).sum()) for t in found
            ),
            "ends_of_turns": sum(int(t.tokens_T[-1]) == END_OF_TURN for t in found),
            "lengths": [len(t.response_N) for t in found],
            "logp_error": max(float(np.abs(t.logp_N + np.log(VOCABULARY)).max()) for t in found),
        }
        self.update()

    def lengths(self) -> None:
        """The longest prompt gets the longest response, and the whole is scored; so is every token."""
        prompt_P = np.arange(VOCABULARY - MAX_PROMPT, VOCABULARY, dtype=np.int32)
        self.update_to_uniform()
        found = list(self.engine.generate(requests(16, [prompt_P]), Sampling(max_tokens=MAX_TOKENS)))
        self.update()
        longest = max(found, key=lambda t: len(t.tokens_T))
        every = np.arange(VOCABULARY, dtype=np.int32)[-MAX_PROMPT - MAX_TOKENS :]
        sequences = [longest.tokens_T, every, prompt_P[:2]]
        scored = self.engine.logps(sequences)
        outside = np.array([1, VOCABULARY], dtype=np.int32)
        self.results["lengths"] = {
            "longest": len(longest.tokens_T),
            "difference": self.scored_difference(sequences, scored),
            "outside": self.error(lambda: self.engine.logps([outside])),
            "after": len(self.engine.logps([every])),
        }

    def turns(self) -> None:
        """An episode: what came back, what an environment adds, and the next response to all of it."""
        sampling = Sampling(max_tokens=8, temperature=0.9)
        tokens_T, worst = PROMPTS[0], 0.0
        for turn in range(3):
            (found,) = self.engine.generate(requests(1, [tokens_T]), sampling)
            worst = max(worst, self.difference(found, 0.9))
            tokens_T = np.concatenate([found.tokens_T, np.array([40 + turn, 41], dtype=np.int32)])
        self.results["turns"] = {"difference": worst}

    def sleeps(self) -> None:
        """Also twice, and wake without sleep: the loop wakes engines that have just been started."""
        self.engine.wake()
        self.engine.sleep()
        self.engine.sleep()
        asleep = self.error(lambda: next(self.engine.generate(requests(1), Sampling(max_tokens=4))))
        self.engine.wake()
        self.engine.wake()
        self.update()
        found = list(self.engine.generate(requests(2), Sampling(max_tokens=8)))
        self.results["sleeps"] = {"asleep": asleep, "difference": max(self.difference(t, 1.0) for t in found)}

    def abandoned(self) -> None:
        iterator = self.engine.generate(requests(8), Sampling(max_tokens=40))
        next(iterator)
        second = self.error(lambda: next(self.engine.generate(requests(1), Sampling(max_tokens=4))))
        update = self.error(self.update)
        iterator.close()  # type: ignore[attr-defined]
        self.results["abandoned"] = {"second": second, "update": update}
        # At once: an engine that still ran the others would not survive the one or the other.
        self.engine.sleep()
        self.engine.wake()
        self.update()
        found = list(self.engine.generate(requests(1), Sampling(max_tokens=4)))
        self.results["abandoned"]["difference"] = max(self.difference(t, 1.0) for t in found)

    def in_flight(self) -> None:
        """Updates between tokens: early, and so late that responses end while the weight check runs."""
        self.results["in_flight"] = {"can": self.engine.updates_in_flight}
        if self.engine.updates_in_flight:
            self.results["in_flight"] |= {
                "same": self.updated_to_the_same(),
                "other": [self.updated_to_others(calls) for calls in (1, 5, 21, 22, 23)],
                "failed": self.failed_in_flight(),
            }

    def generate_with(self, act: Callable[[], Sequence[Request]], calls: int) -> dict[str, Trajectory]:
        """Responses, with something done at one of the calls of `more`."""
        numbers = count(1)

        def more() -> Sequence[Request]:
            return act() if next(numbers) == calls else ()

        sampling = Sampling(max_tokens=24, temperature=0.8)
        return {
            f"{t.row}/{t.sample}": t for t in self.engine.generate(requests(2, IN_FLIGHT), sampling, more)
        }

    def updated_to_the_same(self) -> dict[str, bool]:
        def update() -> Sequence[Request]:
            self.version += 1
            self.engine.update_weights(write_update(self.tensors(), self.version))
            return ()

        self.update()
        plain, updated = self.generate_with(lambda: (), 9), self.generate_with(update, 9)
        pairs = [(trajectory, updated[key]) for key, trajectory in plain.items()]
        return {
            "tokens": all(np.array_equal(a.tokens_T, b.tokens_T) for a, b in pairs),
            "logps": all(np.array_equal(a.logp_N, b.logp_N) for a, b in pairs),
            "two_versions": any(len(np.unique(b.version_N)) == 2 for _, b in pairs),
        }

    def updated_to_others(self, calls: int) -> dict[str, Any]:
        """The first token of the new version, by response, and how far log-probs are from what they say."""
        scored, before = [], copy.deepcopy(self.model)
        late = replace(requests(1, IN_FLIGHT)[-1], sample=9)

        def update() -> Sequence[Request]:
            self.update()
            (logps,) = self.engine.logps([PROMPTS[-1]])
            scored.append(self.scored_difference([PROMPTS[-1]], [logps]))
            return [late]

        found = self.generate_with(update, calls)
        begun_later = found.pop(f"{late.row}/9")
        firsts = {key: int((t.version_N < self.version).sum()) for key, t in found.items()}
        changed = {key: t for key, t in found.items() if firsts[key] < len(t.response_N)}
        return {
            "calls": calls,
            "firsts": firsts,
            "lengths": {key: len(t.response_N) for key, t in found.items()},
            "versions": sorted({int(v) - self.version for t in found.values() for v in t.version_N}),
            "difference": max(self.across(before, t, firsts[key]) for key, t in found.items()),
            "difference_one_earlier": max(
                (self.across(before, t, firsts[key] - 1) for key, t in changed.items() if firsts[key]),
                default=None,
            ),
            "scored": max(scored),
            "begun_later": self.difference(begun_later, 0.8),
            "version_of_later": sorted({int(v) - self.version for v in begun_later.version_N}),
        }

    def across(self, before: Any, trajectory: Trajectory, first: int) -> float:
        """The largest difference to a model that gets new weights before a token, and keeps its cache."""
        ids, begin = torch.from_numpy(trajectory.tokens_T).long()[None], trajectory.prompt_length - 1
        # The prompt is read by the weights that write the first token.
        cut, cache, parts = begin + first if first else 0, None, []
        with torch.no_grad():
            for model, part in ((before, ids[:, :cut]), (self.model, ids[:, cut:-1])):
                if part.shape[1]:
                    output = model(part, past_key_values=cache, use_cache=True)
                    cache = output.past_key_values
                    parts.append(output.logits[0])
        logits = torch.cat(parts)[begin:] / 0.8
        logps = logits.log_softmax(-1).gather(1, ids[0, begin + 1 :, None])[:, 0].numpy()
        return float(np.abs(logps - trajectory.logp_N).max())

    def failed_in_flight(self) -> dict[str, str]:
        """An update that fails leaves nothing to go on with."""
        errors = []

        def update() -> Sequence[Request]:
            announced = replace(write_update(self.tensors(), self.version + 1), digest="another")
            errors.append(self.error(lambda: self.engine.update_weights(announced)))
            return ()

        generation = self.error(lambda: self.generate_with(update, 4))
        self.update()
        return {"update": errors[0], "generation": generation}

    def error(self, act: Callable[[], Any]) -> str:
        try:
            act()
        except RolloutError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def bad_updates(self) -> None:
        self.update()  # one that is good, to be damaged
        good = self.version

        def damage(change: Callable[[Path], None], name: str) -> None:
            self.perturb()
            update = write_update(self.tensors(), self.version + 1)
            change(Path(path_of(update)))
            self.try_bad(name, lambda: self.engine.update_weights(update))

        def truncate(path: Path) -> None:
            os.truncate(path, path.stat().st_size - 1000)

        def flip(path: Path) -> None:
            with path.open("r+b") as file:
                file.seek(-777, os.SEEK_END)
                byte = file.read(1)
                file.seek(-777, os.SEEK_END)
                file.write(bytes([byte[0] ^ 1]))

        damage(truncate, "truncated")
        damage(flip, "flipped")
        damage(Path.unlink, "not delivered")
        for part in ("self_attn.k_proj", "mlp.up_proj", "model.norm", "input_layernorm", "embed_tokens"):
            kept = [(name, tensor) for name, tensor in self.tensors() if part not in name]
            update = write_update(kept, self.version + 1)
            self.try_bad(f"without {part}", lambda update=update: self.engine.update_weights(update))
        stale = write_update(self.tensors(), good)
        announced = replace(stale, version=self.version + 5)
        self.try_bad("skipped", lambda: self.engine.update_weights(announced))
        shapes = [(n, t.reshape(-1) if "o_proj" in n else t) for n, t in self.tensors()]
        update = write_update(shapes, self.version + 1)
        self.try_bad("wrong shape", lambda: self.engine.update_weights(update))

    def try_bad(self, name: str, act: Callable[[], Any]) -> None:
        started = time.perf_counter()
        error = self.error(act)
        seconds = time.perf_counter() - started
        refused = self.error(lambda: next(self.engine.generate(requests(1), Sampling(max_tokens=2))))
        version = self.engine.version
        self.update()
        found = list(self.engine.generate(requests(1), Sampling(max_tokens=8)))
        self.results.setdefault("bad", {})[name] = {
            "error": error,
            "seconds": seconds,
            "refused": refused,
            "version_kept": version == self.version - 1,
            "difference_after": max(self.difference(t, 1.0) for t in found),
        }

    def listening(self) -> None:
        """Addresses that this process and its children listen on."""
        family, fresh = {os.getpid()}, True
        table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in table.splitlines()[1:]]
        while fresh:
            fresh = {pid for pid, parent in pairs if parent in family} - family
            family |= fresh
        sockets = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
        self.results["listening"] = [
            line.split()[3] for line in sockets.splitlines() if any(f"pid={pid}," in line for pid in family)
        ]
        self.results["processes"] = len(family)

    def run(self, *more: Callable[[], None]) -> None:
        """Every check, those of one engine last; prints what was found."""
        for check in (
            self.listening,
            self.same_weights,
            self.responses,
            self.ends,
            self.lengths,
            self.turns,
            self.sleeps,
            self.abandoned,
            self.in_flight,
            self.bad_updates,
            *more,
        ):
            started = time.perf_counter()
            check()
            self.results.setdefault("seconds", {})[check.__name__] = time.perf_counter() - started
        self.engine.close()
        self.engine.close()  # again is nothing
        print(json.dumps(self.results))
