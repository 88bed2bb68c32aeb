"""Check that a model has the policy's tokenizer."""

from __future__ import annotations

from pathlib import Path

from isotrain.errors import ModelError
from isotrain.models.config import vocabulary_size
from isotrain.models.load import load_tokenizer, model_directory, read_config


def check_vocabulary(policy: Path, path: str, field: str) -> list[str]:
    """Raise where the model at `path`, named by `field`, has another tokenizer; returns warnings."""
    directory = model_directory(path, field)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return [f"{field}: {path} has no tokenizer to compare with the policy's"]
    ours, theirs = load_tokenizer(policy).get_vocab(), load_tokenizer(directory).get_vocab()
    for token, number in ours.items():
        if theirs.get(token, number) != number:
            raise ModelError(
                f"{field}: its tokenizer is not the policy's: {token!r} has number {theirs[token]} there and "
                f"{number} in model.path; set a model with the policy's tokenizer"
            )
    unknown = {token: number for token, number in ours.items() if token not in theirs}
    if not unknown:
        return []
    size = vocabulary_size(read_config(directory))
    if max(unknown.values()) >= size:
        token = max(unknown, key=unknown.__getitem__)
        raise ModelError(
            f"{field}: its tokenizer is not the policy's: it has {size} tokens but not {token!r}, "
            f"number {unknown[token]} in model.path; set a model with the policy's tokenizer"
        )
    few = ", ".join(map(repr, sorted(unknown)[:5]))
    return [f"{field}: its tokenizer lacks {len(unknown)} token(s) of the policy, such as {few}"]
