"""`python -m tests.interop.build [spark]`: builds the programs of others for these tests; prints the paths.

Invariants:
- A program is in the directory of the local stack, under a name that changes with the files it is made of:
  `daprd/`, `helm/`, `porcupine/`, `asyncapi/`, and `apicurio-VERSION`.
- It appears under its name by a rename, so it is complete or absent.
- The environment of a reader of Iceberg is `iceberg-NAME-…`, made of `iceberg_readers/NAME.txt`.
- `daprd/go.sum` and `helm/go.sum` pin a module, and the `go.sum` in it pins everything that it needs;
  `porcupine/go.sum` pins Porcupine, which needs nothing; `asyncapi/package-lock.json` pins AsyncAPI's parser,
  and no script of a package is run. Of what Maven fetches the SHA-256 is here.

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
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import last_lines
from outbox_pipelines.local.stack_client import home_of
from outbox_pipelines.settings import Settings, load_settings

DAPRD: Final = Path(__file__).with_name("daprd")
PORCUPINE: Final = Path(__file__).with_name("porcupine")
ASYNCAPI: Final = Path(__file__).with_name("asyncapi")
HELM: Final = Path(__file__).with_name("helm")
MODULE: Final = "github.com/dapr/dapr"
_HELM: Final = "helm.sh/helm/v3"
APICURIO: Final = "3.3.3"
_APICURIO_SHA256: Final = "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63"
_READERS: Final = Path(__file__).with_name("iceberg_readers")
# The newest that Iceberg has a runtime for is Spark 4.1.
_SPARK_JARS: Final = {
    "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0": (
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"
    ),
    "org.postgresql:postgresql:42.7.8": "2a32a9dcbc42d67a50ad3a0de5efd102c8d2be46720045f2cbd6689f160ab7c7",
}
# Of Dapr's own go.mod.
OLDEST_GO: Final = (1, 22, 6)


def place(settings: Settings, source: Path) -> Path:
    """Where the program of this source is, or will be."""
    texts = b"".join(path.read_bytes() for path in sorted(source.iterdir()))
    name = f"{source.name}-{_version(source)}-{hashlib.sha256(texts).hexdigest()[:8]}"
    return home_of(settings).path / name


def daprd(settings: Settings) -> Path:
    """Return Dapr's sidecar, which is built if it does not exist.

    Raises:
        SetupError: it cannot be built; the message says what is missing.
    """
    target = place(settings, DAPRD)
    if target.is_file():
        return target
    version = _version(DAPRD)
    with _building("Dapr's sidecar", settings, DAPRD) as (folder, environment):
        print(f"building Dapr's sidecar {version} (157 MB), once: 4 to 7 min with two cores …", flush=True)
        _pin(f"{MODULE}@v{version}", folder, environment)
    return target


def helm(settings: Settings) -> Path:
    """Return Helm, which is built if it does not exist.

    Raises:
        SetupError: it cannot be built; the message says what is missing.
    """
    target = place(settings, HELM)
    if not target.is_file():
        version = _version(HELM)
        with _building("Helm", settings, HELM, f"{_HELM}/cmd/helm") as (folder, environment):
            print(f"building Helm {version} (80 MB), once: 2 to 4 min with two cores …", flush=True)
            _pin(f"{_HELM}@v{version}", folder, environment)
    return target


def _pin(module: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Pin what a module needs, as the module itself does."""
    answer = _run(["go", "mod", "download", "-json", module], folder, environment)
    with (folder / "go.sum").open("a") as sums:
        sums.write((Path(json.loads(answer)["Dir"]) / "go.sum").read_text())


def porcupine(settings: Settings) -> Path:
    """Return the second judge of histories, which is built if it does not exist.

    Raises:
        SetupError: it cannot be built; the message says what is missing.
    """
    target = place(settings, PORCUPINE)
    if not target.is_file():
        with _building("the second judge of histories", settings, PORCUPINE):
            pass
    return target


def asyncapi(settings: Settings) -> Path:
    """Return the directory of AsyncAPI's parser, which is installed if it does not exist.

    Raises:
        SetupError: it cannot be installed; the message says what is missing.
    """
    target = place(settings, ASYNCAPI)
    if target.is_dir():
        return target
    if shutil.which("npm") is None:
        raise SetupError("npm is missing: install Node.js 20 or newer and add it to PATH")
    home_of(settings).make()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="asyncapi-") as work:
        folder = Path(shutil.copytree(ASYNCAPI, Path(work) / "source"))
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            _run(command, folder, os.environ)
        except subprocess.CalledProcessError as error:
            problem = last_lines(error.stderr, 3)[:300]
            raise SetupError(f"AsyncAPI's parser cannot be installed: npm ci failed ({problem})") from None
        folder.rename(target)
    return target


def apicurio(settings: Settings) -> Path:
    """Return the directory of the schema registry Apicurio, which is fetched from Maven if it does not exist.

    Raises:
        SetupError: it cannot be fetched, or is another one; the message says what is missing.
    """
    target = home_of(settings).path / f"apicurio-{APICURIO}"
    if target.is_dir():
        return target
    print(f"fetching the schema registry Apicurio {APICURIO} (158 MB), once …", flush=True)
    with _fetched(
        settings, f"io.apicurio:apicurio-registry-app:{APICURIO}:tar.gz:all", _APICURIO_SHA256
    ) as archive:
        folder = archive.with_name("program")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        folder.rename(target)
    return target


