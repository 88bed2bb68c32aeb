"""`isotrain import` over every shell script below a directory: what becomes of them, and of every word.

A script has a *full account* if each word of its command ended as mapped, without effect, refused or unknown;
the importer raises an internal error otherwise. `ratio` is the share of scripts without one. Lower is better.

    python benchmarks/import_examples.py --framework verl --scripts path/to/verl/examples [--set DEVICE=npu]
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import bench

from isotrain.errors import IsotrainError
from isotrain.tools.imports.convert import ImportAccountError, Imported, convert
from isotrain.tools.imports.source import ImportSourceError

GOAL = 0.0


def reasons(result: Imported) -> set[str]:
    """The keys by which a script is a different training."""
    findings = (*result.refused, *result.unknown, *result.questions)
    return {item.key for item in findings if item.changes}


def imported(path: Path, framework: str, given: dict[str, str]) -> Imported:
    try:
        return convert(path.read_bytes(), framework, given=given)
    except ImportSourceError as error:
        if not given or "does not use" not in str(error):
            raise
        return convert(path.read_bytes(), framework)


def main() -> None:
    parser = bench.Options(__doc__)
    parser.add_argument("--framework", default="verl", choices=("verl", "openrlhf"))
    parser.add_argument("--scripts", type=Path, required=True, help="Directory of shell scripts.")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--reasons", type=int, default=12, help="How many reasons to print.")
    options = parser.read()
    given = dict(item.split("=", 1) for item in options.set)
    counts: Counter[str] = Counter()
    why: Counter[str] = Counter()
    same: list[str] = []
    scripts = sorted(options.scripts.rglob("*.sh"))
    if not scripts:
        raise SystemExit(f"no shell script below {options.scripts}")
    for path in scripts:
        try:
            result = imported(path, options.framework, given)
        except ImportAccountError as error:
            counts["no account"] += 1
            print(f"{path}: {error}")
        except IsotrainError as error:
            counts["no recipe"] += 1
            print(f"no recipe: {path.relative_to(options.scripts)}: {str(error).partition(':')[0]}")
        else:
            counts["same" if result.same_training else "different"] += 1
            why.update(reasons(result))
            same += [str(path.relative_to(options.scripts))] if result.same_training else []
    for name in same:
        print(f"same: {name}")
    for key, count in why.most_common(options.reasons):
        print(f"{count:4d}  {key}")
    share = counts["no account"] / len(scripts)
    bench.report("import_examples", share, goal=GOAL, met=share <= GOAL, scripts=len(scripts), **counts)


if __name__ == "__main__":
    main()
