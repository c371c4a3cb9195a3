"""Errors of commands: one line on stderr and an exit code."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from modelport.gateway.cli.tables import printable
from modelport.gateway.errors import ModelportError
from modelport.gateway.extras import is_library, missing_extra

#: Longest message; the longest of modelport's own, a list of names, has about 1,000.
MOST_CHARACTERS = 4000

NO_MEMORY = "the memory, or the limit on it, is too small for this; give smaller inputs, or more"

EXIT_FAILURE = 1  # none of the documented reasons: a bug, or the machine's fault


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to end; libraries and cleanups take each for a Ctrl-C."""

    _WORDS: Mapping[int, str] = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(self._WORDS.get(number, "interrupted"))
        self.number = number


def exit_code(error: BaseException) -> int:
    """The exit code of the process for ``error``; that of a signal is a shell's."""
    if isinstance(error, Interrupted):
        return 128 + error.number
    if isinstance(error, click.UsageError):
        return click.UsageError.exit_code
    return error.exit_code if isinstance(error, ModelportError) else EXIT_FAILURE


def one_line(text: str) -> str:
    """``text`` for a terminal; it may quote files, with line breaks, escape sequences and pages."""
    line = " ".join(text.split())
    if len(line) > MOST_CHARACTERS:
        line = f"{line[: MOST_CHARACTERS // 2]} [...] {line[-MOST_CHARACTERS // 2 :]}"
    return printable(line)


class Failure(click.ClickException):
    """Any error as click shows it: one line on stderr, never a traceback.

    ``code``: the exit code, if it is not that of the kind of error.
    """

    def __init__(self, error: BaseException, code: int | None = None) -> None:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        super().__init__(one_line(text + _origin(error)) or type(error).__name__)
        context = getattr(error, "ctx", None) or click.get_current_context(silent=True)
        #: With ``--log-format json``, the error is an object, too.
        self._as_json = context is not None and context.params.get("log_format") == "json"
        # click: per class or instance
        self.exit_code = exit_code(error) if code is None else code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        text = f"modelport: error: {self.message}"
        if self._as_json:
            text = json.dumps({"event": text, "level": "error"})
        click.echo(text, file=file, err=True)
        annotate(self.message)


def annotate(message: str, title: str = "modelport") -> None:
    """Show ``message`` as an annotation in GitHub Actions; elsewhere do nothing."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    name = title.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    click.echo(f"::error title={name}::{text}", err=True)


def _origin(error: BaseException) -> str:
    """The origin of a wrong value: the environment or the configuration file; else empty."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    source = error.ctx.get_parameter_source(str(error.param.name))
    if source is ParameterSource.ENVIRONMENT:
        return f" It is set by {error.param.envvar}."
    return " It is set in the configuration file." if source is ParameterSource.DEFAULT_MAP else ""


class OneLineCommand(click.Command):
    """A command that reports every failure, also of parsing, as one line and an exit code.

    As the first base of a group it holds for all of the group's commands.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _fail(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ModelportError, click.UsageError) as error:
            _fail(error)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt as error:
            _fail(error)
        except BrokenPipeError:  # the reader of the output has gone; click exits without a message
            raise
        except MemoryError as error:
            _fail(RuntimeError(NO_MEMORY), error)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and is_library(error):
                _fail(missing_extra(error), error)
            _fail(RuntimeError(f"unexpected {type(error).__name__}: {error}"), error)


class OneLineGroup(OneLineCommand, click.Group):
    """A command group that reports errors in one line."""

    command_class = OneLineCommand


CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def renamed_option(old: str, new: str) -> Callable[[CommandT], CommandT]:
    """Refuse an option that has another name now, with that name."""

    def refuse(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{old} is {new} now", context)

    name = f"renamed_{old.strip('-')}"
    return click.option(old, name, hidden=True, expose_value=False, callback=refuse)


def _fail(error: BaseException, cause: BaseException | None = None) -> NoReturn:
    first = cause or error
    raise Failure(_interruption(first) or error) from first


def _interruption(error: BaseException | None) -> Interrupted | None:
    """The signal behind an error, which some libraries turn into their own errors."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    if error is None or isinstance(error, Interrupted):
        return error
    return Interrupted()
