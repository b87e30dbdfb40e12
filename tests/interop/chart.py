"""`make chart`: writes the manifests for `kubectl`, which are what `deploy/chart` renders.

Invariants:
- A manifest is never edited: the chart is, and the manifests are written again. Its first line has a digest
  of both, which a test compares where there is no Helm.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import load_settings
from tests.deploy.files import CHART, DEPLOY, chart_heading
from tests.interop import build

_MONITORED: Final = ("--set", "monitoring.serviceMonitor=true")
MANIFESTS: Final[dict[Path, tuple[str, ...]]] = {
    DEPLOY / "kubernetes" / "outbox.yaml": (),
    DEPLOY / "fleet" / "kubernetes.yaml": ("-f", str(CHART / "thirty-teams.yaml"), *_MONITORED),
}
"""By file, the values with which it is rendered."""


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Helm.

    Raises:
        SetupError: it cannot be built.
    """
    command = [str(build.helm(load_settings())), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def template(*values: str) -> subprocess.CompletedProcess[str]:
    """Render the chart."""
    return helm("template", "outbox", str(CHART), "--kube-version", "1.31.0", *values)


def rendered(*values: str) -> str:
    """Return a manifest."""
    done = template(*values)
    if done.returncode:
        raise SetupError(done.stderr.strip())
    body = "\n".join(line.rstrip() for line in done.stdout.splitlines() if line.strip()) + "\n"
    return chart_heading(body) + body


if __name__ == "__main__":
    try:
        for path, values in MANIFESTS.items():
            path.write_text(rendered(*values))
    except SetupError as error:
        print(f"make chart: {error}", file=sys.stderr)
        sys.exit(2)
