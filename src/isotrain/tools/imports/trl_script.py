"""The settings of a Python script that trains with TRL: it is parsed, and never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.python import MOST_DEPTH, Effect, PythonScript, called
from isotrain.tools.imports.source import ImportSource, ImportSourceError, Unknown

TRAINERS = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward",
    "GRPOTrainer": "grpo",
}
_CONFIGS = {name.replace("Trainer", "Config") for name in TRAINERS} | {"TrainingArguments"}
_POSITIONS = {
    "sft": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "dpo": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "kto": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "reward": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
}
_LORA = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path")
_FILE_READERS = ("json", "parquet", "csv")
# What is done with an object of the training and changes nothing of it.
_HARMLESS = {
    "train", "save_model", "save_state", "save_pretrained", "push_to_hub", "evaluate", "log", "log_metrics",
    "save_metrics", "print_trainable_parameters", "create_model_card", "end", "generate", "eval", "info",
    "gradient_checkpointing_enable", "enable_input_require_grads", "predict", "print", "len", "warning",
}  # fmt: skip
_HARMLESS_ATTRIBUTES = {
    "pad_token", "pad_token_id", "padding_side", "config.use_cache", "config.pad_token_id",
    "config.pretraining_tp", "generation_config.pad_token_id",
}  # fmt: skip


class _Reader:
    """From a script to the settings of its training."""

    def __init__(self, script: PythonScript, source: ImportSource) -> None:
        self.script, self.source = script, source
        self.names: dict[str, set[str]] = {}

    def read(self) -> None:
        trainers = [(call, kind) for call in self.script.calls if (kind := self._trainer(call))]
        if not trainers:
            raise ImportSourceError(f"no call of {', '.join(TRAINERS)} was found in the script")
        trainers.sort(key=lambda item: item[0].lineno)
        call, trainer = trainers[0]
        self.source.program = TRAINERS[trainer]
        if len(trainers) > 1:
            where = ", ".join(str(other.lineno) for other, _ in trainers)
            self._stray(
                "the script", f"there are {len(trainers)} trainers (lines {where}); this is the first", call
            )
        if (name := called(call).rpartition(".")[2]) != trainer:
            line = self.script.subclasses[name][1]
            self._stray(name, f"a class of the script (line {line}) that may change {trainer}", call)
        given = list(self._arguments(call, _POSITIONS[TRAINERS[trainer]]))
        for key, value in given:
            self._argument(key, value)
        for effect in self.script.effects:
            self._effect(effect)

    def _trainer(self, call: ast.Call) -> str:
        name = called(call).rpartition(".")[2]
        name = name if name in TRAINERS else self.script.subclasses.get(name, ("", 0))[0]
        return name if name in TRAINERS else ""

    def _stray(self, what: str, why: str, node: ast.AST, opens: bool = False) -> None:
        line = getattr(node, "lineno", 0)
        self.source.expected += 1
        self.source.enter(what, line)
        self.source.stray(shown(what, 60), why, line, opens)

    def _arguments(self, call: ast.Call, positions: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
        """Names and values of the arguments of a call; what may be any is named."""
        for place, value in enumerate(call.args):
            if isinstance(value, ast.Starred) or place >= len(positions):
                self._stray(ast.unparse(value), "which arguments these are is not known", value, opens=True)
                return
            yield positions[place], value
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
                continue
            found = self.script.meant(keyword.value)
            if isinstance(found, ast.Dict) and all(isinstance(key, ast.Constant) for key in found.keys):
                yield from ((str(k.value), v) for k, v in zip(found.keys, found.values, strict=True)
                            if isinstance(k, ast.Constant))  # fmt: skip
            elif isinstance(found, ast.Call) and called(found) == "dict" and not found.args:
                yield from self._arguments(found, ())
            else:
                self._stray(
                    f"**{ast.unparse(keyword.value)}", "it may be any argument", keyword.value, opens=True
                )

    def _set(self, key: str, value: Any, node: ast.AST) -> None:
        line = getattr(node, "lineno", 0)
        self.source.expected += 1
        self.source.enter(key, line)
        self.source.set(key, value, line)

    def _settle(self, key: str, node: ast.AST, outcome: Any) -> None:
        self.source.expected += 1
        self.source.enter(key, getattr(node, "lineno", 0), outcome)

    def _argument(self, key: str, node: ast.expr) -> None:
        names = self.names.setdefault(key, set())
        found = self.script.meant(node, names)
        name = called(found).rpartition(".")[2] if isinstance(found, ast.Call) else ""
        if key == "args":
            if not isinstance(found, ast.Call) or name not in _CONFIGS:
                why = found.why if isinstance(found, Unknown) else shown(ast.unparse(found), 60)
                raise ImportSourceError(
                    f"line {node.lineno}: the trainer's arguments are not in the script ({why}): give the "
                    "command that runs it, such as `trl sft --model_name_or_path ...`, or its YAML file"
                )
            self._settle("args", node, "mapped")
            for own, value in self._arguments(found, ("output_dir",)):
                self._set(own, self.script.value(value), value)
        elif key == "model":
            self._model(node, found, name)
        elif key in ("train_dataset", "eval_dataset"):
            self._set(f"trainer.{key}", self.dataset(node), node)
        elif key == "peft_config" and name == "LoraConfig" and isinstance(found, ast.Call):
            self._settle("peft_config", node, "mapped")
            self._lora(found)
        elif key in ("processing_class", "tokenizer") and name == "from_pretrained":
            assert isinstance(found, ast.Call)
            path = self.script.value(found.args[0]) if found.args else Unknown("it has no name")
            setting = self.source.settings.get("model_name_or_path")
            if setting is not None and path == setting.value:
                self._settle(key, node, "no effect")
            else:
                self._set(f"trainer.{key}", path, node)
        else:
            self._set(f"trainer.{key}", self.script.value(node), node)

    def _model(self, node: ast.expr, found: ast.expr | Unknown, name: str) -> None:
        """A name, `from_pretrained`, or either with adapters."""
        if isinstance(found, ast.Call) and name == "get_peft_model" and len(found.args) > 1:
            adapters = self.script.meant(found.args[1])
            if isinstance(adapters, ast.Call) and called(adapters).endswith("LoraConfig"):
                self._lora(adapters)
                inner = self.script.meant(found.args[0], self.names["model"])
                self._model(
                    found.args[0],
                    inner,
                    called(inner).rpartition(".")[2] if isinstance(inner, ast.Call) else "",
                )
                return
        if not isinstance(found, ast.Call) or name != "from_pretrained":
            self._set("model_name_or_path", self.script.value(node), node)
            return
        arguments = list(self._arguments(found, ("pretrained_model_name_or_path",)))
        for key, value in arguments:
            known = "model_name_or_path" if key.startswith("pretrained") else f"model_init_kwargs.{key}"
            self._set(known, self.script.value(value), value)
        if not {"dtype", "torch_dtype"} & {key for key, _ in arguments}:
            self._set("model_init_kwargs.dtype", "auto", found)

    def _lora(self, call: ast.Call) -> None:
        self._settle("LoraConfig", call, "mapped")
        self.source.set("use_peft", True, call.lineno)
        for key, value in self._arguments(call, _LORA):
            self._set(f"peft.{key}", self.script.value(value), value)

    def dataset(self, node: ast.expr, split: str | None = None, depth: int = 0) -> Any:
        """A data set as `data.train` names it: files, or `name:config:split`."""
        found = self.script.meant(node)
        if isinstance(found, Unknown) or depth > MOST_DEPTH:
            return found if isinstance(found, Unknown) else Unknown("it is made in too many steps")
        if isinstance(found, ast.Subscript):
            part = self.script.value(found.slice)
            if split is not None or not isinstance(part, str):
                return Unknown("which of its splits it is is not known")
            return self.dataset(found.value, part, depth + 1)
        name = called(found).rpartition(".")[2] if isinstance(found, ast.Call) else ""
        if isinstance(found, ast.Call) and name == "load_dataset":
            positions = ("path", "name", "data_dir", "data_files")
            arguments = {key: self.script.value(value) for key, value in self._arguments(found, positions)}
            for key in ("num_proc", "cache_dir", "token", "streaming", "keep_in_memory"):
                arguments.pop(key, None)
            return dataset_name(arguments | ({"split": split} if split else {}))
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute) and "from_" not in name:
            inner = self.dataset(found.func.value, split, depth + 1)
            if not isinstance(inner, Unknown) and name != "shuffle":
                why = "it changes rows in code: write the changed rows into a file, and set data.train"
                self._stray(f".{name}(...)", why, found)
            return inner
        return Unknown(f"{shown(ast.unparse(found), 60)} is no load_dataset: write its rows into a file")

    def _effect(self, effect: Effect) -> None:
        """Statements that may change an object of the training."""
        node, line = effect.node, effect.node.lineno
        of_args = self.names.get("args", set())
        objects = {name for names in self.names.values() for name in names}
        if isinstance(node, ast.Call):
            base, _, method = called(node).rpartition(".")
            passed = {item.id for item in node.args if isinstance(item, ast.Name)}
            if base in ("", "builtins") and method in ("exec", "eval"):
                self._stray(f"{method}(...)", "it may change anything", node, opens=True)
            elif method not in _HARMLESS and (base.partition(".")[0] in objects or passed & objects):
                self._stray(ast.unparse(node), "what it changes is not known", node)
            return
        base, _, path = called(node).partition(".")
        if isinstance(node, ast.Subscript):
            base, path = called(node.value).partition(".")[0], ""
        if base in of_args and path and "." not in path:
            value = self.script.value(effect.value) if effect.value is not None else Unknown("it is computed")
            if effect.conditional:
                value = Unknown(f"line {line} sets it under a condition")
            self._set(path, value, node)
        elif base in objects and path not in _HARMLESS_ATTRIBUTES:
            self._stray(f"{ast.unparse(node)} = ...", "what it changes is not known", node)


def dataset_name(arguments: Mapping[str, Any]) -> Any:
    """`load_dataset`'s arguments as a name of `data.train`."""
    unknown = next((value for value in arguments.values() if isinstance(value, Unknown)), None)
    others = arguments.keys() - {"path", "name", "data_files", "split", "revision"}
    if unknown is not None or others:
        return unknown or Unknown(f"load_dataset's {sorted(others)[0]} is not read")
    path, files, split = arguments.get("path"), arguments.get("data_files"), arguments.get("split") or "train"
    if not isinstance(path, str):
        return Unknown("load_dataset has no name")
    if isinstance(split, str) and not re.fullmatch(r"\w+", split):
        return Unknown(f"the split {shown(split, 40)} takes some of the rows: write them into a file")
    if path in _FILE_READERS:
        files = files.get(split) if isinstance(files, Mapping) else files
        return files if isinstance(files, str | list) else Unknown("load_dataset has no data_files")
    if files is not None:
        return Unknown("data_files of a data set is not read: give the files themselves")
    revision, config = arguments.get("revision"), arguments.get("name")
    name = f"{path}@{revision}" if revision else path
    return with_split(f"{name}:{config}" if config else name, split)


def with_split(name: Any, split: str) -> Any:
    """A Hub name carries its split, unless it is train; files have none."""
    local = (
        not isinstance(name, str)
        or name.startswith((".", "/", "~"))
        or re.search(r"\.(?:jsonl?|parquet|csv)$", name)
    )
    if local:
        return (
            name if split == "train" else Unknown(f"files have no split {shown(split, 30)}: set data.train")
        )
    if ":" not in name:
        return name if split == "train" else f"{name}:{split}"
    return f"{name}:{split}" if name.count(":") == 1 else name


def read_python(text: str) -> ImportSource:
    """The settings of the first trainer of a script."""
    source = ImportSource("script")
    try:
        _Reader(PythonScript(text), source).read()
    except RecursionError:
        raise ImportSourceError("the script is too deeply nested to be read") from None
    return source
