"""The process in which jgo resolves and fetches jars; started by `jars`, never imported.

Arguments: coordinates joined by `+`, and an empty directory, in which `jars/` appears when all is done.
On failure the last line of the standard error says why.
"""

from __future__ import annotations

import sys
from pathlib import Path

import requests
from jgo.config import GlobalSettings
from jgo.constants import MAVEN_CENTRAL_URL
from jgo.env import EnvironmentBuilder, LinkStrategy
from jgo.maven import MavenContext

CONNECT_SECONDS = 10.0


def main(endpoint: str, work: Path) -> None:
    """Fetch the jars of the endpoint and all they need."""
    # The person's own settings of jgo may name a mirror.
    repositories = {"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories}
    # jgo waits without a limit for a server that does not answer; this call has a timeout.
    requests.head(repositories["central"], timeout=CONNECT_SECONDS)
    context = MavenContext(repo_cache=work / "repository", remote_repos=repositories)
    builder = EnvironmentBuilder(context=context, cache_dir=work / "jgo", link_strategy=LinkStrategy.AUTO)
    found = list(Path(builder.from_endpoint(endpoint).path).rglob("*.jar"))
    if not found:
        raise RuntimeError("no jars were found")
    (work / "jars.new").mkdir()
    for jar in found:
        jar.replace(work / "jars.new" / jar.name)
    (work / "jars.new").rename(work / "jars")


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except requests.RequestException as error:
        where = error.request.url if error.request else "the repository"
        sys.exit(f"{type(error).__name__}: no answer from {where!s}")
    except Exception as error:  # noqa: BLE001 - the caller wants one line, whatever it is
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
