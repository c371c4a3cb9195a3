"""Errors of commands: one line on stderr and an exit code.

ModelportError                (modelport.gateway.errors)
├── InvalidArgument
│   └── UsageError      2     an argument is wrong, or does not fit the checkpoint
├── AlreadyExists       2     a published version is never overwritten
├── NotFound            2
├── ParityError         3     the artifact does not compute what the checkpoint computes
├── Unsupported         4     a format, opset, datatype or operator without an exporter
└── Internal
    └── IntegrityError  5     a file is damaged, or wants to run code
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, NoReturn

import click
from click.core import ParameterSource

from modelport.gateway.cli.tables import printable
from modelport.gateway.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unsupported,
    closest,
    install_extra,
)

#: Longest message; the longest of modelport's own, a list of names, has about 1,000.
MOST_CHARACTERS = 4000

NO_MEMORY = "the memory, or the limit on it, is too small for this; give smaller inputs, or more"

EXIT_FAILURE = 1  # none of the documented reasons: a bug, or the machine's fault


class UsageError(InvalidArgument):
    """The command was called wrongly; the message names the argument and the remedy."""


class ParityError(ModelportError):
    """Artifact and checkpoint disagree; the message names output, error, tolerance and sizes."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to end; libraries and cleanups take each for a Ctrl-C."""

    _WORDS: Mapping[int, str] = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(self._WORDS.get(number, "interrupted"))
        self.number = number


#: The first class that matches decides.
EXIT_CODES: Mapping[type[BaseException], int] = {
    click.UsageError: 2,
    InvalidArgument: 2,
    AlreadyExists: 2,
    NotFound: 2,
    ParityError: 3,
    Unsupported: 4,
    IntegrityError: 5,
}


def exit_code(error: BaseException) -> int:
    """The exit code of the process for ``error``; that of a signal is a shell's."""
    if isinstance(error, Interrupted):
        return 128 + error.number
    for kind, code in EXIT_CODES.items():
        if isinstance(error, kind):
            return code
    return EXIT_FAILURE


#: Package → the extra that installs it; all others are in ``torch``.
_EXTRAS = {
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "tf2onnx": "tensorflow",
    "h5py": "tensorflow",
    "ai_edge_litert": "litert",
    "openvino": "openvino",
    "executorch": "executorch",
    **dict.fromkeys(("lightgbm", "onnxmltools", "skl2onnx", "skops", "xgboost"), "trees"),
    "transformers": "huggingface",
    "peft": "huggingface",
    "timm": "timm",
    "torchvision": "torchvision",
    "PIL": "images",
    "jwt": "jwt",
    **dict.fromkeys(
        (
            *("locust", "gevent", "geventhttpclient", "hdrh", "psutil", "scipy", "jinja2"),
            *("matplotlib", "rich", "tritonclient", "grpc"),
        ),
        "load",
    ),
}


#: Packages that an extra installs.
_LIBRARIES = frozenset(_EXTRAS) | {"torch", "onnx", "onnxscript", "safetensors", "sklearn"}


def missing_extra(error: ImportError) -> Unsupported:
    """The message for a missing library of an extra."""
    package = (error.name or "").partition(".")[0]
    return Unsupported(
        f"'{package}' is not installed; this needs it: "
        f"{install_extra(_EXTRAS.get(package, 'torch'))}"
    )


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Raise ``Unsupported``, which names the extra, in place of the absence of a library."""
    try:
        yield
    except ImportError as error:
        if not _is_library(error):
            raise
        raise missing_extra(error) from error


def require_extra(extra: str) -> None:
    """Raise ``Unsupported`` unless every package of ``extra`` is installed; import none."""
    for package in [name for name, brought_by in _EXTRAS.items() if brought_by == extra]:
        with contextlib.suppress(ValueError):  # a module without a specification, as None
            if importlib.util.find_spec(package) is not None:
                continue
        raise missing_extra(ModuleNotFoundError(name=package))


def suggestion(wrong: str, known: Iterable[str], before: str = "") -> str:
    """A question with the name that ``wrong`` most likely means, after ``before``; else empty."""
    found = closest(wrong, known)
    return f"{before}did you mean '{found}'?" if found else ""


#: A message may quote a name of the model, as long as its author likes.
SEARCHED_CHARACTERS = 1000
_ONNX_RUNTIME = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |/\S+\.(?:cc|h):\d+ [^()]*\([^()]*\) ?"
)


def first_line(error: Exception, most: int = 200) -> str:
    """The first line of a library's message; without a message, the error's type.

    ONNX Runtime's prefix and source files are left out, and its indices, which follow on lines of
    their own, are kept.
    """
    lines = (str(error).strip() or type(error).__name__).splitlines()
    if lines[0].startswith("[ONNXRuntimeError]"):
        said = " ".join(line.strip() for line in lines if "Please fix either" not in line)
        return _ONNX_RUNTIME.sub("", said[:SEARCHED_CHARACTERS])[:most]
    return lines[0][:most]


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
        # click: per class or instance
        self.exit_code = exit_code(error) if code is None else code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"modelport: error: {self.message}", file=file, err=True)
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
            if isinstance(error, ModuleNotFoundError) and _is_library(error):
                _fail(missing_extra(error), error)
            _fail(RuntimeError(f"unexpected {type(error).__name__}: {error}"), error)


class OneLineGroup(OneLineCommand, click.Group):
    """A command group that reports errors in one line."""

    command_class = OneLineCommand


def _is_library(error: ImportError) -> bool:
    """Whether the missing module belongs to a library, not to modelport or the user's code."""
    return (error.name or "").partition(".")[0] in _LIBRARIES


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
