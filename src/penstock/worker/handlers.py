"""Handlers: which one an item is for, and how it wants to be called.

Owns: `Handler` and `Handlers`. A handler is a function of an item (or of a list of them); one with a second parameter that must be
given, or with one called `context`, gets a Context too. `async def` makes it one for an event loop.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from penstock.words.errors import InvalidRequest

Function = Callable[..., Any]


class Handler:
    """A function, and the way it is called."""

    __slots__ = ("_context", "function", "is_async")

    def __init__(self, function: Function) -> None:
        if not callable(function):
            raise InvalidRequest(f"the handler is {type(function).__name__}; give a function of an item")
        self.function = function
        self.is_async = is_async(function)
        self._context = _context_place(function)

    @property
    def wants_context(self) -> bool:
        return self._context is not None

    def __call__(self, given: Any, context: Any) -> Any:
        if self._context is None:
            return self.function(given)
        return self.function(given, context) if self._context == "place" else self.function(given, context=context)

    def __reduce__(self) -> tuple[Any, ...]:
        """By reference. Where a decorator has put a worker in the place of its handler, that is what the name stands for."""
        module, name = getattr(self.function, "__module__", None), getattr(self.function, "__qualname__", "")
        there = getattr(sys.modules.get(module or ""), name, None)
        if there is not self.function and getattr(there, "handler", None) is self:
            return _handler_of, (module, name)
        return Handler, (self.function,)

    def __repr__(self) -> str:
        return f"Handler({getattr(self.function, '__qualname__', self.function)})"


def _handler_of(module: str, name: str) -> Handler:
    """The handler of a worker that was made by a decorator."""
    handler: Handler = getattr(import_module(module), name).handler
    return handler


class Handlers:
    """The handlers of a worker, by the kind of item."""

    def __init__(self, default: Handler | None = None) -> None:
        self.default = default
        """For kinds that have none of their own."""
        self.by_kind: dict[str, Handler] = {}

    def add(self, kinds: Sequence[str], function: Function) -> None:
        if not kinds:
            raise InvalidRequest('there is no kind to handle; name one: @worker.on("invoice")')
        handler = Handler(function)
        for kind in kinds:
            if not isinstance(kind, str):
                raise InvalidRequest(f"a kind is {type(kind).__name__}; give a text")
            if kind in self.by_kind:
                raise InvalidRequest(f"kind {kind!r} has a handler already; name each once")
        self.by_kind.update(dict.fromkeys(kinds, handler))

    def find(self, kind: str | None) -> Handler | None:
        """None: not for this worker."""
        if kind is None:
            return self.default
        return self.by_kind.get(kind, self.default)

    @property
    def all(self) -> list[Handler]:
        return [*((self.default,) if self.default else ()), *self.by_kind.values()]

    @property
    def any_async(self) -> bool:
        return any(handler.is_async for handler in self.all)

    @property
    def alone(self) -> Handler | None:
        """The only one, if whatever comes is for it and it wants nothing but the item."""
        return self.default if self.default is not None and not self.by_kind and not self.default.wants_context else None

    def check(self) -> None:
        if not self.all:
            raise InvalidRequest("the worker has no handler; give it one, or register some with @worker.on(kind)")


def is_async(function: Function) -> bool:
    """Whether calling it gives something to await."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _context_place(function: Function) -> str | None:
    """How the function wants its Context: by "place", by "name", or not at all."""
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # something built in that does not say
        return None
    ordered = [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not ordered and not any(one.kind is one.VAR_POSITIONAL for one in given):
        raise InvalidRequest("the handler takes no item; give a function of an item, or of an item and a context")
    if len(ordered) > 1 and (ordered[1].default is ordered[1].empty or ordered[1].name == "context"):
        return "place"
    return "name" if any(one.name == "context" and one not in ordered[:1] for one in given if one.kind is not one.VAR_KEYWORD) else None
