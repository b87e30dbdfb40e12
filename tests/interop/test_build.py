"""What `make interop` reports if the sidecar cannot be built; that the second judge can."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings, load_settings
from tests.interop import build


@pytest.fixture
def empty(tmp_path: Path) -> Settings:
    """A local stack in which nothing was built."""
    return load_settings(local_dir=str(tmp_path / "local"))


def test_go_is_missing(empty: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"^Go is missing: install Go 1\.22\.6 or newer and add it to PATH$"):
        build.daprd(empty)


def test_go_is_too_old(empty: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.8\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SetupError, match=r"^go1\.19\.8 is too old: install Go 1\.22\.6 or newer"):
        build.daprd(empty)


def test_there_is_no_network(empty: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a page of Go's output, and against a half-built program that stays."""
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("GOPROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("GONOSUMDB", "*")
    with pytest.raises(
        SetupError, match=r"^Dapr's sidecar cannot be built: go mod download failed .*refused.* GOPROXY"
    ) as raised:
        build.daprd(empty)
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "local").glob("daprd*"))
