"""An object of the user's code by its name, `module:attribute`, such as `billing.events:consumer`.

Invariants:
- Modules of the working directory are found.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from outbox_pipelines.errors import SetupError


def load_object(name: str) -> Any:
    """Return the object of that name; raise `SetupError` if it does not exist."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise SetupError(f"{name}: cannot find the module {error.name} from {here}") from None
    except AttributeError:
        raise SetupError(f"{name}: {module} has no {attribute}") from None
