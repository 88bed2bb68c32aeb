"""Operator schemas as a compiled library carries them, and the Python signatures they mean."""

from __future__ import annotations

import re
from inspect import Parameter, Signature
from pathlib import Path

import torch

SCHEMA = re.compile(rb"(?<![\w:.])npu_\w+(?:\.\w+)?\([^\x00-\x1f]*?\) -> [^\x00-\x1f]+(?=\x00)")


def schemas_in(library: Path) -> dict[str, str]:
    """Name with overload -> schema, of every operator that a library registers under a name `npu_...`."""
    texts = [found.group().decode("ascii") for found in SCHEMA.finditer(library.read_bytes())]
    return {text.partition("(")[0]: text for text in texts}


def signature(schema: str) -> Signature:
    """How Python calls an operator; torch's own parser reads the schema."""
    parameters = []
    for argument in torch._C.parse_schema(schema).arguments:
        kind = Parameter.KEYWORD_ONLY if argument.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else Parameter.empty
        parameters.append(Parameter(argument.name, kind, default=default))
    return Signature(parameters)


def returns(schema: str) -> list[str]:
    return [str(result.type) for result in torch._C.parse_schema(schema).returns]
