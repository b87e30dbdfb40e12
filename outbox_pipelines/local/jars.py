"""Jars from Maven Central, fetched once and kept.

Invariants:
- A set of jars is one flat directory; it appears under its name by a rename, so it is complete or absent.
- The jars of a set with digests are those, and no others: before they are kept, and before each use.
- jgo prints, logs and imports a lot: it runs in a process of its own (`fetch`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import bound

FETCH_SECONDS = 300.0

# kafka-clients is named because jgo, left to itself, takes an older one that the broker cannot run with.
KAFKA = (
    "org.apache.kafka:kafka_2.13:4.1.0",
    "org.apache.kafka:kafka-clients:4.1.0",
    "org.slf4j:slf4j-simple:1.7.36",
)
# For each set the SHA-256 of every jar, as `sha256sum *.jar` prints them.
DIGESTS = {KAFKA: Path(__file__).with_name("kafka.sha256")}


def place(coordinates: tuple[str, ...], cache: Path) -> Path:
    """The directory in which these jars lie, or will lie."""
    digest = hashlib.sha256("+".join(coordinates).encode()).hexdigest()[:8]
    _, artifact, version = coordinates[0].split(":")
    return cache.expanduser().absolute() / f"{artifact}-{version}-{digest}"


def jars(coordinates: tuple[str, ...], cache: Path) -> Path:
    """A directory with these jars and all they need; fetched (43 MB for Kafka) where it is not there yet.

    Args:
        coordinates: Maven's ``group:artifact:version``, each.
        cache: where sets of jars are kept.

    Raises:
        SetupError: they cannot be fetched, or are not those of `DIGESTS`.
    """
    target = place(coordinates, cache)
    if target.is_dir():
        _require_digests(coordinates, target, f"delete {target}, which is fetched again")
        return target
    if importlib.util.find_spec("jgo") is None:
        raise SetupError("jgo is missing: pip install 'outbox-pipelines[local]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as work:
            _fetch(coordinates, Path(work))
            _require_digests(coordinates, Path(work) / "jars", "they were not kept; check the repository")
            _settle(Path(work) / "jars", target)
    except OSError as error:
        raise SetupError(f"cannot write jars to {cache} ({error}): set OUTBOX_LOCAL_JARS") from None
    return target


def _fetch(coordinates: tuple[str, ...], work: Path) -> None:
    # -P: the caller's working directory is no place to import from.
    command = [sys.executable, "-P", "-m", "outbox_pipelines.local.fetch", "+".join(coordinates), str(work)]
    try:
        done = subprocess.run(
            bound(command, signal.SIGKILL),
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"not done after {FETCH_SECONDS:.0f} s"
    if problem or done.returncode:
        raise SetupError(
            f"the jars of {coordinates[0]} could not be fetched from Maven Central ({problem[:300]}): "
            "correct the network or the proxy, or set OUTBOX_DSN and OUTBOX_KAFKA to existing servers"
        )


def _require_digests(coordinates: tuple[str, ...], directory: Path, remedy: str) -> None:
    if coordinates not in DIGESTS:
        return
    lines = (line.split() for line in DIGESTS[coordinates].read_text().splitlines())
    wanted = {(name, digest) for digest, name in lines}
    found = {(jar.name, hashlib.sha256(jar.read_bytes()).hexdigest()) for jar in directory.iterdir()}
    if wrong := sorted({name for name, _ in wanted ^ found}):
        raise SetupError(
            f"the jars of {coordinates[0]} are not those that were published: {', '.join(wrong[:3])} "
            f"{'and others have' if wrong[3:] else 'has'} another SHA-256, or is missing or unknown: {remedy}"
        )


def _settle(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process was faster; its jars are as good.
        if not target.is_dir():
            raise
