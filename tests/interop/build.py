"""`python -m tests.interop.build`: builds Dapr's sidecar from its Go module, once, and prints its path.

Invariants:
- The program is in the directory of the local stack, under a name that changes with the files in `daprd/`.
- It appears under its name by a rename, so it is complete or absent.
- `daprd/go.sum` pins Dapr's module, and the `go.sum` in that module pins everything that Dapr needs.

Exit codes: 0 success; 2 something is missing, and one line says what.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.client import home_of
from outbox_pipelines.local.server import last_lines
from outbox_pipelines.settings import Settings, load_settings

SOURCE: Final = Path(__file__).with_name("daprd")
MODULE: Final = "github.com/dapr/dapr"
VERSION: Final = re.findall(rf"{MODULE} v(\S+)", (SOURCE / "go.mod").read_text())[0]
# Of Dapr's own go.mod.
OLDEST_GO: Final = (1, 22, 6)


def place(settings: Settings) -> Path:
    """Where the program is, or will be."""
    texts = b"".join(path.read_bytes() for path in sorted(SOURCE.iterdir()))
    return home_of(settings).path / f"daprd-{VERSION}-{hashlib.sha256(texts).hexdigest()[:8]}"


def daprd(settings: Settings) -> Path:
    """Return the program, which is built if it does not exist.

    Raises:
        SetupError: it cannot be built; the message says what is missing.
    """
    target = place(settings)
    if target.is_file():
        return target
    environment = _go()
    home_of(settings).make()
    print(f"building Dapr's sidecar {VERSION} (157 MB), once: 4 to 7 minutes with two cores …", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="daprd-") as work:
        folder = Path(shutil.copytree(SOURCE, Path(work) / "source"))
        answer = _run(["go", "mod", "download", "-json", f"{MODULE}@v{VERSION}"], folder, environment)
        with (folder / "go.sum").open("a") as sums:
            sums.write((Path(json.loads(answer)["Dir"]) / "go.sum").read_text())
        _run(
            ["go", "build", "-tags", "stablecomponents", "-o", str(Path(work) / "daprd"), "."],
            folder,
            environment,
        )
        (Path(work) / "daprd").rename(target)
    return target


def _go() -> Mapping[str, str]:
    """The environment for Go's commands."""
    if shutil.which("go") is None:
        raise SetupError(f"Go is missing: install {_oldest()} or newer and add it to PATH")
    # Without cgo no C compiler is needed. go.mod of the copy is completed.
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -buildvcs=false"}
    version = _run(["go", "env", "GOVERSION"], Path.cwd(), environment).strip()
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST_GO:
        raise SetupError(f"{version} is too old: install {_oldest()} or newer and put it first in PATH")
    return environment


def _oldest() -> str:
    return "Go " + ".".join(map(str, OLDEST_GO))


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command of Go; return its output."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        # `go mod download -json` reports on its standard output.
        problem = last_lines(done.stderr or " ".join(done.stdout.split()), 1)[:300]
        raise SetupError(
            f"Dapr's sidecar cannot be built: {' '.join(command[:3])} failed ({problem}). If a download "
            "failed, correct the network, the proxy or GOPROXY; the modules need some 3 GB in GOMODCACHE"
        )
    return done.stdout


if __name__ == "__main__":
    try:
        print(daprd(load_settings()))
    except SetupError as error:
        print(f"make interop: {error}", file=sys.stderr)
        sys.exit(2)
