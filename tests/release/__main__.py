"""`python -m tests.release`: builds a release into dist/ and checks it.

Exit codes: 0 success; 1 the release is not what it must be.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.release.check import ROOT, ReleaseError, build, check_contents, check_installed, check_page


def main() -> int:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    wheel, sources = build(dist)
    try:
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sources], check=True)
        check_contents(wheel, sources)
        check_page(wheel)
        with tempfile.TemporaryDirectory() as place:
            print(check_installed(wheel, Path(place) / "venv"))
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"{wheel.relative_to(ROOT)}\n{sources.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
