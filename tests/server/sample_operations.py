"""An operation of every kind, with a marked text wherever a caller can put one.

Owns: `samples`, which makes the values by the types of the fields, so that it covers operations that are added later.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import inspect

from penstock.operations import OPERATIONS, Operation
from penstock.words.batch import Batch

QUEUE = 7
"""The incarnation in every operation that names a queue."""


def samples(text: str) -> Iterator[Operation[Any]]:
    """Operations of every kind. Where a field may have values of several types, there is one for each of them."""
    for kind in OPERATIONS:
        fields = {field.name: [*_values(field.type, text)] for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        fields = {name: values for name, values in fields.items() if name not in ("call", "queue")}
        for chosen in zip_longest(*fields.values()) if fields else [()]:
            given = {name: value if value is not None else values[0] for (name, values), value in zip(fields.items(), chosen, strict=True)}
            yield kind(queue=QUEUE, **given)


def _values(kind: inspect.Type, text: str) -> Iterator[Any]:
    """A value of each type that a field may have."""
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _values(one, text)
    elif isinstance(kind, inspect.Metadata):
        yield from _values(kind.type, text)
    elif isinstance(kind, inspect.LiteralType):
        yield kind.values[0]
    elif isinstance(kind, inspect.StrType):
        yield "s" if kind.pattern else text
    elif isinstance(kind, inspect.StructType) and kind.cls is Batch:
        raw = text.encode()
        headers = msgspec.msgpack.encode({text: text})
        yield Batch([raw], [raw], [1], [headers], [text], [text], [text], raw, [1], [1], [raw], [raw])
    elif isinstance(kind, inspect.StructType | inspect.NamedTupleType):
        yield kind.cls(**{field.name: next(_values(field.type, text)) for field in kind.fields})
    elif isinstance(kind, inspect.DictType):
        yield {_one(kind.key_type, text): value for value in _values(kind.value_type, text)}
    elif isinstance(kind, inspect.TupleType):
        yield tuple(_one(one, text) for one in kind.item_types)
    elif isinstance(kind, inspect.CollectionType):
        yield [*_values(kind.item_type, text)]
    else:
        yield {inspect.IntType: QUEUE, inspect.BytesType: text.encode(), inspect.BoolType: True, inspect.AnyType: text}.get(type(kind))


def _one(kind: inspect.Type, text: str) -> Any:
    return next(_values(kind, text))
