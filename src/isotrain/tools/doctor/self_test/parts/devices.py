"""Count the devices and their free memory, and make a small model for all other parts."""

from __future__ import annotations

from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.tools.doctor.self_test.verdicts import Reporter, StageFailed, own_setting

# An engine and a trainer share each device, and neither knows of other programs.
LEAST_FREE = 0.6


def main() -> None:
    setting = own_setting()
    with Reporter(setting.verdicts).stage("devices") as stage:
        device = choose_device(setting.device)
        count = device.count()
        stage.metrics["devices"] = float(count)
        if device.visible_devices_variable:
            for number in range(count):
                device.activate(number)
                memory = device.memory()
                # Numbers with zeros, as they are sorted by name.
                stage.metrics[f"free bytes on device {number:04d}"] = float(memory.free)
                if memory.free < LEAST_FREE * memory.total:
                    used, total = ((memory.total - memory.free) / 2**30, memory.total / 2**30)
                    raise StageFailed(
                        f"device {number}: {used:.1f} of {total:.1f} GB are in use; choose idle devices with "
                        f"{device.visible_devices_variable}"
                    )
        # Heads of 64, grouped: attention kernels of devices take these and not always smaller ones.
        make_tiny(setting.tiny, train_rows=2000, validation_rows=32, hidden=256, heads=4, kv_heads=2)
        what = "cores" if device.type == "cpu" else "devices"
        stage.result = f"{count} {what}, {device.name()}"


if __name__ == "__main__":
    main()
