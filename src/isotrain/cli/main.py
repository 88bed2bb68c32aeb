"""The `isotrain` command: its verbs, and how errors reach the user."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

import isotrain
from isotrain.cli.verbs import VERBS, LazyGroup
from isotrain.errors import RETRYABLE, IsotrainError
from isotrain.language import Language, said, tr, using, words_of
from isotrain.terminal import guard, guarded, rich_console, visible


class CleanErrors(LazyGroup):
    """A group whose commands end user errors with a message instead of a traceback."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(verbs=VERBS, **settings)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with guarded():
            return super().main(*args, **kwargs)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _visible_words():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _visible_words():
            return self._invoke(ctx)

    def _invoke(self, ctx: Any) -> Any:
        if os.environ.get("ISOTRAIN_DEBUG") == "1":
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except IsotrainError as error:
            _say(_error_line(words_of(error)))
            raise typer.Exit(
                RETRYABLE if error.may_pass and not _has_verdict(ctx) else _failed(ctx)
            ) from None
        except OSError as error:
            if error.filename is None:  # of no file that a user could do something about
                raise
            reason = f"{_path_of(error)}: {error.strerror}"
            _say(_error_line(reason))
            raise typer.Exit(_failed(ctx)) from None
        except ModuleNotFoundError as error:
            from isotrain.api.child import missing_package

            if (words := missing_package(error)) is None:
                raise
            _say(_error_line(words))
            raise typer.Exit(_failed(ctx)) from None
        except KeyboardInterrupt:
            _say(said(tr("interrupted")))
            raise typer.Exit(130) from None
        except Exception as error:
            # An exit and a wrong option are exceptions too, with codes of their own.
            if not _has_verdict(ctx) or hasattr(error, "exit_code") or isinstance(error, typer.Abort):
                raise
            traceback.print_exc()
            raise typer.Exit(_failed(ctx)) from None


def _has_verdict(ctx: Any) -> bool:
    return ctx.invoked_subcommand in ("parity", "mismatch")


def _failed(ctx: Any) -> int:
    """The exit code of a command that failed: where 1 is a verdict, no failure may be that."""
    return 2 if _has_verdict(ctx) else 1


app = typer.Typer(
    cls=CleanErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Post-train language models from one recipe on any device.\n\n"
        "To start, on any machine:\n\n"
        "    isotrain prepare tiny --out work/tiny\n\n"
        "    isotrain train tiny-sft\n\n"
        "Errors end with a message; ISOTRAIN_DEBUG=1 shows the traceback."
    ),
)


@contextmanager
def _visible_words() -> Iterator[None]:
    """Typer styles what it says of a wrong command line: words of that line are filtered before."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):
            error.message = visible(str(error.message))  # type: ignore[attr-defined]
        raise


def _error_line(message: str) -> str:
    """In one language: what has no translation is not put behind a translated word."""
    return f"error: {message}" if message.isascii() else said(tr("error: {message}", message=message))


def _path_of(error: OSError) -> str:
    name = error.filename2 or error.filename  # of two, such as those of a copy, the one that is written
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"isotrain {isotrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    lang: Annotated[
        Language | None,
        typer.Option(
            envvar="ISOTRAIN_LANG",
            help="Language of findings, parity reports and recipe errors; by default the locale's.",
        ),
    ] = None,
) -> None:
    context.with_resource(using(lang))
    # The doctor examines broken plug-ins; every other command runs without them.
    if context.invoked_subcommand != "doctor":
        from isotrain.tools.doctor.plugin import hide_a_plugin_that_cannot_load

        hide_a_plugin_that_cannot_load()


def _say(message: str) -> None:
    """One red message on stderr, as it is: no markup, no wrapping that would break a path."""
    from rich.text import Text

    rich_console(stderr=True).print(Text(message, style="red"), soft_wrap=True)


def main() -> None:
    guard()  # for good: tracebacks are printed after the command has ended
    app(prog_name="isotrain")


if __name__ == "__main__":
    main()
