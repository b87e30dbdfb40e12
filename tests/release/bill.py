"""What is locked: as a bill of materials (CycloneDX 1.6, JSON), and as a list of licenses.

Invariants:
- Names, versions and hashes are those of the lock files; licenses and dependencies are those of the packages
  that are installed. A package for another platform or Python is listed without them.
- The same lock files and installed packages give the same bytes.
"""

from __future__ import annotations

import json
import re
import uuid
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PIN: Final = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;]+)((?:.*\\\n)+.*)$", re.MULTILINE)
_UNKNOWN: Final = "not stated"


class Locked(NamedTuple):
    """A package of the lock files."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of each of its files."""
    is_shipped: bool
    """Whether the image has it: it is in locks/deploy.txt."""
    installed: Distribution | None

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"

    @property
    def expression(self) -> str | None:
        """The SPDX expression, if the package states one."""
        stated = self.installed and self.installed.metadata.json.get("license_expression")
        return str(stated) if stated else None

    @property
    def license(self) -> str:
        """The SPDX expression, otherwise what the package states."""
        if self.expression or self.installed is None:
            return self.expression or "not installed here"
        stated = self.installed.metadata.json
        classes = [
            each.rpartition(" :: ")[2] for each in stated.get("classifier", []) if "License ::" in each
        ]
        # Some packages have the whole text there.
        return ", ".join(classes) or str(stated.get("license") or _UNKNOWN).strip().partition("\n")[0]


def locked(root: Path) -> list[Locked]:
    """Return all packages of the lock files, by name."""
    installed = {(canonicalize_name(each.name), each.version): each for each in distributions()}
    of_files = {name: _PIN.findall((root / "locks" / name).read_text()) for name in ("dev.txt", "deploy.txt")}
    shipped = {(name, version) for name, version, _ in of_files["deploy.txt"]}
    return [
        Locked(
            name,
            version,
            tuple(re.findall(r"sha256:([0-9a-f]{64})", rest)),
            (name, version) in shipped,
            installed.get((canonicalize_name(name), version)),
        )
        for name, version, rest in of_files["dev.txt"]
    ]


def bill(packages: list[Locked], version: str, seconds: int) -> str:
    """Return the bill of materials: `required` is what the image has, `optional` all else.

    Args:
        version: of this package.
        seconds: the time of the release, since 1970.
    """
    ours = f"pkg:pypi/outbox-pipelines@{version}"
    content: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, UTC).isoformat(),
            "component": {
                "type": "application",
                "bom-ref": ours,
                "name": "outbox-pipelines",
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
                "purl": ours,
            },
        },
        "components": [_component(each) for each in packages],
        "dependencies": [
            {"ref": ours, "dependsOn": [each.purl for each in packages if each.is_shipped]},
            *({"ref": each.purl, "dependsOn": _needs(each, packages)} for each in packages),
        ],
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content))
    return json.dumps({"serialNumber": f"urn:uuid:{number}", **content}, indent=1) + "\n"


def _component(package: Locked) -> dict[str, Any]:
    license = (
        {"expression": package.expression} if package.expression else {"license": {"name": package.license}}
    )
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "scope": "required" if package.is_shipped else "optional",
        "licenses": [license] if package.installed else [],
        "purl": package.purl,
        "externalReferences": [
            {
                "type": "distribution",
                "url": package.purl,
                "hashes": [{"alg": "SHA-256", "content": each} for each in package.hashes],
            }
        ],
    }


def _needs(package: Locked, packages: list[Locked]) -> list[str]:
    """Return what a package needs of the others, without its extras."""
    if package.installed is None:
        return []
    required = map(Requirement, package.installed.requires or ())
    names = {
        canonicalize_name(each.name)
        for each in required
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    return [each.purl for each in packages if each.installed and canonicalize_name(each.name) in names]


def licenses(packages: list[Locked]) -> str:
    """Return a line for each package: what the image has, then all else."""
    lines = ["Licenses of the packages in the lock files, as each states it in its metadata."]
    for title, is_shipped in (("In the image", True), ("For extras, the build and the tests", False)):
        lines += ["", f"{title}:"]
        lines += [
            f"{each.name} {each.version}: {each.license}"
            for each in packages
            if each.is_shipped is is_shipped
        ]
    return "\n".join(lines) + "\n"
