"""Kafka's topics as assets: those that the catalogue documents, and those that relay sessions have sent to.

Invariants:
- Definitions load whatever is wrong with the settings, the catalogue or Dagster's storage: then there are
  fewer topics.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Final

import dagster as dg

from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.catalog.document import EventType

_PREFIX: Final = "topic"
# What Dagster takes for an owner; any other is named in the description alone.
_OWNER: Final = re.compile(r"team:.+|[\w.+-]+@[\w-]+(\.[\w-]+)+")
_LOG: Final = logging.getLogger(__name__)


def topic_key(name: str) -> dg.AssetKey:
    """The asset that stands for a topic."""
    return dg.AssetKey([_PREFIX, name])


def topics(resource: OutboxResource) -> list[dg.AssetSpec]:
    """An external asset for each topic that is known when the definitions load."""
    documented = _documented(resource)
    return [_topic(name, documented.get(name, {})) for name in sorted(documented.keys() | _seen())]


def _documented(resource: OutboxResource) -> dict[str, dict[str, EventType]]:
    """The event types of each topic that the catalogue names."""
    found: dict[str, dict[str, EventType]] = {}
    # Checking all settings takes drivers that definitions are to load without.
    if not (resource.catalog_file or os.environ.keys() & {"OUTBOX_CATALOG_FILE", "OUTBOX_SETTINGS_FILE"}):
        return found
    try:
        settings = resource.process_config_and_initialize().settings()
        if settings.catalog_file is not None:
            from outbox_pipelines.catalog.document import require_catalog

            for name, each in require_catalog(settings).events.items():
                if each.topic is not None:
                    found.setdefault(each.topic, {})[name] = each
    except SetupError as error:
        # `check_catalog`, and whoever reads the settings, say the same where somebody looks.
        _LOG.debug("no topics of the catalogue: %s", error)
    return found


def _seen() -> set[str]:
    """The topics that relay sessions have reported, as Dagster's storage has them."""
    if not os.environ.get("DAGSTER_HOME"):
        return set()
    try:
        with dg.DagsterInstance.get() as instance:
            return {key.path[1] for key in instance.get_asset_keys(prefix=[_PREFIX]) if len(key.path) == 2}
    except Exception as error:  # noqa: BLE001 - whatever its storage raises
        _LOG.warning("the topics that were seen are not shown: %s", error)
        return set()


def _topic(name: str, types: dict[str, EventType]) -> dg.AssetSpec:
    return dg.AssetSpec(
        topic_key(name),
        deps=[dg.AssetKey(["outbox", "relay"])],
        group_name="topics",
        kinds={"kafka"},
        owners=sorted({each.owner for each in types.values() if _OWNER.fullmatch(each.owner)}),
        description=_DESCRIPTION.format(name=name, types="\n".join(_lines(types)) or _UNDOCUMENTED),
    )


def _lines(types: dict[str, EventType]) -> list[str]:
    return [
        f"- `{name}` ({each.lifecycle}): {each.description.strip()} From {each.producer}, "
        f"for {', '.join(each.consumers) or 'nobody that is known'}; ask {each.owner}."
        for name, each in types.items()
    ]


_UNDOCUMENTED: Final = "None of its event types names it in the catalogue (OUTBOX_CATALOG_FILE)."
_DESCRIPTION: Final = """The topic `{name}`, to which the relay publishes; its sessions observe it.

{types}

Use: see who writes it and who reads it; `outbox catalog render` has the fields of each event type. A topic
appears here when the code location is loaded again after the first session that sent to it.

When consumers miss events: see `outbox/relay` for the lag, and `outbox status` for parked events.
"""
