"""Transactional outbox on PostgreSQL and Kafka: write events with your rows, relay them in order."""

__version__ = "0.1.0"

# By name, the module of each of Dagster's components.
_COMPONENTS = {
    "OutboxComponent": "outbox_pipelines.defs.component",
    "OutboxesOverview": "outbox_pipelines.defs.component",
}


class Error(Exception):
    """The base of all errors that this package raises for its users; the message says what to do."""


def __dir__() -> list[str]:
    # Dagster's `dg` looks here for components.
    return [*globals(), *_COMPONENTS]


def __getattr__(name: str) -> object:
    if name not in _COMPONENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Loaded on request, and by name: the writer and the consumer need no Dagster.
    from importlib import import_module

    try:
        return getattr(import_module(_COMPONENTS[name]), name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"{name} needs the extra 'dagster': {error}") from error
