"""Errors of PyTorch's exporters in one line: the part of the model, the reason and the remedy.

PyTorch's own messages have pages, most of them about its internals.
"""

from __future__ import annotations

import contextlib
import linecache
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch
from torch import fx, nn

from modelport.exporters.sources.torch_eager import is_scripted
from modelport.gateway.errors import ModelportError, Unsupported

TORCH = Path(torch.__file__).parent
#: A frame in a stack trace: the file and the line.
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
#: Modules that wrap the model, by the Python module of their class.
_WRAPPERS = re.compile(r"modelport\.exporters\.(?:formats|sources)|torch\.(?!nn\b)")
#: What follows the reason in a message: advice to developers of PyTorch, and its own stack.
_ADVICE = re.compile(
    r"For more information|To see more|\(Size-like symbols|Caused by:|User Stack|from user code"
    r"|While executing|The following call raised|Suggested fixes|To fix the error"
    r"|Exception raised from|Original traceback|Traceback|Explanation:|Hint:|Set TORCH|Command:"
    r"|Please (?:report|file|use)|You can suppress|(?:[Ss]ee )?https?://"
)
_AXES = re.compile(
    r"(?:Constraints violated|Specializations unexpectedly required) \(([^()]{0,1000})\)"
)
#: torch.export's message about a weight of a part that ``torch.jit.load`` has read.
_ARCHIVED = re.compile(r"State dict entry for parameter ([\w.]+) is not an instance of torch")
_HIGHER_ORDER = re.compile(r"could not find kernel for HigherOrderOperator (\w+)")
_OPERATOR = re.compile(r"op='([\w.]+)'|torch\.ops\.higher_order\.(\w+)")
MOST_CHARACTERS, MOST_CODE = 200, 80
#: The place of what belongs to no submodule.
WHOLE = "forward()"
REWRITE = "rewrite that part, or use another --format"
UNSCRIPT = "build the model without torch.jit.load, or use another --format"


@contextlib.contextmanager
def translated(tool: str) -> Iterator[None]:
    """Raise ``Unsupported`` in place of an error that ``tool``, or the model under it, raises."""
    try:
        yield
    except (OSError, ModelportError):
        raise
    except Exception as error:
        errors = list(_chain(error))
        frames = [frame for each in errors for frame in _frames(each)]
        place = _scripted(frames)
        if place is None:
            place = _place(frames)
            reason, remedy = _explained(errors)
        else:
            reason, remedy = "it is TorchScript, and has no Python to trace", UNSCRIPT
        where = f"{place}: " if place != WHOLE else ""
        raise Unsupported(f"{tool} cannot export this model: {where}{reason}; {remedy}") from error


def origin(node: fx.Node) -> str:
    """The submodule and the line of code that ``node`` stems from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    place = _part(path, (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2])
    for file, line in reversed(FRAME.findall(node.meta.get("stack_trace") or "")):
        if not (file.startswith("<") or Path(file).is_relative_to(TORCH)):
            return f"{place}, {Path(file).name} line {line}"
    return place


def _part(path: str, kind: str) -> str:
    """The name of a submodule, without the names of modules that wrap the model."""
    path = re.sub(r"^(?:(?:module|_export_root)(?:\.|$))+", "", path)
    return f"'{path}' ({kind})" if path else WHOLE


# -- the place ------------------------------------------------------------------------------------


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and the errors that it was raised from, or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that ``error`` passed, outermost first, each with its line."""
    passed = error.__traceback__
    while passed is not None:
        yield passed.tb_frame, passed.tb_lineno
        passed = passed.tb_next


