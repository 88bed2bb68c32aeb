"""The rules of the house, read from the source: who imports whom, who names vendors, what is never used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "isotrain"

# Lowest first. A package may import itself and packages of lower layers; `cli` may import everything.
LAYERS = (
    {"device", "recipe", "observe"},
    {"process"},
    {"models", "data", "algorithms"},
    {"cluster", "rewards", "engine", "environments"},
    {"weights"},
    {"rollout"},
    {"trainers"},
)
TRAINING: set[str] = set().union(*LAYERS)
# Beside training, which imports none of them: most see recipes and run directories alone, and work where
# torch is not installed.
TOOLS: dict[str, set[str]] = {
    "tools": set(),
    "tools.parity": {"recipe", "observe", "tools.imports"},
    "tools.imports": {"recipe", "observe"},
    "tools.doctor": {"recipe", "observe"},
    "tools.doctor.self_test": {*TRAINING, "tools.doctor", "tools.probes"},
    "tools.evaluate": TRAINING,
    "tools.mismatch": {*TRAINING, "tools.probes"},
    "tools.plan": TRAINING,
    "tools.profile": {"recipe", "observe"},
    "tools.probes": {"recipe", "observe", "models", "engine"},
    "tools.view": {"recipe", "observe", "data"},
}
# The one object of a tool that training uses, by its name and only where a recipe asks for it.
NAMED_TOOL = ("recipe/schema.py", "isotrain.tools.probes:make_probes")
OPEN_TO_ALL = {
    "children",
    "errors",
    "files",
    "hidden_modules",
    "hub",
    "language",
    "plugins",
    "terminal",
    "user_file",
}

# `npu` inside `input` and `ascend` inside `ascending` are English; all else that contains them is a vendor.
VENDOR = re.compile(r"cuda|nccl|hccl|(?<!i)npu|npu(?!t)|ascend(?!ing|ed\b|s\b|ant|ency)", re.IGNORECASE)
# The names of the acceptance rules are those of the community that has them; what a certificate claims of a
# device is held against what its vendor calls it.
NAMES_VENDORS = (
    *("device/", "tools/doctor/", "rollout/vllm.py", "rollout/sglang.py"),
    *("tools/parity/report/acceptance.py", "tools/parity/devices.py"),
)

# Names of objects, as `pkgutil.resolve_name` imports them.
OBJECT_NAME = re.compile(r"isotrain(\.\w+)+:\w+(\.\w+)*")

SANDBOXED = "rewards/code_harness.py"
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
LONGEST_FILE, LONGEST_FUNCTION = 500, 80

# Packages with configs of models, and what these say of the whole model; the rest are fields of adapters, and
# what is set on a layer's own config.
READS_MODELS = {
    *("models", "engine", "weights", "rollout", "trainers", "api"),
    *("tools.plan", "tools.probes", "tools.doctor.self_test", "tools.evaluate"),
}
OF_THE_WHOLE = {
    *("model_type", "architectures", "dtype", "save_pretrained", "quantization_config", "num_labels"),
    *("pad_token_id", "target_modules", "exclude_modules", "base_model_name_or_path", "inference_mode"),
    *("items", "_experts_implementation", "disable"),
}

Checker = Callable[[Path, Path], Iterator[str]]


def imports(tree: ast.Module, module: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that `module` imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{name}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)
        elif isinstance(node, ast.Constant) and OBJECT_NAME.fullmatch(str(node.value)):
            yield node.lineno, str(node.value)


def file_imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    relative = path.relative_to(root).with_suffix("")
    # `__init__` keeps its place in the name, so that one leading dot means the same in every file.
    return imports(ast.parse(path.read_text(encoding="utf-8")), ("isotrain", *relative.parts))


def package_of(module: str) -> str:
    """The package below `isotrain` that a module belongs to: one of a tool, or the first part of its name."""
    tools = [tool for tool in TOOLS if f"{module}.".startswith(f"{tool}.")]
    return max(tools, key=len, default=module.split(".")[0])


def room(path: Path, root: Path) -> str:
    return package_of(".".join(path.relative_to(root).with_suffix("").parts))


def may_import(package: str) -> set[str] | None:
    """The packages that one package may import; None for a package that the design does not know."""
    if package == "api":
        return TRAINING.union(TOOLS) - {"tools.plan", "tools.doctor.self_test"}
    if package == "__init__":
        return {"api"}
    if package in TOOLS:
        return TOOLS[package]
    lower: set[str] = set()
    for layer in LAYERS:
        if package in layer:
            return lower
        lower = lower | layer
    return None


def check_arrows(path: Path, root: Path) -> Iterator[str]:
    package = room(path, root)
    if package in ("cli", "__main__"):
        return
    allowed = set() if package in OPEN_TO_ALL else may_import(package)
    if allowed is None:
        yield f"{path.relative_to(root)}: the design has no package {package!r}"
        return
    where = path.relative_to(root).as_posix()
    for line, name in file_imports(path, root):
        if (where, name) == NAMED_TOOL:
            continue
        top, _, module = name.replace(":", ".").partition(".")
        target = package_of(module) if top == "isotrain" else ""
        if not target or target in allowed | OPEN_TO_ALL | {package, "__version__"}:
            continue
        yield f"{where}:{line}: {package} may not import {target}"


def check_outside_imports(path: Path, root: Path) -> Iterator[str]:
    """`algorithms` is torch and the standard library; `recipe`, `view` and `imports` work without torch."""
    package = room(path, root)
    for line, name in file_imports(path, root):
        top = name.split(".")[0]
        if package == "algorithms":
            inside = name == "isotrain.algorithms" or name.startswith("isotrain.algorithms.")
            wrong = not (top == "torch" or top in sys.stdlib_module_names or inside)
        else:
            wrong = package in ("recipe", "tools.view", "tools.imports") and top in ("torch", "transformers")
        if wrong:
            yield f"{path.relative_to(root)}:{line}: {package} may not import {name}"


def check_vendors(path: Path, root: Path) -> Iterator[str]:
    relative = path.relative_to(root).as_posix()
    if relative.startswith(NAMES_VENDORS):
        return
    if VENDOR.search(relative):
        yield f"{relative}: the file's name names a vendor"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        found = VENDOR.search(line)
        if found:
            yield f"{relative}:{number}: names a vendor: {found.group()!r}"


def check_unsafe(path: Path, root: Path) -> Iterator[str]:
    """Nothing that runs code from data: no pickle in any form, no eval, no exec.

    One file is a program for the sandbox: it may, and no other file may import it."""
    where = path.relative_to(root)
    for line, name in file_imports(path, root):
        if name.startswith(f"isotrain.{SANDBOXED.removesuffix('.py').replace('/', '.')}"):
            yield f"{where}:{line}: imports a program for the sandbox"
        if name.split(".")[0] in UNSAFE_MODULES or name in ("torch.load", "builtins.eval", "builtins.exec"):
            yield f"{where}:{line}: uses {name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and node.id in ("eval", "exec") and where.as_posix() != SANDBOXED:
            yield f"{where}:{node.lineno}: uses {node.id}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            yield f"{where}:{node.lineno}: uses torch.load"
        elif isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True":
            yield f"{where}:{node.value.lineno}: uses allow_pickle"


def check_sizes(path: Path, root: Path) -> Iterator[str]:
    where, text = path.relative_to(root), path.read_text(encoding="utf-8")
    count = len(text.splitlines())
    if count >= LONGEST_FILE:
        yield f"{where}: {count} lines; which two things does it do?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= LONGEST_FUNCTION:
                yield f"{where}:{node.lineno}: {node.name} has {length} lines"


def check_config_reads(path: Path, root: Path) -> Iterator[str]:
    """What a config says of the language model is asked of `models/config.py`: composite ones nest it."""
    where = path.relative_to(root)
    if room(path, root) not in READS_MODELS or where.as_posix() == "models/config.py":
        return

    def is_config(node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            node = node.func
            return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node).endswith("read_config")
        return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node).split(".")[-1] == "config"

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = None
        if isinstance(node, ast.Attribute) and is_config(node.value):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = ast.unparse(node.args[1]).strip("'") if is_config(node.args[0]) else None
        elif isinstance(node, ast.Attribute) and node.attr == "get_text_config":
            name = node.attr
        if name is not None and name not in OF_THE_WHOLE:
            yield f"{where}:{node.lineno}: reads {name!r} of a whole config; ask models/config.py"


CHECKERS: tuple[Checker, ...] = (
    check_arrows,
    check_outside_imports,
    check_vendors,
    check_unsafe,
    check_sizes,
    check_config_reads,
)


@pytest.mark.parametrize("checker", CHECKERS)
def test_source(checker: Checker) -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 10
    violations = [violation for path in files for violation in checker(path, SOURCE)]
    assert not violations, "\n" + "\n".join(violations)


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, isotrain.cli.main; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def violations(checker: Checker, root: Path, name: str, source: str) -> list[str]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return list(checker(path, root))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("models/a.py", "import isotrain.engine.step"),
        ("models/a.py", "from isotrain.engine import step"),
        ("models/a.py", "from isotrain import engine"),
        ("models/a.py", "from ..engine import step"),
        ("models/__init__.py", "from ..engine import step"),
        ("models/a.py", "def f():\n    from isotrain.engine.step import g"),
        ("models/a.py", "import importlib\nimportlib.import_module('isotrain.engine')"),
        ("models/a.py", "from isotrain.data.items import Sample"),
        ("device/a.py", "from isotrain.recipe.schema import Recipe"),
        ("engine/a.py", "import isotrain.weights"),
        ("weights/a.py", "import isotrain.rollout"),
        ("trainers/a.py", "import isotrain.cli.main"),
        ("trainers/a.py", "import isotrain.tools.parity"),
        ("trainers/a.py", "from isotrain.tools.probes import make_probes"),
        (
            "engine/a.py",
            "from pkgutil import resolve_name\nresolve_name('isotrain.tools.probes:make_probes')",
        ),
        ("recipe/schema.py", "PROBES = 'isotrain.tools.probes:other'"),
        ("tools/a.py", "import isotrain.recipe"),
        ("tools/plan/a.py", "import isotrain.api"),
        ("tools/plan/a.py", "import isotrain.tools.parity"),
        ("tools/probes/a.py", "import isotrain.trainers"),
        ("tools/doctor/a.py", "import isotrain.tools.doctor.self_test"),
        ("tools/parity/a.py", "import isotrain.device"),
        ("tools/doctor/a.py", "import isotrain.tools.parity"),
        ("tools/view/a.py", "import isotrain.models.load"),
        ("errors.py", "import isotrain.recipe"),
        ("__init__.py", "from isotrain.trainers import launch"),
        ("api/a.py", "import isotrain.cli.main"),
        ("trainers/a.py", "from isotrain import api"),
        ("helpers/a.py", ""),
        ("utils.py", ""),
    ],
)
def test_arrows_that_point_the_wrong_way(tmp_path: Path, name: str, source: str) -> None:
    assert len(violations(check_arrows, tmp_path, name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cli/a.py", "import isotrain.trainers, isotrain.tools.parity, isotrain.api"),
        ("api/a.py", "import isotrain.trainers.launch, isotrain.tools.parity, isotrain.tools.doctor"),
        ("__init__.py", "def f():\n    from isotrain import api"),
        ("trainers/a.py", "import isotrain.engine, isotrain.recipe.load, isotrain.data"),
        (
            "models/a.py",
            "from isotrain import __version__\nfrom isotrain.errors import ModelError\nfrom . import b",
        ),
        ("models/a.py", "from isotrain.models.b import c\nfrom isotrain.device import base\nimport torch"),
        ("tools/parity/a.py", "import isotrain.observe.metrics, isotrain.recipe, isotrain.tools.parity.b"),
        ("tools/view/a.py", "import isotrain.observe.metrics, isotrain.data.record"),
        ("tools/plan/a.py", "import isotrain.trainers, isotrain.engine"),
        ("tools/probes/a.py", "import isotrain.engine"),
        (
            "tools/doctor/self_test/a.py",
            "import isotrain.trainers, isotrain.tools.doctor, isotrain.tools.probes",
        ),
        ("recipe/schema.py", "PROBES = 'isotrain.tools.probes:make_probes'"),
        ("errors.py", "import os"),
    ],
)
def test_arrows_that_point_the_right_way(tmp_path: Path, name: str, source: str) -> None:
    assert not violations(check_arrows, tmp_path, name, source)


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("algorithms/a.py", "import torch, math\nfrom torch.nn import functional\nfrom .b import c", 0),
        ("algorithms/a.py", "from isotrain.algorithms.b import c", 0),
        ("algorithms/a.py", "import numpy", 1),
        ("algorithms/a.py", "from isotrain.errors import IsotrainError", 1),
        ("recipe/a.py", "import yaml", 0),
        ("recipe/a.py", "def f():\n    import torch.nn", 1),
        ("recipe/a.py", "from transformers import AutoModel", 1),
        ("tools/view/a.py", "def f():\n    from transformers import AutoTokenizer", 1),
    ],
)
def test_outside_imports(tmp_path: Path, name: str, source: str, count: int) -> None:
    assert len(violations(check_outside_imports, tmp_path, name, source)) == count


@pytest.mark.parametrize(
    "line",
    [
        "tensor.cuda()",
        "# works on CUDA only",
        "x = 'torch_npu'",
        "class NpuDevice: ...",
        "isNPU = 1",
        "NPUs = 2",
        "CUDA_VISIBLE_DEVICES = 3",
        "backend = 'nccl'",
        "HcclTimeout = 4",
        "import vllm_ascend",
        "AscendScheduler = 5",
        "npu_type = 6",
        "torchnpu = 7",
    ],
)
def test_vendor_words(tmp_path: Path, line: str) -> None:
    assert len(violations(check_vendors, tmp_path, "engine/a.py", line)) == 1
    assert not violations(check_vendors, tmp_path, "device/a.py", line)
    assert not violations(check_vendors, tmp_path, "rollout/vllm.py", line)
    assert violations(check_vendors, tmp_path, "rollout/vllm_helpers.py", line)


def test_english_words_and_file_names(tmp_path: Path) -> None:
    text = "inputs = input_ids\n# sorted in ascending order, ascended\nINPUT = 'no vendor'\n"
    assert not violations(check_vendors, tmp_path, "engine/a.py", text)
    assert len(violations(check_vendors, tmp_path, "engine/cuda_graph.py", "")) == 1


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import pickle", 1),
        ("from pickle import loads", 1),
        ("def f():\n    import cloudpickle as p", 1),
        ("eval('1')", 1),
        ("run = exec", 1),
        ("from isotrain.rewards import code_harness", 1),
        ("import isotrain.rewards.code_harness", 1),
        ("import torch\ntorch.load('x')", 1),
        ("from torch import load", 1),
        ("np.load(path, allow_pickle=True)", 1),
        ("np.load(path, allow_pickle=False)\nmodel.eval()\n# an unpickled eval('x')\ndcp.load(x)", 0),
    ],
)
def test_unsafe(tmp_path: Path, source: str, count: int) -> None:
    assert len(violations(check_unsafe, tmp_path, "models/a.py", source)) == count


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("models/a.py", "config.sliding_window", 1),
        ("models/a.py", "model.config.num_hidden_layers", 1),
        ("engine/a.py", "getattr(pretrained.config, 'head_dim', None)", 1),
        ("engine/a.py", "hasattr(config, 'layer_types')", 1),
        ("tools/plan/a.py", "read_config(directory).vocab_size", 1),
        ("rollout/a.py", "model.config.get_text_config().vocab_size", 1),
        ("models/config.py", "config.get_text_config()", 0),
        ("tools/imports/a.py", "config.fields", 0),
        ("models/a.py", "model.config.model_type\ntext = text_config(model)\ntext.sliding_window", 0),
    ],
)
def test_config_reads(tmp_path: Path, name: str, source: str, count: int) -> None:
    assert len(violations(check_config_reads, tmp_path, name, source)) == count


def test_sizes(tmp_path: Path) -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    assert not violations(check_sizes, tmp_path, "models/a.py", function(LONGEST_FUNCTION - 1))
    assert len(violations(check_sizes, tmp_path, "models/a.py", function(LONGEST_FUNCTION))) == 1
    assert len(violations(check_sizes, tmp_path, "models/a.py", "async " + function(LONGEST_FUNCTION))) == 1
    assert not violations(check_sizes, tmp_path, "models/a.py", "x = 1\n" * (LONGEST_FILE - 1))
    assert len(violations(check_sizes, tmp_path, "models/a.py", "x = 1\n" * LONGEST_FILE)) == 1
