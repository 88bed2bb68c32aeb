"""On the path of a run's processes: the engine is slow in step 2, and the disk after step 3."""

import importlib.util
import sys
import threading
import time

SECONDS = 8.0


def _slow_engine(module):
    generate = module.HfEngine.generate

    def slow(self, *arguments):
        if self.version == 1:  # the weights that step 2 samples from
            time.sleep(SECONDS)
        yield from generate(self, *arguments)

    module.HfEngine.generate = slow


def _slow_disk(module):
    writer = module.CheckpointWriter
    write, join, waits = writer._write_shards, writer.join, threading.Event()

    def slow(self, temporary, step, *arguments):
        if step == 3:  # in the background, however long step 4 takes: its save waits for this one
            waits.wait()
            time.sleep(SECONDS)
        return write(self, temporary, step, *arguments)

    def noted(self):
        if self._thread is not None and self._thread.name == "checkpoint-3":
            waits.set()
        join(self)

    writer._write_shards, writer.join = slow, noted


PATCHES = {"isotrain.rollout.hf": _slow_engine, "isotrain.engine.checkpoint.writer": _slow_disk}


class Finder:
    """Patches a module as soon as it is imported; nothing is imported for it."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        run = spec.loader.exec_module

        def run_and_patch(module):
            run(module)
            PATCHES[name](module)

        spec.loader.exec_module = run_and_patch
        return spec


sys.meta_path.insert(0, Finder())
