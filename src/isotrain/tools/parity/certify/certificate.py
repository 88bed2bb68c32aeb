"""A certificate: one JSON file that says of two devices that they train the same, with what that rests on.

Its digest is over JSON in one spelling, so that it is a digest of the content.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from isotrain.errors import CertificateError, DataError
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.parity.compare.effects import Answer
from isotrain.tools.parity.devices import device_label, is_simulated, mesh_words, slug
from isotrain.tools.parity.levels.level import LEVELS, State
from isotrain.tools.parity.read.bounded import Source, clipped
from isotrain.tools.parity.run import section
from isotrain.tools.parity.verdict import Same

FORMAT = 4
MAX_BYTES = 8 << 20
# Nobody needs more; a stranger might send them.
MAX_CURVES = 64
_SHOWN = 3
_MOST_FACTS, _DEEPEST = 4000, 8

Kind = Literal["paired", "replayed", "free-running"]
Engine = Literal["hf", "vllm", "sglang", "none"]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Step = Annotated[int, Field(ge=-(2**53), le=2**53)]
# JSON has lists only; what is in them stays strict.
Values = Annotated[tuple[float, ...], Field(strict=False), FailFast()]
Steps = Annotated[tuple[Step, ...], Field(strict=False), FailFast()]


def canonical(content: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8, floats as their shortest exact spelling; a `ValueError` for the rest."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_of(content: Any) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


def printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _relative(name: str) -> str:
    if "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError("is not the name of a file below a run")
    return name


def _facts(content: dict[str, JsonValue], separators: str = "") -> dict[str, JsonValue]:
    """JSON of a stranger: bounded, and every text in it printable but for these letters."""
    left: list[tuple[int, JsonValue]] = [(0, content)]
    without = dict.fromkeys(map(ord, separators))
    seen = 0
    while left:
        depth, value = left.pop()
        seen += 1
        if depth > _DEEPEST or seen > _MOST_FACTS:
            raise ValueError("has more in it than any run records")
        if isinstance(value, str) and (len(value) > 8000 or not value.translate(without).isprintable()):
            raise ValueError("has a text that is endless or cannot be printed")
        if isinstance(value, dict):
            left += [(depth + 1, inner) for pair in value.items() for inner in pair]
        elif isinstance(value, list):
            left += [(depth + 1, inner) for inner in value]
    return content


def _real_date(text: str) -> str:
    datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    return text


Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(printable)]
Text = Annotated[str, StringConstraints(max_length=8000), AfterValidator(printable)]
Date = Annotated[
    str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"), AfterValidator(_real_date)
]
InputName = Annotated[Name, AfterValidator(_relative)]
Facts = Annotated[dict[Name, JsonValue], AfterValidator(_facts)]
# Texts of a recipe, such as what separates the steps of a response, have ends of lines.
RecipeFacts = Annotated[dict[Name, JsonValue], AfterValidator(partial(_facts, separators="\n\t"))]


class CertificatePart(BaseModel):
    """Part of a file from a stranger: no unknown fields, no guessing of types, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Subject(CertificatePart):
    """The training, and how the two runs belong together."""

    algorithm: Name
    model: Name
    parameters: Count | None
    dtype: Name
    engine: Engine
    kind: Kind
    """`paired`: same data and order; `replayed`: same recorded responses; `free-running`: own responses."""


class CertifiedSide(CertificatePart):
    """One of the two runs, as it recorded itself. What the support matrix says of it follows from this."""

    environment: Facts
    """Its `environment.json` without commands and paths of a machine."""
    settings: Facts
    """The recipe's section `device`, the one part in which two sides may differ."""
    replayed: bool
    """Whether it trained on recorded responses."""

    @property
    def label(self) -> str:
        return device_label(self.environment)

    @property
    def simulated(self) -> bool:
        return is_simulated(self.environment)

    @property
    def device(self) -> str:
        return str(section(self.environment, "device").get("name") or "unknown")

    @property
    def ranks(self) -> int | None:
        ranks = section(self.environment, "device").get("ranks")
        return ranks if isinstance(ranks, int) else None

    @property
    def mesh(self) -> str:
        """How the ranks divided the work, such as `context 2 (ring)`; empty where each had its own."""
        return mesh_words(self.settings) or mesh_words(section(self.environment, "device"))

    @property
    def commit(self) -> str | None:
        commit = self.environment.get("commit")
        return commit if isinstance(commit, str) else None

    @property
    def packages(self) -> dict[str, str]:
        return {name: str(version) for name, version in section(self.environment, "packages").items()}

    @property
    def variables(self) -> dict[str, str]:
        return {name: str(value) for name, value in section(self.environment, "variables").items()}


