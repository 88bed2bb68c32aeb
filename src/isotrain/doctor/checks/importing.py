"""Errors of `import torch` in a child process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from isotrain.doctor.findings import Finding
from isotrain.doctor.scene import Scene
from isotrain.language import tr

# The first pattern found in the message explains it.
_CAUSES = (
    (
        r"lib(hccl|ascendcl|acl_op_compiler|ge_runner|graph)\.so",
        tr("the toolkit's libraries are not found: source its set_env.sh in this shell"),
    ),
    (
        r"libascend_hal|libc_sec|libdcmi|libmmpa",
        tr("the driver's libraries are not found: mount /usr/local/Ascend/driver, and source set_env.sh"),
    ),
    (
        r"undefined symbol",
        tr(
            "two packages were built for different versions: reinstall torch and its plug-in as a "
            "pair (below)"
        ),
    ),
    (
        r"GLIBC(XX)?_",
        tr("the system's C++ library is older than the wheels: use a newer image or conda's libstdcxx-ng"),
    ),
    (
        r"libcu(dart|blas|dnn)|libnv",
        tr("CUDA's libraries are not found: reinstall torch with its nvidia-* packages"),
    ),
    (r"no reply within", tr("the device hangs: check npu-smi or nvidia-smi, and `dmesg`")),
)


def check(scene: Scene) -> Iterator[Finding]:
    error = scene.facts.torch_import
    if not error:
        return
    remedy = next((remedy for pattern, remedy in _CAUSES if re.search(pattern, error)), None)
    problem = tr("import torch fails: {error}", error=error)
    remedy = remedy or tr(
        "run python -c 'import torch' to see the whole error; reinstall torch first, on its own"
    )
    yield Finding("torch-import", "error", problem, remedy)
