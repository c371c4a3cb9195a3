"""Options that a command and the Python function of its name share, declared once.

    class ConvertOptions(TypedDict, total=False):
        samples: Annotated[int, "Number of random inputs.", click.IntRange(1), option(default=1000)]

``Unpack[ConvertOptions]`` types the keyword arguments of the function, ``complete`` adds their
defaults, and ``declared_by`` adds the options to the command. The environment, the configuration
file and the reference page take them from the command.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import click

from modelport.gateway.cli.errors import CommandT
from modelport.gateway.errors import UsageError

OptionsT = TypeVar("OptionsT", bound=Mapping[str, Any])
#: The first of these that a hint contains is the type of the command's value.
_KINDS: Mapping[Any, Any] = {
    bool: bool,
    int: int,
    float: float,
    Path: click.Path(path_type=Path),
    str: str,
}


class Option(NamedTuple):
    """Names of an option besides its field's, and attributes, as of ``click.option``.

    Attributes:
        was: the former name of the argument.
    """

    names: tuple[str, ...]
    attributes: Mapping[str, Any]
    was: str | None = None

    def named(self, name: str, hint: Any) -> Callable[[CommandT], CommandT]:
        """The decorator that adds an option, which several commands share."""
        return _merged(name, hint, (self,)).decorator()

    def decorator(self) -> Callable[[CommandT], CommandT]:
        shown = {"show_default": "default" in self.attributes}
        return click.option(*self.names, **{**shown, **self.attributes})


def option(*names: str, was: str | None = None, **attributes: Any) -> Option:
    """Declare names besides the field's, a default, a metavar and the like."""
    return Option(names, attributes, was)


def declared_by(
    options: type, but: Collection[str] = (), defaults: object = None
) -> Callable[[CommandT], CommandT]:
    """Add the options of a declaration to a command.

    A field has its help, a ``click.ParamType`` if its hint does not say all, and an ``Option`` for
    what is special; or a decorator, which adds several options; or nothing: it is for Python.

    Args:
        defaults: has the defaults of options, under their names; the values of an enum are choices.
    """

    def decorate(command: CommandT) -> CommandT:
        for name, hint, metadata in reversed([*_declared(options)]):
            if name in but:
                continue
            if not isinstance(metadata[0], str | Option):
                command = metadata[0](command)
                continue
            merged = _merged(name, hint, metadata)
            attributes = {**merged.attributes}
            default = getattr(defaults, merged.names[-1].lstrip("-").replace("-", "_"), None)
            if isinstance(default, StrEnum):
                attributes["type"], default = click.Choice([*map(str, type(default))]), str(default)
            if default is not None and not attributes["multiple"]:
                attributes.setdefault("default", default)
            command = Option(merged.names, attributes).decorator()(command)
        return command

    return decorate


def complete(function: str, options: type[OptionsT], given: OptionsT) -> OptionsT:
    """All arguments of a function: those that are given, and the defaults of the others.

    Raises:
        TypeError: an argument has no declaration, as of any function.
        UsageError: it has another name now.
    """
    arguments: dict[str, Any] = dict.fromkeys(get_type_hints(options))
    former: dict[str | None, str] = {}
    for name, hint, metadata in _declared(options):
        merged = _merged(name, hint, metadata)
        missing: Any = () if merged.attributes["multiple"] else None
        if merged.attributes.get("is_flag"):
            missing = False
        arguments[name] = merged.attributes.get("default", missing)
        former[merged.was] = name
    for name in given.keys() - arguments.keys():
        if name in former:
            raise UsageError(f"the argument '{name}' is '{former[name]}' now, as the option")
        raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    return cast(OptionsT, {**arguments, **given})


def _declared(options: type) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    for name, hint in get_type_hints(options, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, *metadata = get_args(hint)
            yield name, kind, tuple(metadata)


def _merged(name: str, hint: Any, metadata: Iterable[Any]) -> Option:
    """One option of all that a field says."""
    flag = f"--{name.replace('_', '-')}"
    names: tuple[str, ...] = (flag,)
    attributes, was = _of_value(hint), None
    for part in metadata:
        if isinstance(part, str):
            attributes["help"] = part
        elif isinstance(part, Option):
            has_flag = any(each.startswith(flag) for each in part.names)
            names = part.names if has_flag else (flag, *part.names)
            attributes |= part.attributes
            was = part.was
        elif isinstance(part, click.ParamType):
            attributes["type"] = part
    return Option(names, attributes, was)


def _of_value(hint: Any) -> dict[str, Any]:
    """The type of a value, and whether the option is repeatable."""
    parts = get_args(hint) or (hint,)
    if get_origin(hint) is Sequence:
        parts = (hint,)
    sequences = [part for part in parts if get_origin(part) is Sequence]
    items = itertools.chain.from_iterable(get_args(part) for part in sequences)
    found = {*parts, *itertools.chain.from_iterable(get_args(item) or (item,) for item in items)}
    return {
        "type": next((kind for each, kind in _KINDS.items() if each in found), None),
        "multiple": bool(sequences),
    }
