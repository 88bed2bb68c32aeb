"""Where a certificate speaks against itself: a device, model or count that its own records do not allow.

A forger can make a digest anew, so the digest shows nothing here. Whoever changes all records alike is not
found; only a signature says who vouches for a file.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

from pydantic import ValidationError

from isotrain.parity.certificate import Certificate, Side
from isotrain.parity.mesh import mesh_of
from isotrain.parity.plausible import implausible
from isotrain.parity.run import section
from isotrain.recipe.schema import MeshSection

_FILES = ("metrics.jsonl", "resolved.json", "environment.json")
# `SmolLM2-135M`, `Qwen3-30B-A3B`: published counts leave out embeddings, or round.
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", re.IGNORECASE)
_LARGEST_RATIO = 2.0
_FEW_VALUES = 5


def contradictions(certificate: Certificate) -> Iterator[str]:
    """One sentence each."""
    for role, side in certificate.sides.items():
        for words in (*implausible(side), *_ranks(side), *_mesh(side), *_date(certificate, side)):
            yield f"{role}: {words}"
    yield from _model(certificate)
    yield from _engine(certificate)
    yield from _responses(certificate)
    yield from _steps(certificate)
    yield from _inputs(certificate)


def _ranks(side: Side) -> Iterator[str]:
    if side.ranks is None or side.ranks < 1:
        yield "it has no number of ranks"
    elif side.settings.get("ranks") not in (side.ranks, None, "auto"):
        yield f"the recipe asks for {side.settings.get('ranks')} ranks, the run had {side.ranks}"


def _mesh(side: Side) -> Iterator[str]:
    asked, had = mesh_of(side.settings), mesh_of(section(side.environment, "device"))
    if asked != had:
        yield f"the recipe asks for mesh {asked or 'none'}, the run had {had or 'none'}"
        return
    try:
        problem = MeshSection.model_validate(had).problem(side.ranks or 1)
    except ValidationError:
        yield f"{side.mesh} is no mesh"
    else:
        if problem:
            yield problem


def _date(certificate: Certificate, side: Side) -> Iterator[str]:
    try:
        begun = datetime.datetime.fromisoformat(str(side.environment.get("time")))
        made = datetime.datetime.strptime(certificate.date, "%Y-%m-%dT%H:%M:%SZ")
        early = begun > made.replace(tzinfo=datetime.timezone.utc)
    except (TypeError, ValueError):
        yield "it has no time at which it began"
        return
    if early:
        yield f"it began on {begun.isoformat()}, after the certificate was made"


def _model(certificate: Certificate) -> Iterator[str]:
    described = [section(side.environment, "model") for side in certificate.sides.values()]
    for what in ("type", "parameters"):
        one, other = (model.get(what) for model in described)
        if one is None or one != other:
            yield f"the models of the two runs are not the same: {what} {one!r} and {other!r}"
    if "model" not in certificate.data:
        yield "there is no digest of the model"
    parameters = described[0].get("parameters")
    stated = _SIZE.search(certificate.subject.model)
    if stated and isinstance(parameters, int) and parameters > 0:
        size = float(stated[1]) * (1e9 if stated[2] in "bB" else 1e6)
        if not 1 / _LARGEST_RATIO <= size / parameters <= _LARGEST_RATIO:
            yield f"a model called {certificate.subject.model!r} does not have {parameters:,} parameters"


def _engine(certificate: Certificate) -> Iterator[str]:
    engine = certificate.subject.engine
    packages = certificate.reference.packages
    if engine in ("vllm", "sglang") and not any(name.startswith(engine) for name in packages):
        yield f"reference: it sampled with {engine}, which was not installed"


def _responses(certificate: Certificate) -> Iterator[str]:
    if certificate.recipe.get("rollout") is None:
        if any(side.replayed for side in certificate.sides.values()):
            yield "a recipe without rollouts has no responses to replay"
        return
    # Scores come from the recording, so that a replay has the reference's to the last digit.
    scores = [curve for name, curve in certificate.curves.items() if name == "critic/score/mean"]
    equal = all(curve.reference == curve.candidate for curve in scores)
    if certificate.candidate.replayed and not equal:
        yield "the candidate replayed the reference's responses, but has other scores"
    # A model that never scores has the same zeros everywhere.
    varied = any(len(set(curve.reference)) > _FEW_VALUES for curve in scores)
    if not certificate.candidate.replayed and equal and varied:
        yield "each run sampled its own responses, but the scores are the same to the last digit"


def _steps(certificate: Certificate) -> Iterator[str]:
    last = max(curve.steps[-1] for curve in certificate.curves.values())
    planned = section(certificate.recipe, "trainer").get("steps")
    if isinstance(planned, int) and last > planned:
        yield f"the recipe ends after {planned} steps, the curves after {last}"


def _inputs(certificate: Certificate) -> Iterator[str]:
    inputs = certificate.inputs
    members = {role for curve in certificate.curves.values() for role in curve.envelope}
    missing = [
        f"{role}/{name}"
        for role in ("reference", "candidate", *sorted(members))
        for name in _FILES
        if f"{role}/{name}" not in inputs
    ]
    if missing:
        yield f"there is no digest of {missing[0]}"
    curves = [digest for name, digest in inputs.items() if name.endswith("/metrics.jsonl")]
    if len(set(curves)) < len(curves):
        yield "two of the runs have the same metrics.jsonl: it is one run, told twice"
    ran = {level.name for level in certificate.levels if level.state != "not run"}
    traces = {role for role in certificate.sides if any(n.startswith(f"{role}/layer_trace/") for n in inputs)}
    if ran & {"P0", "P1"} and len(traces) < 2:
        yield "P0 and P1 rest on traces of both runs, whose digests are not there"
    if ran & {"P0", "P1"} and any(side.mesh for side in certificate.sides.values()):
        yield "P0 and P1 rest on traces of both runs, and runs with a mesh record none"
