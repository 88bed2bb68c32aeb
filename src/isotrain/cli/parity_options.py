"""The options of `isotrain parity compare`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


class Require(str, Enum):
    """The question whose answer is the exit code."""

    outcome = "outcome"
    computation = "computation"


First = Annotated[Path, Argument(metavar="A", help="A run, in one of the formats below.")]
Second = Annotated[Path, Argument(metavar="B", help="The other run.")]
Reference = Annotated[Path | None, Option(help="Which of the two is the reference; by default A.")]
Metrics = Annotated[
    list[str] | None,
    Option(
        help="A metric to compare; may be repeated. By default losses and rewards. loss=train/loss: the "
        "reference calls it loss, the candidate train/loss."
    ),
]
Margins = Annotated[
    list[str] | None,
    Option(
        metavar="METRIC=VALUE",
        help="The largest difference that does not matter, in the metric's own unit. By default 0.02 for "
        "losses, 0.04 for rewards.",
    ),
]
Allow = Annotated[
    list[str] | None, Option(metavar="NAME", help="An intended difference of the inputs: recipe or data.")
]
Reruns = Annotated[
    list[Path] | None,
    Option(metavar="RUN", help="A further run of the reference; may be repeated. Give at least three."),
]
Pairs = Annotated[
    list[str] | None,
    Option(metavar="A B", help="Further runs of reference and candidate with another seed; may be repeated."),
]
Dumps = Annotated[
    str | None,
    Option(metavar="A B", help="Dumps of msprobe of both runs, the reference's first: layers and APIs."),
]
Free = Annotated[
    bool, Option("--free", help="Each run sampled its own responses: do not compare step by step.")
]
Required = Annotated[
    Require | None,
    Option(help="Which answer the exit code gives: by default outcome, for two dumps computation."),
]
Rule = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Apply an acceptance rule of verl's community and print its table in English and Chinese; the "
        "exit code is then the rule's. An unknown name lists them.",
    ),
]
Devices = Annotated[
    str | None,
    Option(metavar="A,B", help="For --rule: the devices of both runs, if their logs do not say."),
]
Report = Annotated[
    Path | None, Option(metavar="DIR", help="Directory for verdict.json, report.html and plots.")
]
AsJson = Annotated[bool, Option("--json", help="Everything as JSON, for programs.")]
