"""Memory and a communicator between two processes, as weight updates use them, without an engine.

`shared-memory`: a process that sees all devices gives memory of some to processes that see only those.
`communicator`: after a broadcast that never ends, the next group of the same name works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from isotrain.children import module_command
from isotrain.device.accelerator import Accelerator
from isotrain.device.detect import find_device
from isotrain.device.exchange import open_shared, share
from isotrain.errors import WeightUpdateError
from isotrain.tools.doctor.self_test.verdicts import (
    Reporter,
    SelfTestSetting,
    Stage,
    StageFailed,
    StageSkipped,
    argument,
    explain,
    own_setting,
    tell_progress,
)
from isotrain.weights.devices import LOOPBACK, CollectiveCarrier
from isotrain.weights.stream import Control, Deadline

c10d: Any = torch.distributed  # its types leave out what is used here

BYTES = 1 << 20
# More than a library keeps in buffers of its own: the sender cannot end before a receiver comes.
STUCK_BYTES = 64 << 20
ATTEMPTS, FAILING = 3, 1
# To make a communicator, and for the broadcast that nobody takes.
SECONDS, STUCK_SECONDS = 120.0, 3.0


def main() -> None:
    setting = own_setting()
    others = {"open": open_all, "receive": take_part}
    if setting.mode in others:
        try:
            reply = others[setting.mode](setting)
        except Exception as error:
            reply = explain(error)
        print(json.dumps({"error": reply}), flush=True)
        return
    reporter = Reporter(setting.verdicts, independent=True)
    with reporter.stage("shared-memory") as stage:
        stage.result = share_devices(setting, _accelerator(setting))
    with reporter.stage("communicator") as stage:
        if setting.devices < 2:
            raise StageSkipped("there is one device; it needs two")
        use_name_again(setting, stage, _accelerator(setting))


def _accelerator(setting: SelfTestSetting) -> Accelerator:
    device = find_device(setting.device)
    if not isinstance(device, Accelerator):
        raise StageSkipped("on the host there is no device memory that processes could share")
    return device


@contextmanager
def _other(setting: SelfTestSetting, mode: str, said: dict[str, Any], **variables: str) -> Iterator[Any]:
    """Another process; calling what this gives waits for its error, and returns it."""
    command = module_command("isotrain.tools.doctor.self_test.parts.sharing", argument(setting, mode=mode))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **variables}, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(said) + "\n")
        process.stdin.flush()
        lines = process.stdout

        def error() -> str:
            replies = [line for line in lines if line.startswith('{"error"')]
            return str(json.loads(replies[-1])["error"]) if replies else f"exit code {process.wait()}"

        try:
            yield error
        finally:
            process.kill()


def numbers(device: int, version: int = 0, size: int = BYTES) -> torch.Tensor:
    """Bytes that tell devices and versions apart."""
    return ((torch.arange(size) + 7 * device + 3 * version) % 251).to(torch.uint8)


def share_devices(setting: SelfTestSetting, device: Accelerator) -> str:
    variable, count = device.visible_devices_variable, setting.devices
    visible = (os.environ.get(variable) or ",".join(map(str, range(count)))).split(",")
    # As an engine on two devices and one on a single device see them: the last ones, numbered from 0.
    views = {tuple(range(max(0, count - width), count)) for width in (1, 2)}
    for view in sorted(views):
        mask = ",".join(visible[number] for number in view)
        tell_progress(f"memory of devices {mask} in a process that sees no others")
        buffers = []
        for number in view:
            on = device.activate(number)
            buffers.append(numbers(number).to(on))
            device.synchronize()
        said = {"shared": [share(buffer) for buffer in buffers], "numbers": view}
        with _other(setting, "open", said, **{variable: mask}) as error:
            if problem := error():
                raise StageFailed(
                    f"a process that sees devices {mask} cannot use memory of one that sees all {count}: "
                    f"{problem}"
                )
    widths = " and ".join(f"{len(view)}" for view in sorted(views, key=len))
    return f"processes that see {widths} of {count} devices read memory of one that sees all"


def open_all(setting: SelfTestSetting) -> str:
    device, given = _accelerator(setting), json.loads(sys.stdin.readline())
    for place, (described, number) in enumerate(zip(given["shared"], given["numbers"], strict=True)):
        opened = open_shared(described, BYTES, device.activate(place), device.rebuild_shared)
        if wrong := int((opened.cpu() != numbers(number)).sum()):
            return f"{wrong} of {BYTES} bytes are wrong on its device {place}"
        del opened
        device.synchronize()
    return ""


def use_name_again(setting: SelfTestSetting, stage: Stage, device: Accelerator) -> None:
    store = c10d.TCPStore(
        LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS)
    )
    on = device.activate(0)
    with _other(setting, "receive", {"port": store.port}) as error:
        for attempt in range(ATTEMPTS):
            tell_progress(f"broadcast by group {attempt + 1} of the same name")
            try:
                with _carrier(store, attempt, 0, on) as (control, carrier):
                    carrier.send(numbers(0, attempt).to(on))
                    if attempt != FAILING:
                        continue
                    control.deadline = Deadline(STUCK_SECONDS)
                    try:
                        carrier.send(numbers(0, attempt, STUCK_BYTES).to(on))
                    except WeightUpdateError:
                        continue
                    raise StageFailed("a broadcast that nobody takes counts as sent")
            except RuntimeError as failure:
                when = "after one that failed" if attempt > FAILING else "at the start"
                raise StageFailed(f"a group of two processes does not work {when}: {failure}") from failure
        if problem := error():
            raise StageFailed(f"the receiver of {ATTEMPTS} broadcasts, one of which failed: {problem}")
    stage.result = "after a broadcast that was given up, the next group of the same name works"


def take_part(setting: SelfTestSetting) -> str:
    port, on = json.loads(sys.stdin.readline())["port"], _accelerator(setting).activate(1)
    store = c10d.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=SECONDS))
    for attempt in range(ATTEMPTS):
        with _carrier(store, attempt, 1, on) as (_, carrier):
            bucket = carrier.receive(BYTES, {})
            if wrong := int((bucket.cpu() != numbers(0, attempt)).sum()):
                return f"{wrong} of {BYTES} bytes of broadcast {attempt + 1} are wrong"
    return ""


@contextmanager
def _carrier(
    store: Any, attempt: int, rank: int, on: torch.device
) -> Iterator[tuple[Control, CollectiveCarrier]]:
    prefixed = c10d.PrefixStore(f"attempt/{attempt}", store)
    control = Control(prefixed, LOOPBACK, rank, 2, Deadline(SECONDS))
    with closing(CollectiveCarrier(control, on, BYTES)) as carrier:
        yield control, carrier


if __name__ == "__main__":
    main()