def _place(frames: Sequence[tuple[FrameType, int]]) -> str:
    """The submodule that failed and its line of code, as far as they are known."""
    called = [frame.f_locals.get("self") for frame, _ in frames]
    parts = [x for x in called if isinstance(x, nn.Module) and not _wraps(x)]
    if not parts:  # a graph was converted
        values = (frame.f_locals.get(x) for frame, _ in reversed(frames) for x in ("node", "n"))
        node = next((value for value in values if isinstance(value, fx.Node)), None)
        return WHOLE if node is None else origin(node)
    model = parts[0]
    names = {id(part): name for name, part in model.named_modules()}
    last = next(part for part in reversed(parts) if id(part) in names)
    inside = frames[next(i for i, part in enumerate(called) if part is model) :]
    return _part(names[id(last)], type(last).__name__) + _line(model, inside)


def _scripted(frames: Sequence[tuple[FrameType, int]]) -> str | None:
    """The first part that ``torch.jit`` has compiled; None if there is none."""
    called = [frame.f_locals.get("self") for frame, _ in frames]
    model = next((x for x in called if isinstance(x, nn.Module)), nn.Module())
    for name, part in model.named_modules():
        if is_scripted(part):
            return _part(name, type(part).__name__)
    return None


def _wraps(module: nn.Module) -> bool:
    return isinstance(module, fx.GraphModule) or bool(_WRAPPERS.match(type(module).__module__))


def _line(model: nn.Module, frames: Sequence[tuple[FrameType, int]]) -> str:
    """The last line of the model's own code in ``frames``; empty if there is none."""
    files = {type(part).__module__ for part in model.modules()}
    packages = {file.partition(".")[0] for file in files} - {"torch", "modelport"}
    for frame, number in reversed(frames):
        file = str(frame.f_globals.get("__name__"))
        package = file.partition(".")[0]
        if package in packages or (package == "modelport" and file in files):
            path = frame.f_code.co_filename
            code = linecache.getline(path, number, frame.f_globals).strip()[:MOST_CODE]
            return f", {Path(path).name} line {number}" + (f", `{code}`" if code else "")
    return ""


# -- the reason -----------------------------------------------------------------------------------


def _explained(errors: Sequence[BaseException]) -> tuple[str, str]:
    """The reason in a user's words, and the remedy."""
    for error in reversed(errors):
        operator = str(getattr(error, "func", "")).removesuffix(".default")
        match type(error).__name__:
            case "GuardOnDataDependentSymNode" | "DataDependentOutputException":
                return (
                    "its result depends on a value that is known only when the model runs",
                    "compute both cases and choose with torch.where, or branch with torch.cond",
                )
            case "DynamicOutputShapeException":
                return (
                    f"the size of the result of '{operator}' depends on the values in its input",
                    "keep all positions, and mask those that do not count",
                )
            case "UnsupportedOperatorException":
                return f"operator '{operator}' cannot be traced", REWRITE
            case "DispatchError":
                told = (_OPERATOR.search(str(each)) for each in (error, *errors))
                found = next((match for match in told if match), None)
                name = f" '{found[1] or found[2]}'" if found else ""
                return f"operator{name} does not exist in ONNX", REWRITE
        if found := _HIGHER_ORDER.search(str(error)):
            return (
                f"the tracer has no branches and loops of torch ({found[1]})",
                "use --format onnx, pt2 or savedmodel",
            )
        if part := _ARCHIVED.search(str(error)):
            owner = part[1].removeprefix("module.").rpartition(".")[0]
            return f"'{owner or part[1]}' is TorchScript, and has no Python to trace", UNSCRIPT
        if axes := _AXES.search(str(error)):
            return (
                f"it accepts only some of the sizes of {axes[1]}",
                "take sizes from x.shape in forward(), or declare those that it accepts with "
                "--input and --max-batch-size",
            )
    return _shortened(next(each for each in errors if each.__cause__ is None)), REWRITE


def _shortened(error: BaseException) -> str:
    """The beginning of a message, up to its advice."""
    text = " ".join(_ADVICE.split(str(error), maxsplit=1)[0].split()).rstrip(" .:;(")
    kind = type(error).__name__
    if isinstance(error, LookupError | ArithmeticError | AssertionError):
        text = f"{kind}: {text}" if text else kind
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS].rpartition(' ')[0]} ..."
    return text or kind
