"""Faults of devices, drivers and engines that the self-test must find, as patches after an import."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

Patch = Callable[[Any], None]


def _wrong_sum(c10d: Any) -> None:
    all_reduce = c10d.all_reduce

    def wrong(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        done = all_reduce(tensor, *args, **kwargs)
        if str(tensor.dtype) == "torch.bfloat16":
            tensor.view(-1)[-1] += 1
        return done

    c10d.all_reduce = wrong


def _hanging_gather(c10d: Any) -> None:
    all_gather = c10d.all_gather_into_tensor

    def hang(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1":
            time.sleep(600)
        return all_gather(*args, **kwargs)

    c10d.all_gather_into_tensor = hang


def _attention(change: Callable[..., Any]) -> Patch:
    def patch(attention: Any) -> None:
        honest = attention.segment_attention
        attention.AttentionInterface.register(
            attention.SEGMENTS, lambda *args, **kwargs: change(honest, *args, **kwargs)
        )

    return patch


def _neighbours_seen(honest: Any, *args: Any, segment_lengths: Any, **kwargs: Any) -> Any:
    return honest(*args, segment_lengths=(sum(segment_lengths),), **kwargs)


def _wrong_gradient(honest: Any, module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    key = key * 1
    if key.requires_grad:
        key.register_hook(lambda gradient: 1.05 * gradient)
    return honest(module, query, key, *args, **kwargs)


def _silu(change: Callable[[Any], Any]) -> Patch:
    def patch(functional: Any) -> None:
        silu = functional.silu
        functional.silu = lambda input, inplace=False: change(silu(input, inplace))

    return patch


def _off_on_the_device(output: Any) -> Any:
    return output if output.device.type == "cpu" else 1.01 * output


def _noisy(output: Any) -> Any:
    return output * (1 + 1e-6 * os.urandom(1)[0])


def _segfault(hf: Any) -> None:
    def crash(self: Any, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    hf.HfEngine.__init__ = crash


def _other_temperature(hf: Any) -> None:
    draw = hf.draw

    def wrong(logits: Any, sampling: Any, *args: Any) -> Any:
        token, _ = draw(logits, sampling, *args)
        return token, logits.cpu().float().log_softmax(-1).gather(1, token[:, None])[:, 0]

    hf.draw = wrong


def _not_a_number(hf: Any) -> None:
    logps = hf.HfEngine.logps
    hf.HfEngine.logps = lambda self, sequences: [float("nan") * found for found in logps(self, sequences)]


def _device_in_use(accelerator: Any) -> None:
    """By another program, which holds half of it."""
    memory = accelerator.Accelerator.memory

    def half(self: Any) -> Any:
        seen = memory(self)
        return replace(seen, free=seen.total // 2)

    accelerator.Accelerator.memory = half


def _update_not_taken(hf: Any) -> None:
    def update(self: Any, update: Any) -> None:
        self.version = update.version

    hf.HfEngine.update_weights = update


def _digest_ignored(digest: Any) -> None:
    digest.Digest.check = lambda *args: None


def _sleepless(hf: Any) -> None:
    def sleep(self: Any) -> None:
        self._unusable = "it slept"

    hf.HfEngine.sleep = sleep


def _stale_graphs(vllm: Any) -> None:
    """As if captured graphs kept reading the weights of before."""

    def update(self: Any, update: Any) -> None:
        self.version = update.version

    vllm.VllmEngine.update_weights = update


def _shares_no_memory(exchange: Any) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("the driver does not share memory between processes")

    exchange.open_shared = refuse


def _numbers_of_all(exchange: Any) -> None:
    """A driver that takes a device's number in one process for its number in another."""
    open_shared = exchange.open_shared

    def wrong(described: Any, size: int, device: Any, rebuild: str) -> Any:
        first = int((os.environ.get("ASCEND_RT_VISIBLE_DEVICES") or "0").split(",")[0])
        return open_shared(described, size, type(device)(device.type, device.index + first), rebuild)

    exchange.open_shared = wrong


def _name_kept(exchange: Any) -> None:
    """A library that does not forget a communicator that was aborted."""
    make, aborted = exchange.private_group, []

    def refuse(*args: Any) -> Any:
        if aborted:
            raise RuntimeError("the communicator isotrain-weights is in use")
        return make(*args)

    exchange.private_group = refuse
    exchange.abort = lambda group, reason: aborted.append(reason)


def _unstable_sort(torch: Any) -> None:
    """Two rows with the same key change places, as in a sort that is fast and not stable."""
    sort = torch.sort

    def unstable(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        values, order = sort(tensor, *args, **kwargs)
        if tensor.device.type != "cpu":
            at = int((values[1:] == values[:-1]).nonzero()[0])
            order[at : at + 2] = order[at : at + 2].flip(0)
        return values, order

    torch.sort = unstable


def _full_disk(writer: Any) -> None:
    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    writer.CheckpointWriter.save = save


def _process_left(hf: Any) -> None:
    close = hf.HfEngine.close

    def leave(self: Any) -> None:
        subprocess.Popen(["sleep", "120"], start_new_session=True)
        close(self)

    hf.HfEngine.close = leave


_C10D = "torch.distributed.distributed_c10d"
_HF = "isotrain.rollout.hf"

FAULTS: dict[str, dict[str, Patch]] = {
    "wrong-sum": {_C10D: _wrong_sum},
    "hanging-gather": {_C10D: _hanging_gather},
    "attention-sees-neighbours": {"isotrain.models.attention": _attention(_neighbours_seen)},
    "attention-gradient": {"isotrain.models.attention": _attention(_wrong_gradient)},
    "device-is-off": {"torch.nn.functional": _silu(_off_on_the_device)},
    "not-repeatable": {"torch.nn.functional": _silu(_noisy)},
    "engine-crashes": {_HF: _segfault},
    "other-temperature": {_HF: _other_temperature},
    "not-a-number": {_HF: _not_a_number},
    "device-in-use": {"isotrain.device.accelerator": _device_in_use},
    "update-not-taken": {_HF: _update_not_taken},
    "digest-ignored": {"isotrain.weights.digest": _digest_ignored},
    "sleepless": {_HF: _sleepless},
    "stale-graphs": {"isotrain.rollout.vllm": _stale_graphs},
    "no-shared-memory": {"isotrain.device.exchange": _shares_no_memory},
    "other-numbers": {"isotrain.device.exchange": _numbers_of_all},
    "name-kept": {"isotrain.device.exchange": _name_kept},
    "unstable-sort": {"torch": _unstable_sort},
    "full-disk": {"isotrain.engine.checkpoint.writer": _full_disk},
    "process-left": {_HF: _process_left},
}
