"""A plug-in of torch that cannot load, hidden before anything imports torch."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution

from isotrain.hidden_modules import hide


def hide_a_plugin_that_cannot_load() -> None:
    """Keep torch and transformers from importing torch_npu where its libraries are not there.

    torch would import it by itself, transformers wherever it finds it, and both would end this process.
    """
    try:  # every command asks this, and nearly all end here: what examines a machine takes longer to import
        distribution("torch-npu")
    except PackageNotFoundError:
        return
    from isotrain.tools.doctor.facts import find_toolkit, is_simulated
    from isotrain.tools.doctor.system import ThisMachine, relevant

    system = ThisMachine()
    plugin = system.packages(["torch-npu"]).get("torch-npu")
    if plugin is None or is_simulated(plugin):
        return
    home, _ = find_toolkit(system, relevant(system.variables))
    if home is None:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        hide("torch_npu")
