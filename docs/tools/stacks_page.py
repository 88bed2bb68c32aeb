"""Write the page of stacks from the matrix and the rules: `python docs/tools/stacks_page.py PATH`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from isotrain.recipe.reference import page_command, table_row
from isotrain.tools.doctor.matrix import Stack, matrix
from isotrain.tools.doctor.nearest import carries_isotrain
from isotrain.tools.doctor.rules import rules

_HEAD = """# Stacks

[中文](zh/stacks.md)

Which versions work together, and which problems are known. This page is generated from
`matrix.yaml` and `rules.yaml` in `src/isotrain/tools/doctor` by
`python docs/tools/stacks_page.py docs/stacks.md`; `isotrain doctor` compares a machine with
them. How to install is in [ascend.md](ascend.md).

**No row for Ascend or CUDA is verified: isotrain has not run on such hardware yet.** `published` means that
its publisher says that it works. The column `torch` says whether isotrain's bounds allow the stack's torch.
A row is `resolved` on the day when pip's reports of the published wheels contradicted none of its versions
(`pytest -m slow tests/tools/doctor/test_published_metadata.py`). A package with `--no-deps` asks for other
versions than the row has: pip refuses the row without that option.
"""


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join([_HEAD, *_stacks(), *_toolkits(), *_rules()])


def _stacks() -> Iterator[str]:
    yield "## Published together\n"
    columns = (
        "stack",
        "hardware",
        "driver",
        "CANN",
        "Python",
        "packages",
        "not supported",
        "torch",
        "resolved",
    )
    yield table_row(*columns, "status", "source")
    yield "|" + "---|" * (len(columns) + 2)
    for stack in matrix().stacks:
        hardware = ", ".join(stack.boxes or stack.hardware) or stack.device
        yield table_row(
            stack.name,
            hardware,
            stack.hdk or "",
            stack.cann or "",
            stack.python or "",
            _packages(stack),
            ", ".join(stack.unsupported),
            "new enough" if carries_isotrain(stack) else "too old",
            _resolved(stack),
            stack.status,
            stack.source,
        )
    yield ""


def _packages(stack: Stack) -> str:
    without = dict.fromkeys(stack.no_deps, " (--no-deps)")
    pins = [f"{name} {version}{without.get(name, '')}" for name, version in stack.packages.items()]
    pins += [f"{name} {version} (ARM)" for name, version in stack.arm.items()]
    pins += [f"{name} {version} (x86)" for name, version in stack.x86.items()]
    return ", ".join(pins)


def _resolved(stack: Stack) -> str:
    file = f", `pip install --no-deps -r {stack.requirements}`" if stack.requirements else ""
    return f"by pip on {stack.checked}{file}" if stack.checked else ""


def _toolkits() -> Iterator[str]:
    yield "## torch_npu of each CANN\n"
    yield "| CANN | torch_npu |"
    yield "|---|---|"
    for toolkit, plugins in matrix().torch_npu_of_cann.items():
        yield table_row(toolkit, ", ".join(plugins))
    yield ""


def _rules() -> Iterator[str]:
    yield "## Known problems\n"
    yield "| | symptom | fix | source |"
    yield "|---|---|---|---|"
    for rule in rules():
        yield table_row(f"`{rule.id}` ({rule.level})", rule.symptom, rule.fix, rule.source)
    yield ""


if __name__ == "__main__":
    sys.exit(page_command("python docs/tools/stacks_page.py", render))
