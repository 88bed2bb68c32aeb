"""The environment variables that a child process may see, so that keys of trackers and hubs stay here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_NAME = re.compile(
    r"""PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|TZ|TMPDIR|TMP|TEMP|VIRTUAL_ENV|CONDA_PREFIX
    |LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|CC|CXX|MAX_JOBS
    |SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(HTTP|HTTPS|ALL|NO)_PROXY""",
    re.VERBOSE,
)
_FAMILY = re.compile(
    r"""LC_|XDG_|PYTHON|ISOTRAIN_|HF_|TRANSFORMERS_|TOKENIZERS_|TORCH|PYTORCH_|TRITON_|VLLM_|SGLANG_|FLASHINFER_
    |OMP_|GOMP_|KMP_|MKL_|ATEN_|DNNL_|ONEDNN_|OPENBLAS_|GLOO_""",
    re.VERBOSE,
)
_VENDOR = re.compile(
    r"""CUDA_|CUBLAS|CUDNN_|NVIDIA_|NCCL_
    |ASCEND|ATB_|HCCL_|LCCL_|NPU_|TASK_QUEUE_|CPU_AFFINITY_|INF_NAN_|CLOSE_MATMUL_""",
    re.VERBOSE,
)
_SECRET = re.compile(r"(?:^|_)(?:AUTH|CREDENTIALS?|KEY|PASSWD|PASSWORD|SECRET|TOKEN)(?:_|$)")


def child_environment(environment: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """Variables by which a child finds programs, libraries and devices; `passed` are further names."""
    return {
        name: value for name, value in environment.items() if name in passed or _harmless(name.upper(), value)
    }


def _harmless(name: str, value: str) -> bool:
    if _SECRET.search(name) or ("@" in value and name.endswith("_PROXY")):  # user:password@host
        return False
    return bool(_NAME.fullmatch(name) or _FAMILY.match(name) or _VENDOR.match(name))
