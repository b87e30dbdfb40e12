"""`python -m tests.release`: makes a release in dist/ and checks it.

Exit codes: 0 success; 1 the release is not what it must be.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.release.check import (
    ReleaseError,
    check_committed,
    check_contents,
    check_installed,
    check_page,
    check_same,
    make_again,
)
from tests.release.make import ROOT, archives, make, release_time


def main() -> int:
    dist, seconds = ROOT / "dist", release_time(ROOT)
    try:
        check_committed()
        make(ROOT, dist, seconds)
        wheel, sources = archives(dist)
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sources], check=True)
        check_contents(wheel, sources)
        check_page(wheel)
        with tempfile.TemporaryDirectory() as place:
            check_same(dist, make_again(dist, seconds, Path(place) / "again"))
            print(check_installed(wheel, Path(place) / "venv"))
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(*sorted(str(file.relative_to(ROOT)) for file in dist.iterdir()), sep="\n")
    print(f"SOURCE_DATE_EPOCH={seconds} makes the same files from the same sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
