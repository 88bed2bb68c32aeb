"""Every error a user can meet: one root, each also a standard type, all picklable."""

import re
from typing import ClassVar

from isotrain.language import Message

_CREDENTIALS = re.compile(r"://[^/\s'\"]*@")

# Not yet on PyPI, where anybody could take the name: the release changes this line.
_ON_PYPI = False


def install_command(extra: str) -> str:
    return f"pip install '{'isotrain' if _ON_PYPI else '.'}[{extra}]'"


def install(extra: str) -> str:
    """How to install isotrain with an extra, for a sentence."""
    return install_command(extra) + ("" if _ON_PYPI else " in a clone of isotrain")


RETRYABLE = 75
"""Exit code of an error that may not come again: EX_TEMPFAIL in sysexits.h."""


class IsotrainError(Exception):
    """The root: the command line prints it without a traceback and exits with 1, or with `RETRYABLE`."""

    may_pass: ClassVar[bool] = False
    """Whether the same command may succeed if it is run again: something died, nothing is to be changed."""


# What Python raises for wrong data, a wrong path or a bug: the same command meets it again. Devices,
# collectives and the network raise RuntimeError, OSError or types of their own.
_COME_AGAIN = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, SyntaxError, TypeError,
    ValueError, ImportError, NotImplementedError, RecursionError,
    FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError,
)  # fmt: skip


def may_pass(error: BaseException) -> bool:
    """Whether the same command may succeed if it is run again, for any error that ended a run."""
    if isinstance(error, IsotrainError):
        return error.may_pass
    return not isinstance(error, _COME_AGAIN)


class RecipeError(IsotrainError, ValueError):
    """A recipe, override or command-line value that cannot be used, with what to write instead.

    A password in a URL, wherever it was written, is not repeated.
    """

    def __init__(self, *words: object) -> None:
        super().__init__(*(_without_credentials(word) for word in words))


def _without_credentials(word: object) -> object:
    if isinstance(word, Message):
        return word.rewritten(_hide)
    return _hide(word) if isinstance(word, str) else word


def _hide(text: str) -> str:
    return _CREDENTIALS.sub("://***@", text)


class DataError(IsotrainError, ValueError):
    """A row, data file or chat template that cannot be turned into samples."""


class ModelError(IsotrainError, ValueError):
    """A model directory or architecture that cannot be trained or exported."""


class DeviceError(IsotrainError, RuntimeError):
    """A device that is not there, or not usable as the recipe asks."""


class CheckpointError(IsotrainError, RuntimeError):
    """A checkpoint that could not be written, or cannot be resumed from."""


class NonFiniteError(IsotrainError, ArithmeticError):
    """A loss or gradient that is not a finite number."""


class ZeroGradientError(IsotrainError, ArithmeticError):
    """A run in which no update had a gradient: it would end without having learnt anything."""


class LaunchError(IsotrainError, RuntimeError):
    """A rank that ended with an error."""


class RankLost(LaunchError):
    """A rank that was killed or crashed."""

    may_pass = True


class PreemptedError(LaunchError):
    """A run that SIGTERM ended: started again, it resumes."""

    may_pass = True


class RolloutError(IsotrainError, RuntimeError):
    """A generation engine that failed, with its name."""


class EngineLost(RolloutError):
    """A generation engine whose processes have ended or stopped replying: only a new one helps."""

    may_pass = True


class WeightUpdateError(RolloutError):
    """A weight update that an engine did not take whole, or not in time."""

    may_pass = True


class RewardError(IsotrainError, RuntimeError):
    """A reward that cannot be computed at all; a single sample's failure is counted instead."""


class EpisodeError(IsotrainError, RuntimeError):
    """An environment cannot be loaded or started."""


class SandboxError(IsotrainError, RuntimeError):
    """A sandbox that cannot be made or reached; what a program does inside is never an error."""


class ClusterError(IsotrainError, RuntimeError):
    """A Ray cluster that cannot be joined, lacks devices, or lost a worker."""


class WorkerLost(ClusterError):
    """A worker that died, crashed or did not reply, or whose machine was lost."""

    may_pass = True


class WorkerFailed(ClusterError):
    """A worker that met an error which comes again: wrong data, or a bug."""


class CertificateError(IsotrainError, ValueError):
    """A verdict that cannot be certified, or a certificate that cannot be written or signed."""


class PlanError(IsotrainError, RuntimeError):
    """A recipe whose step cannot be planned."""


def one_line(text: str, limit: int = 300) -> str:
    """Text of unknown origin, made safe for a log or a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:limit]).split())
