"""A model's directory and tokenizer, without torch: commands that show tokens start without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isotrain import hub
from isotrain.errors import ModelError
from isotrain.files import parse_json, read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LARGEST_CONFIG = 16 << 20


def model_directory(path: str, field: str = "model.path") -> Path:
    """A local directory as it is; what a Hub name stands for is downloaded.

    `name@revision` is a commit, tag or branch of it. `field` is where the user wrote the path.
    """
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return _with_json(local)
    if local.exists() or path.startswith((".", "/", "~")):
        if (local / "resolved.json").is_file() and (local / "metrics.jsonl").is_file():
            raise ModelError(
                f"{field}: '{path}' is a run, not a model; write its model with "
                f"isotrain export {path} --out DIR, and set DIR"
            )
        problem = "has no config.json" if local.exists() else "does not exist"
        raise ModelError(f"{field}: '{path}' {problem}; set a Hugging Face model directory")
    try:
        return _with_json(hub.download(path))
    except hub.HubError as error:
        raise ModelError(f"{field}: '{path}' is neither a local model directory nor {error}") from error


def _with_json(directory: Path) -> Path:
    """The directory, if its config.json can be parsed: other packages would end in the middle of it."""
    path = directory / "config.json"
    try:
        if path.exists() and not isinstance(parse_json(read_regular(path, _LARGEST_CONFIG)), dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be used: {error}; copy the model again") from error
    return directory


def hub_commit(path: str, field: str = "model.path") -> str | None:
    """The commit that a Hub name stands for; None for a local directory."""
    directory = model_directory(path, field)
    return None if directory == Path(path).expanduser() else hub.commit(path, directory)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # imports torch, unless that is hidden

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # the libraries raise many kinds, also plain ones, and a RecursionError
        raise ModelError(f"the tokenizer in {directory} cannot be used: {str(error)[:500]}") from error
    return tokenizer
