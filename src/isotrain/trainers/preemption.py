"""SIGTERM as schedulers mean it, and Ctrl-C: save a checkpoint after the current step, and end in time."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

PREEMPTED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM ended: what a shell reports of a process that the signal killed."""

# One request may arrive more than once: from the process group, and again from a launcher that passes it on.
ONE_REQUEST_SECONDS = 2.0
# What is left after a second request: enough to kill workers, too little to wait for them.
AT_ONCE_SECONDS = 3.0
# Every process of a run ends a little before the limit: the scheduler's next signal is SIGKILL.
SPARE_SECONDS, SPARE_SHARE = 1.0, 0.1
# Before the limit, to end the workers of a run, as long as that is a small part of the time.
CLOSING_SECONDS, CLOSING_SECONDS_ONLINE, LARGEST_SHARE_TO_CLOSE = 3.0, 10.0, 0.4


class Preempted(SystemExit):
    """Leaves all blocks in order, as Ctrl-C does; nothing that handles errors takes it for one."""

    def __init__(self, *, overdue: bool = False) -> None:
        super().__init__(PREEMPTED)
        self.overdue = overdue
        """Whether the run ends without a new checkpoint: there is no time to wait for anything."""


class Preemption:
    """Whether this run was asked to end, and how much time it has. One that is not installed never is.

    Requests are noticed in a thread: while the first thread computes, no handler of Python runs in it. A run
    that does not reach the end of its step in time is interrupted `closing` seconds before the limit. If that
    is not enough, its process ends at the limit: whatever it has started must end with it.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        *,
        closing: float = 0.0,
        spares: int = 1,
        last_words: Callable[[], str] = str,
    ) -> None:
        """`spares` orders the processes of one run: one with more of them ends earlier.

        `last_words` tell the user how to go on.
        """
        self.seconds = seconds
        self._last_words = last_words
        self.overdue = False
        """Whether there is no time left for a checkpoint."""
        self._spare = spares * min(SPARE_SECONDS, SPARE_SHARE * seconds)
        self._closing = min(closing, LARGEST_SHARE_TO_CLOSE * seconds)
        self._step: int | None = None
        self._asked: float | None = None
        self._limit = 0.0
        self._saved = self._handled = self._calls_again = False
        self._announcing, self._announced = threading.Lock(), False
        self.interrupted = False
        """Whether it was Ctrl-C that asked."""
        self._takes_interrupts = False
        self._ranks: Sequence[int] = ()

    @property
    def requested(self) -> bool:
        return self._asked is not None

    def take_interrupts(self) -> None:
        self._takes_interrupts = True
        signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, _: int, __: FrameType | None) -> None:
        """The first Ctrl-C is a request like SIGTERM; another one then ends what is running at once."""
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGTERM)

    def begin(self, step: int) -> None:
        """From now on a request waits for the end of this step; before the first, it ends the run at once."""
        self._step = step

    def saved(self) -> None:
        """The last checkpoint is complete: what remains is not interrupted before the limit."""
        self._saved = True

    def pass_on(self, ranks: Sequence[int]) -> None:
        """This process only waits for those. They get its request, and end first: they have a spare more."""
        self._ranks, self._closing = ranks, self._spare / 2
        if _installed is self:  # what has started them may have set a handler of its own
            signal.signal(signal.SIGTERM, self.handle)
            if self._takes_interrupts and not self.interrupted:
                self.take_interrupts()

    def handle(self, _: int, __: FrameType | None) -> None:
        """In the first thread, when it gets to it. The watch calls again if the run must end sooner."""
        handled, self._handled = self._handled, True
        self._note(time.monotonic())
        if not handled and self._step is None and not self._ranks:
            self.overdue = True  # there is nothing to wait for
        if self.overdue:
            raise Preempted(overdue=True)
        if not handled:
            for rank in self._ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGTERM)

    def watch(self, signals: int) -> None:
        """Read the numbers of signals as they come, until their file is closed or the time is over."""
        while True:
            if select.select([signals], [], [], self._pause())[0]:
                if not (numbers := os.read(signals, 64)):
                    os.close(signals)
                    return
                if signal.SIGTERM in numbers:
                    self._notice(time.monotonic())
            elif self.overdue or self._saved:
                self._say(
                    f"{self._signal}: not everything has ended {self._spare:g} s before the limit: ending it"
                )
                self.say_last_words()
                os._exit(PREEMPTED)
            else:
                what = "the start" if self._step is None else f"step {self._step}"
                self._hurry(f"{self._signal}: {what} did not end in time: ending without a new checkpoint")

    def announce(self) -> None:
        """Once, by whoever speaks for the run; a rank may learn of the request from another one."""
        if self._ranks:
            return
        with self._announcing:  # the first thread must not end the process while the watch is about to speak
            if self._announced:
                return
            self._announced = True
            again = "; Ctrl-C again ends at once" if self.interrupted else ""
            self._say(
                f"{self._signal}: ending before the first step"
                if self._step is None
                else f"{self._signal}: saving a checkpoint after step {self._step}, ending within "
                f"{self.seconds:g} s{again}"
            )

    @property
    def _signal(self) -> str:
        return "Ctrl-C" if self.interrupted else "SIGTERM"

    def _note(self, now: float) -> None:
        if self._asked is None:
            self._limit = now + self.seconds - self._spare
            self._asked = now

    def _notice(self, now: float) -> None:
        if self._calls_again:
            self._calls_again = False
            return
        self._note(now)
        assert self._asked is not None
        if now - self._asked > ONE_REQUEST_SECONDS:
            self._limit = min(self._limit, now + AT_ONCE_SECONDS)
            self._hurry("SIGTERM again: ending at once")
        self.announce()

    def _pause(self) -> float | None:
        if self._asked is None:
            return None
        ends = self.overdue or self._saved
        return max(0.0, self._limit - (0.0 if ends else self._closing) - time.monotonic())

    def _hurry(self, reason: str) -> None:
        """Interrupt what the first thread is doing, wherever it is."""
        self.overdue = self._calls_again = True
        if not self._ranks:
            self._say(reason)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def say_last_words(self) -> None:
        self._say(self._last_words())

    def _say(self, text: str) -> None:
        if text and os.environ.get("RANK", "0") == "0":
            with suppress(OSError, ValueError):  # the terminal or pipe is gone
                print(text, file=sys.stderr, flush=True)


_installed: Preemption | None = None


@contextmanager
def preemptible(
    seconds: float, *, closing: float, spares: int = 1, last_words: Callable[[], str] = str
) -> Iterator[Preemption]:
    """Within, SIGTERM is a request to end in this time; only in the first thread, which gets signals."""
    global _installed
    preemption = Preemption(seconds, closing=closing, spares=spares, last_words=last_words)
    if threading.current_thread() is not threading.main_thread():
        yield preemption
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # A thread inherits what is blocked: the watch must not take what is to interrupt the first thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=preemption.watch, args=(reading,), name="preemption", daemon=True).start()
    descriptor_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGTERM, preemption.handle)
    interrupt_before = signal.getsignal(signal.SIGINT)
    if interrupt_before is signal.default_int_handler:  # not where it is ignored, or somebody else's
        preemption.take_interrupts()
    _installed = preemption
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        yield preemption
    finally:
        # After a request the process ends, and the watch ends it if anything holds it up, such as a thread.
        if preemption.requested:
            preemption.announce()
        else:
            _installed = None
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupt_before or signal.SIG_DFL)
            signal.set_wakeup_fd(descriptor_before)
            os.close(writing)


class _Forks(threading.local):
    """A forked process shares the file of signal numbers: one that ends it must not pass for a request."""

    mask: set[int] | None = None

    def before(self) -> None:
        if _installed is not None:
            self.mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def after(self) -> None:
        if self.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            self.mask = None

    def in_child(self) -> None:
        global _installed
        if self.mask is not None:
            _installed = None
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.after()


_forks = _Forks()
os.register_at_fork(before=_forks.before, after_in_parent=_forks.after, after_in_child=_forks.in_child)
