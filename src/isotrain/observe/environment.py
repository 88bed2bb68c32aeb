"""Everything that a run's numbers depend on besides its recipe: machine, packages, variables, command."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.plugins import plugin_packages

# Families, so that a device's own builds and plug-ins (`torch-*`, `vllm-*`) are seen without being named.
PACKAGES = re.compile(
    r"""accelerate|datasets|flash-attn.*|intel-openmp|isotrain|math-verify|mkl.*|numpy|peft|pyarrow|ray
    |safetensors|scipy|sglang.*|tokenizers|torch.*|transformers|triton.*|vllm.*""",
    re.VERBOSE,
)

# Variables that change numbers on any device; a device adds its own.
VARIABLES = re.compile(
    r"""(ATEN|DNNL|GOMP|KMP|MKL|OMP|ONEDNN|OPENBLAS|PYTORCH|TORCHINDUCTOR|TORCH)_.*|PYTHONHASHSEED
    |VLLM_((ATTENTION|CPU|USE)_.*|BATCH_INVARIANT)""",
    re.VERBOSE,
)

SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)

# In a command, `prompt_key=` and `tokens_per_micro_batch=` are settings, so only whole words count.
SECRET_ARGUMENT = re.compile(
    r"(?:^|[._-])(?:auth|token|secret|password|passwd|credentials?|(?:api|access|secret|private)[._-]?key)$",
    re.IGNORECASE,
)
URL_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]*@")

# Instructions that decide which kernels run, and so the order of summation.
CPUINFO = Path("/proc/cpuinfo")
CPU_FEATURES = re.compile(r"amx_\w+|avx\w*|fma|asimd(dp|hp)?|bf16|i8mm|sve(2|bf16)?")


def describe_environment(
    device: Mapping[str, object], variables: Iterable[str], *, command: Sequence[str] | None = None
) -> dict[str, object]:
    """One start of a run, as it goes into `environment.json`.

    `variables` are names that matter to the device; `command` is this process's own unless given.
    """
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": without_secrets(sys.argv if command is None else command),
        "commit": _commit(Path(__file__).resolve().parents[3]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "device": dict(device),
        "packages": _packages(),
        "variables": _variables(variables),
    }


def _packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    plugins = set(map(package_name, plugin_packages()))
    for distribution in importlib.metadata.distributions():
        name = package_name(distribution.name or "")
        # The first on the path is the one that is imported.
        if name not in versions and (name in plugins or PACKAGES.fullmatch(name)):
            versions[name] = distribution.version
    return dict(sorted(versions.items()))


def package_name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _variables(asked: Iterable[str]) -> dict[str, str]:
    home = os.path.expanduser("~")
    return {
        name: URL_CREDENTIALS.sub("***@", value.replace(home, "~") if len(home) > 1 else value)
        for name, value in numerics(os.environ, asked).items()
    }


def numerics(environment: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """The variables of an environment that change numbers; `asked` are names that matter to the device."""
    names = set(asked)
    values: dict[str, str] = {}
    for name, value in sorted(environment.items()):
        if SECRET.search(name):
            continue
        # A path in a variable that only matched a pattern is somebody's cache, not a numerical setting.
        general = "/" not in value and VARIABLES.fullmatch(name)
        if name in names or general:
            values[name] = value
    return values


def differences(environments: Sequence[Mapping[str, Any]], but: Collection[str]) -> list[str]:
    """How ranks differ from the first in what changes numbers; `but` are variables that may differ."""
    lines: dict[str, str] = {}
    first = _flat(environments[0], but)
    for rank, environment in enumerate(environments[1:], start=1):
        other = _flat(environment, but)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                words = f"{name}: rank 0 has {first.get(name)}, rank {rank} has {other.get(name)}"
                lines.setdefault(name, words)
    return list(lines.values())


def _flat(environment: Mapping[str, Any], but: Collection[str]) -> dict[str, object]:
    sections = ("packages", "variables", "cpu")
    flat = {f"{name}.{key}": value for name in sections for key, value in environment[name].items()}
    flat |= {name: environment[name] for name in ("commit", "python", "machine")}
    return {name: value for name, value in flat.items() if name.partition(".")[2] not in {*but, "usable"}}


def without_secrets(command: Sequence[str]) -> list[str]:
    shown: list[str] = []
    hide_next = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        secret = SECRET_ARGUMENT.search(name) is not None
        if hide_next:
            shown.append("***")
        elif secret and equals:
            shown.append(f"{name}=***")
        else:
            shown.append(URL_CREDENTIALS.sub("***@", argument))
        hide_next = secret and not equals and argument.startswith("-")
    return shown


def _cpu(cpuinfo: Path = CPUINFO) -> dict[str, object]:
    fields = _cpu_fields(cpuinfo)
    model = fields.get("model name")
    if model is None and "cpu part" in fields:
        # Arm kernels give numbers in place of a name.
        model = f"implementer {fields.get('cpu implementer', '?')} part {fields['cpu part']}"
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "model": model or platform.processor() or "unknown",
        "count": os.cpu_count(),
        "usable": len(affinity(0)) if affinity else os.cpu_count(),
        "features": cpu_features(cpuinfo),
    }


def cpu_features(cpuinfo: Path = CPUINFO) -> list[str]:
    """Instructions of this processor that decide which kernels run."""
    fields = _cpu_fields(cpuinfo)
    features = (fields.get("flags") or fields.get("features") or "").split()
    return sorted(feature for feature in features if CPU_FEATURES.fullmatch(feature))


def _cpu_fields(cpuinfo: Path) -> dict[str, str]:
    """Fields of the first processor."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    return fields


def _commit(root: Path) -> str | None:
    """The commit of the checkout that this code runs from, `-dirty` when files differ from it."""
    # Without this test an installed package would report the commit of whatever project its venv lies in.
    if not (root / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "--no-optional-locks", "-C", str(root), *describe]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
