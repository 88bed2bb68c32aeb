"""What the real torch_npu says of itself without a device: `python -m contract.real USES OUTPUT`."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # its operators count too
import torch_npu
from torch_npu.op_plugin.meta import _meta_registrations

from contract import schemas
from contract.calls import Use
from contract.operators import FUSED, NEWEST, shapes

# An A2: any number below that of the first chip that is treated otherwise.
SOC_VERSION = 220


def resolution() -> dict[str, str]:
    """How the device runs each operator that torch knows, in the words of torch's own dispatch table.

    `kernel`: its own; `default backend kernel` and `math kernel`: composed of other operators, which are
    resolved again; `backend fallback`: torch_npu's last resort, which runs it on the host.
    """
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        entry = re.search(
            r"^PrivateUse1: .* \[([a-z ]+)\]$", torch._C._dispatch_dump_table(name), re.MULTILINE
        )
        found[name] = entry.group(1) if entry else "nothing"
    return found


def live_signature(symbol: str) -> inspect.Signature | None:
    thing: Any = reduce(getattr, symbol.split(".")[1:], torch_npu)
    if isinstance(thing, torch._ops.OpOverloadPacket):
        return schemas.signature(str(thing.default._schema))
    return inspect.signature(thing) if callable(thing) else None


def broken(uses: list[Use]) -> Iterator[str]:
    """Uses that this torch_npu would answer with an AttributeError or a TypeError."""
    for use in uses:
        try:
            signature = live_signature(use.symbol)
            if use.called:
                assert signature is not None, f"{use.symbol} cannot be called"
                signature.bind(*[None] * use.positional, **dict.fromkeys(use.keywords))
        except (AttributeError, TypeError, AssertionError) as error:
            yield f"{use.where}: {use.symbol}: {error}"


def main(given: Path, output: Path) -> None:
    # Without a device there is no chip to ask for its generation.
    _meta_registrations.get_soc_version = lambda: SOC_VERSION
    uses = [Use(**{**use, "keywords": tuple(use["keywords"])}) for use in json.loads(given.read_text())]
    assert torch.npu is torch_npu.npu
    answers = {
        "version": torch_npu.__version__,
        "broken": list(broken(uses)),
        "schemas": {name: str(getattr(torch.ops.npu, name).default._schema) for name in (*FUSED, *NEWEST)},
        "shapes": shapes(torch_npu, "meta"),
        "backends": dist.Backend.backend_list,
        "backend_of_device": dist.Backend.default_device_backend_map.get("npu"),
        "devices_of_backend": dist.Backend.backend_capability.get("hccl"),
        "autograd": [
            name
            for name in torch._C._dispatch_get_all_op_names()
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutogradPrivateUse1")
        ],
        "resolution": resolution(),
    }
    output.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