class Curve(CertificatePart):
    """One metric of both runs over the same steps, exact to the last bit."""

    steps: Steps
    reference: Values
    candidate: Values

    @model_validator(mode="after")
    def _of_one_length(self) -> Curve:
        if not self.steps or any(a >= b for a, b in zip(self.steps, self.steps[1:], strict=False)):
            raise ValueError("the steps do not rise")
        if any(len(values) != len(self.steps) for values in (self.reference, self.candidate)):
            raise ValueError("not every run has a value at each step")
        return self

    def of(self, role: str) -> tuple[float, ...]:
        return self.reference if role == "reference" else self.candidate


class CheckFound(CertificatePart):
    name: Name
    value: float | None
    limit: float | None
    """None where it is not finite: there is no limit then."""
    passed: bool | None
    note: Text = ""


class LevelFound(CertificatePart):
    name: Name
    state: State
    words: Text
    checks: Annotated[tuple[CheckFound, ...], Field(strict=False)] = ()
    truth: Name | None = None
    """The data type of a training step that was held against float64."""


class Figures(CertificatePart):
    steps: Count
    loss_metric: Name | None
    loss_error: float | None
    """Mean absolute error in hundredths of the loss's own unit, as others publish it."""
    loss_relative: float | None
    """Mean relative error in %; None where the reference's loss is 0 somewhere."""
    reward_metric: Name | None
    reward_error: float | None
    """Mean absolute error in hundredths."""
    throughput_ratio: float | None
    """The candidate's as a multiple of the reference's, without the first steps where there are others."""


class EffectFound(CertificatePart):
    """How far a metric is apart over the whole run, candidate minus reference."""

    metric: Name
    verdict: Answer
    difference: float
    low: float | None
    high: float | None
    """The 95 % interval; None where there were too few steps."""
    margin: float
    evidence: Text


class OutcomeFound(CertificatePart):
    verdict: Answer
    effects: Annotated[tuple[EffectFound, ...], Field(strict=False)]


class Certificate(CertificatePart):
    format: Literal[4]
    isotrain: Name
    """The version that made it."""
    date: Date
    reference: CertifiedSide
    candidate: CertifiedSide
    recipe: RecipeFacts
    """The part that both sides share, without paths of a machine."""
    recipe_sha256: Sha256
    data: dict[Name, Name]
    inputs: dict[InputName, Sha256]
    """`reference/metrics.jsonl` and so on: every file that was read."""
    allowed: dict[Name, Text]
    """Differences between the runs that somebody accepted by name."""
    curves: Annotated[dict[Name, Curve], Field(min_length=1, max_length=MAX_CURVES)]
    levels: Annotated[tuple[LevelFound, ...], Field(strict=False)]
    figures: Figures
    outcome: OutcomeFound
    computation: Same
    digest: Sha256
    """Over the canonical JSON of all the rest."""

    @model_validator(mode="after")
    def _is_complete(self) -> Certificate:
        if [level.name for level in self.levels] != list(LEVELS):
            raise ValueError(f"levels: are not {', '.join(LEVELS)}")
        _subject(self)
        if digest_of(self.recipe) != self.recipe_sha256:
            raise ValueError("recipe_sha256: is not that of the recipe")
        return self

    @property
    def subject(self) -> Subject:
        return _subject(self)

    def content(self) -> dict[str, Any]:
        """Everything that the digest is over."""
        return self.model_dump(mode="json", exclude={"digest"})

    @property
    def certifies(self) -> bool:
        """The same computation; where runs sampled their own responses, which cannot show it, the outcome."""
        if self.subject.kind == "free-running":
            return self.outcome.verdict == "equivalent" and self.computation != "different"
        return self.computation == "same" and self.outcome.verdict != "different"

    @property
    def sides(self) -> dict[str, CertifiedSide]:
        return {"reference": self.reference, "candidate": self.candidate}

    @property
    def file_name(self) -> str:
        """From the content alone, whatever that is: letters, digits and dashes."""
        subject = self.subject
        sides = (f"{side.label} {side.mesh}" for side in (self.reference, self.candidate))
        words = (subject.algorithm, subject.model, *sides)
        return "-".join([*map(slug, words), subject.kind, self.digest[:8]]) + ".json"


