"""Frozen dataclasses to JSON and back, strictly.

Plans, graphs, profiles and clusters are written by hand as well as by programs, so reading them
checks everything: a key that is unknown, missing or of the wrong type is an error that names the
place, what was expected and what was found. The form of a dataclass is an object with its field
names; tuples are arrays, enums their values; a document adds ``format`` and ``version``.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from lightning_gpp.common.checks import is_number, is_whole, short_repr

T = TypeVar("T")

_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


class JsonFormError(ValueError):
    """A JSON document does not have the expected form."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """Name and version of a kind of document.

    Attributes:
        name: what the document is, e.g. ``"lightning_gpp.plan"``.
        version: raised with every change of the form.
        older: earlier versions that can still be read; they lack only keys that have a default.
    """

    name: str
    version: int
    older: tuple[int, ...] = ()

    def dumps(self, value: object) -> str:
        """The document that holds a dataclass, as indented text."""
        head = {"format": self.name, "version": self.version}
        return json.dumps(head | to_data(value), indent=2, allow_nan=False) + "\n"

    def loads(self, kind: type[T], text: str, *, source: str = "JSON text") -> T:
        """Reads a document.

        Args:
            kind: the dataclass that the document holds.
            text: the document.
            source: where the text comes from (a file name), for error messages.

        Raises:
            JsonFormError: the text is not such a document.
        """
        return self.from_data(kind, parse_json(text, source), source=source)

    def from_data(self, kind: type[T], data: object, *, source: str) -> T:
        """Reads a document that is already parsed.

        Raises:
            JsonFormError: the data are not such a document.
        """
        found = _object(data, source)
        form = (found.get("format"), found.get("version"))
        if form[0] != self.name or form[1] not in (self.version, *self.older):
            raise JsonFormError(
                f'{source}: expected "format": "{self.name}" and "version": {self.version}, '
                f"got {form[0]!r} and {form[1]!r}"
            )
        body = {key: value for key, value in found.items() if key not in ("format", "version")}
        return from_data(kind, body, where=source)


def parse_json(text: str, source: str) -> Any:
    """The plain data of a JSON text.

    Args:
        text: JSON.
        source: where it comes from, for the error.

    Raises:
        JsonFormError: it is not JSON, or an object has a key twice; the text names the source.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except JsonFormError as error:
        raise JsonFormError(f"{source}: {error}") from error
    except ValueError as error:
        short = str(error).partition(";")[0]
        raise JsonFormError(f"{source}: not JSON: {short}") from error
    except RecursionError as error:
        raise JsonFormError(f"{source}: not JSON that can be read: too deeply nested") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise JsonFormError(f"key {key!r} is there twice in one object; keep one")
        found[key] = value
    return found


def to_data(value: Any) -> Any:
    """Plain data (dicts, lists, numbers, strings) of a dataclass."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_data(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def from_data(kind: type[T], data: object, *, where: str, may_have_more: bool = False) -> T:
    """Builds a dataclass from plain data.

    Args:
        kind: the dataclass; its fields may be numbers, strings, truth values, enums of strings,
            tuples, mappings from strings, other dataclasses, and any of these or None; a field of
            type ``object`` takes whatever JSON has, arrays as tuples.
        data: the plain data.
        where: the place of the data in the document, for error messages.
        may_have_more: whether other keys are left out instead of refused: the form is another's.

    Raises:
        JsonFormError: the data do not have the form of ``kind``.
    """
    found = _object(data, where)
    types_of = typing.get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [str(key) for key in found if key not in known]
    if unknown and not may_have_more:
        raise JsonFormError(
            f"{where}: unknown key {unknown[0]!r}; expected one of: {', '.join(known)}"
        )
    values = {}
    for name, field in known.items():
        if name in found:
            values[name] = _read(types_of[name], found[name], f"{where}: {name}", may_have_more)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise JsonFormError(
                f"{where}: key {name!r} is missing; expected {_describe(types_of[name])}"
            )
    try:
        return kind(**values)
    except JsonFormError:
        raise
    except ValueError as error:
        raise JsonFormError(f"{where}: {error}") from error


def _read(kind: Any, data: object, where: str, may_have_more: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return _read(kind, data, where, may_have_more)
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise _wrong(kind, data, where)
        items = enumerate(data)
        return tuple(_read(arguments[0], item, f"{where}[{i}]", may_have_more) for i, item in items)
    if origin is Mapping:
        return {
            key: _read(arguments[1], item, f"{where}[{key!r}]", may_have_more)
            for key, item in _object(data, where).items()
        }
    if is_dataclass(kind):
        own = typing.cast("type[Any]", kind)
        return from_data(own, data, where=where, may_have_more=may_have_more)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if data not in [member.value for member in kind]:
            raise _wrong(kind, data, where)
        return kind(data)
    if kind is object:
        return _frozen(data)
    if not _fits(kind, data):
        raise _wrong(kind, data, where)
    return kind(data)


def _frozen(data: Any) -> Any:
    """Whatever JSON has, arrays as tuples."""
    if isinstance(data, Mapping):
        return {key: _frozen(item) for key, item in data.items()}
    return tuple(map(_frozen, data)) if isinstance(data, (list, tuple)) else data


def _fits(kind: Any, data: Any) -> bool:
    """Whether data are of a plain kind; a whole number may be written as one of 16e9."""
    if kind is float:
        return is_number(data)
    if kind is int:
        return is_number(data) and (is_whole(data) or data.is_integer())
    return isinstance(data, kind)


def _object(data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise JsonFormError(f"{where}: expected an object, got {short_repr(data)}")
    return data


def _wrong(kind: Any, data: object, where: str) -> JsonFormError:
    return JsonFormError(f"{where}: expected {_describe(kind)}, got {short_repr(data)}")


def _describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"an array ({_describe(arguments[0])} each)"
    if origin in (typing.Union, types.UnionType):
        return f"{_describe(arguments[0])} or null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of: {', '.join(str(member.value) for member in kind)}"
    return _NAMES.get(kind, "an object")