def spark_jars(settings: Settings) -> list[Path]:
    """Return Iceberg for Spark and PostgreSQL's driver, which are fetched from Maven if they do not exist.

    Raises:
        SetupError: one cannot be fetched, or is another one; the message says what is missing.
    """
    targets = []
    for artifact, sha256 in _SPARK_JARS.items():
        _, name, version = artifact.split(":")
        targets.append(home_of(settings).path / f"{name}-{version}.jar")
        if not targets[-1].is_file():
            with _fetched(settings, artifact, sha256) as jar:
                jar.rename(targets[-1])
    return targets


def environment(settings: Settings, pinned: Path) -> Path:
    """Return an environment of Python with these packages, which is made if it does not exist.

    Raises:
        SetupError: it cannot be made; the message says why.
    """
    number = hashlib.sha256(pinned.read_bytes()).hexdigest()[:8]
    target = home_of(settings).path / f"iceberg-{pinned.stem}-{number}"
    if (target / "ready").is_file():
        return target
    home_of(settings).make()
    # It cannot be renamed: its programs have its path in them.
    shutil.rmtree(target, ignore_errors=True)
    print(f"installing {pinned.stem} in an environment of its own, once …", flush=True)
    python = str(target / "bin" / "python")
    try:
        _run([sys.executable, "-m", "venv", str(target)], Path.cwd(), os.environ)
        uv = str(Path(sys.executable).with_name("uv"))
        install = [uv, "pip", "install", "-q", "--python", python, "--require-hashes", "-r", str(pinned)]
        _run(install, Path.cwd(), os.environ)
    except subprocess.CalledProcessError as error:
        raise SetupError(f"{pinned.stem} cannot be installed: {last_lines(error.stderr, 1)[:300]}") from None
    (target / "ready").touch()
    return target


@contextmanager
def _fetched(settings: Settings, artifact: str, sha256: str) -> Iterator[Path]:
    """Fetch an artifact from Maven, alone: what it would be built of is not wanted."""
    name = artifact.split(":")[1]
    if shutil.which("mvn") is None:
        raise SetupError("mvn is missing: install Maven and add it to PATH")
    home_of(settings).make()
    with tempfile.TemporaryDirectory(dir=home_of(settings).path, prefix=f"{name}-") as work:
        command = [
            "mvn",
            "-B",
            "-q",
            "dependency:copy",
            f"-Dartifact={artifact}",
            f"-DoutputDirectory={work}",
        ]
        try:
            _run(command, Path(work), os.environ)
        except subprocess.CalledProcessError as error:
            problem = last_lines(error.stdout or error.stderr, 1)[:300]
            raise SetupError(f"{name} cannot be fetched: mvn dependency:copy failed ({problem})") from None
        [file] = Path(work).iterdir()
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
                raise SetupError(f"{file.name} is not the one that was published: check the repository")
        yield file


@contextmanager
def _building(
    what: str, settings: Settings, source: Path, program: str = "."
) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Let the block complete a copy of the source, in Go's environment; then build it."""
    environment, target = _go(), place(settings, source)
    home_of(settings).make()
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{source.name}-") as work:
            folder = Path(shutil.copytree(source, Path(work) / "source"))
            yield folder, environment
            build = ["go", "build", "-tags", "stablecomponents", "-o", str(Path(work) / "program"), program]
            _run(build, folder, environment)
            (Path(work) / "program").rename(target)
    except subprocess.CalledProcessError as error:
        # `go mod download -json` reports on its standard output.
        problem = last_lines(error.stderr or " ".join(error.stdout.split()), 1)[:300]
        raise SetupError(
            f"{what} cannot be built: {' '.join(error.cmd[:3])} failed ({problem}). If a download failed, "
            "correct the network, the proxy or GOPROXY; Dapr's modules need some 3 GB in GOMODCACHE"
        ) from None


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


def _version(source: Path) -> str:
    """Of the module, or the package, that the program is built from."""
    if (package := source / "package.json").is_file():
        [version] = json.loads(package.read_text())["dependencies"].values()
        return str(version)
    found: list[str] = re.findall(r"^require \S+ v(\S+)", (source / "go.mod").read_text(), re.M)
    return found[0]


def _oldest() -> str:
    return "Go " + ".".join(map(str, OLDEST_GO))


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command of Go; return its output."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["spark"]:
            print(*spark_jars(load_settings()), environment(load_settings(), _READERS / "spark.txt"))
            sys.exit()
        print(porcupine(load_settings()))
        print(daprd(load_settings()))
        print(helm(load_settings()))
        print(asyncapi(load_settings()))
        print(apicurio(load_settings()))
        print(*spark_jars(load_settings()))
        for pinned in sorted(_READERS.glob("*.txt")):
            print(environment(load_settings(), pinned))
    except SetupError as error:
        print(f"make interop: {error}", file=sys.stderr)
        sys.exit(2)