def _subject(certificate: Certificate) -> Subject:
    """From the recipe and the two environments, so that it cannot say otherwise than they."""
    recipe = certificate.recipe
    model = section(recipe, "model")
    rollout = recipe.get("rollout")
    online = isinstance(rollout, dict)
    kind = "paired" if not online else "replayed" if certificate.candidate.replayed else "free-running"
    return Subject.model_validate(
        {
            "algorithm": section(recipe, "algorithm").get("name"),
            "model": _model_name(model.get("path")),
            "parameters": section(certificate.reference.environment, "model").get("parameters"),
            "dtype": model.get("dtype"),
            "engine": section(recipe, "rollout").get("engine") if online else "none",
            "kind": kind,
        }
    )


def _model_name(path: object) -> object:
    """The last part that means something: directories are often called `model`."""
    if not isinstance(path, str):
        return None
    parts = [part for part in path.split("/") if part not in ("", "model")]
    return parts[-1] if parts else "model"


def sealed(content: Mapping[str, Any]) -> Certificate:
    """The certificate of a content without its digest."""
    draft = Certificate.model_validate({**content, "digest": "0" * 64})
    return draft.model_copy(update={"digest": digest_of(draft.content())})


def write_certificate(directory: Path, certificate: Certificate) -> Path:
    """Writes it under the name that its content gives it; never over another content."""
    if not certificate.certifies:
        raise CertificateError(f"only runs that agree get a certificate; {_said(certificate)}")
    content = certificate.content()
    if certificate.digest != digest_of(content):
        raise CertificateError("the certificate was changed after it was made; make it anew from its runs")
    data = _spelled({**content, "digest": certificate.digest})
    path = directory / certificate.file_name
    if len(data) > MAX_BYTES:
        raise CertificateError(
            f"the certificate has {len(data) >> 20} MiB of at most {MAX_BYTES >> 20}: certify fewer metrics"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomically(path, data)
        elif path.read_bytes() != data:
            raise CertificateError(f"{path} is there with another content; move it away")
    except OSError as error:
        raise CertificateError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file from a stranger, or a `DataError` that names the field."""
    content = Source(path).json_object(MAX_BYTES)
    try:
        certificate = Certificate.model_validate(content)
    except ValidationError as error:
        raise DataError(f"{path}: {problems_of(error)}") from error
    if certificate.digest != digest_of(certificate.content()):
        raise DataError(f"{path}: digest: does not fit the content, which was changed after it was made")
    if not certificate.certifies:
        raise DataError(f"{path}: verdict: {_said(certificate)}; a certificate says that two runs agree")
    return certificate


def _said(certificate: Certificate) -> str:
    return f"outcome {certificate.outcome.verdict!r}, computation {certificate.computation!r}"


def problems_of(error: ValidationError) -> str:
    """The first fields that are wrong, without what a stranger wrote into them."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    shown = []
    for problem in errors[:_SHOWN]:
        field = ".".join(str(part) for part in problem["loc"])
        shown.append(f"{clipped(field)[1:-1]}: {problem['msg']}" if field else problem["msg"])
    more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
    return "; ".join(shown) + more


def _spelled(content: Mapping[str, Any]) -> bytes:
    """One line per field: long curves stay short files, and a change is one line of a diff."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
        for name, value in content.items()
    )
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
