"""Write the page of stacks from the matrix and the rules: `python -m isotrain.doctor.page PATH`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from isotrain.doctor.matrix import Stack, matrix
from isotrain.doctor.nearest import carries_isotrain
from isotrain.doctor.rules import rules
from isotrain.recipe.generated import page_command, table_row

_HEAD = """# Stacks

Which versions work together, and which problems are known. This page is generated from
`src/isotrain/doctor/matrix.yaml` and `rules.yaml` by `python -m isotrain.doctor.page docs/stacks.md`;
`isotrain doctor` compares a machine with them. How to install is in [ascend.md](ascend.md).

**No row for Ascend or CUDA is verified: isotrain has not run on such hardware yet.** `published` means that
its publisher says that it works. The column `torch` says whether isotrain's bounds allow the stack's torch.
"""


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join([_HEAD, *_stacks(), *_toolkits(), *_rules()])


def _stacks() -> Iterator[str]:
    yield "## Published together\n"
    yield "| stack | hardware | driver | CANN | Python | packages | not supported | torch | status | source |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
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
            stack.status,
            stack.source,
        )
    yield ""


def _packages(stack: Stack) -> str:
    pins = [f"{name} {version}" for name, version in stack.packages.items()]
    pins += [f"{name} {version} (ARM)" for name, version in stack.arm.items()]
    pins += [f"{name} {version} (x86)" for name, version in stack.x86.items()]
    return ", ".join(pins)


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
    sys.exit(page_command("isotrain.doctor.page", render))
