"""Tables of `npu-smi info` as they were seen on machines."""

from __future__ import annotations

from pathlib import Path

from isotrain.tools.doctor.facts import Npu, parse_devices, parse_driver, parse_processes

MACHINES = Path(__file__).parent / "machines"

A2 = """\
| npu-smi 25.2.0                   Version: 25.2.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B3               | OK            | 94.6        36                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          37705/ 65536         |
| 4     910B3               | Warning       | 94.6        36                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3 / 65536            |
"""
A3 = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     Ascend910           | OK            | 166.9       38                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          46536/ 65536         |
| 0     Ascend910           | OK            | -           37                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          46084/ 65536         |
"""


def test_reads_the_table_of_an_a2_with_a_gap() -> None:
    assert parse_devices(A2) == [
        Npu(0, 0, 0, "910B3", "OK"),
        Npu(4, 0, 4, "910B3", "Warning"),
    ]
    assert parse_driver(A2) == "25.2.0"


def test_devices_of_an_a3_are_dies() -> None:
    assert parse_devices(A3) == [
        Npu(0, 0, 0, "Ascend910", "OK"),
        Npu(0, 1, 1, "Ascend910", "OK"),
    ]


def test_a_wider_table_is_read_alike() -> None:
    texts = [
        (MACHINES / name / "commands" / "npu-smi_info.txt").read_text()
        for name in ("good-a2", "good-a2-wide-table")
    ]
    narrow, wide = (parse_devices(text) for text in texts)
    assert narrow == wide and len(narrow) == 8
    assert max(map(len, texts[1].splitlines())) > max(map(len, texts[0].splitlines()))


def test_reads_the_processes_that_hold_devices() -> None:
    text = (MACHINES / "unhealthy-and-in-use" / "commands" / "npu-smi_info.txt").read_text()
    assert parse_processes(text) == [(0, 4711), (1, 4711)]
    assert parse_processes(A2) == []


def test_reads_no_devices_from_other_text() -> None:
    assert parse_devices("dcmi module initialize failed. ret is -8005\n") == []
    assert parse_devices("| a | b | c |\n| 0 1 | x | y / z |\n" * 1000) == []
