"""Whether this process is traced with OpenTelemetry.

Owns: `active_tracer`, which every call asks before it makes a span, and `current_span_ids`, for log lines.
A process is traced when it has set a tracer provider; nothing else turns tracing on. Without one a call only looks up
a name: opentelemetry is never imported here, and the code that makes spans (api/spans.py) is imported at the first one.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api.spans import QueueTracer

_modules = sys.modules
_provider: Any = None
"""The tracer provider for which `_tracer` was made."""
_tracer: "QueueTracer | None" = None


def active_tracer() -> "QueueTracer | None":
    """The maker of spans; None if this process has no tracer provider, or it is switched off."""
    api = _modules.get("opentelemetry.trace")
    if api is None:
        return None
    try:
        # Not public, but get_tracer_provider takes 1.4 µs while no provider is set: too much for every call.
        provider = api._TRACER_PROVIDER
    except AttributeError:
        provider = _public_provider(api)
    if provider is None:
        return None
    return _tracer if provider is _provider else _make_tracer(provider)


def _public_provider(api: Any) -> Any:
    """The tracer provider of an opentelemetry-api without the attribute that `active_tracer` reads."""
    if not hasattr(api, "ProxyTracerProvider"):  # another thread is importing the module
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else provider


def _make_tracer(provider: Any) -> "QueueTracer | None":
    global _provider, _tracer
    from penstock.api.spans import make_tracer

    _tracer = made = make_tracer(provider)
    _provider = provider
    return made


def current_span_ids() -> tuple[str, str] | None:
    """The trace id and the span id of the current span in hexadecimal; None if there is no span."""
    get_current_span = getattr(_modules.get("opentelemetry.trace"), "get_current_span", None)
    if get_current_span is None:
        return None
    found = get_current_span().get_span_context()
    return (f"{found.trace_id:032x}", f"{found.span_id:016x}") if found.is_valid else None
