"""What `environment.json` of a run says of the device that it used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from isotrain.parity.backends import label_of
from isotrain.parity.run import section

_SLUG = 40


def device_label(environment: Mapping[str, Any]) -> str:
    """What tables call the device: its type, a host's instruction set, and whether it was simulated."""
    device_type = slug(str(section(environment, "device").get("type", "unknown")))
    label = label_of(device_type, section(environment, "variables"))
    return f"{label}-simulated" if is_simulated(environment) else label


def is_simulated(environment: Mapping[str, Any]) -> bool:
    """Whether a stand-in for the device computed, which marks its packages and its device's name."""
    device = section(environment, "device")
    versions = map(str, section(environment, "packages").values())
    on_host = device.get("type") == "cpu"
    marked = any(version.endswith("+sim") for version in versions) or str(device.get("name")).endswith("-sim")
    return not on_host and marked


def slug(text: str) -> str:
    """Text of any source as a part of a file's name: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_SLUG].strip("-") or "unnamed"
