#!/usr/bin/env python3
"""Build the sdist, build the wheel from it, and import that wheel in a throwaway environment.

The environment borrows the dependencies of the interpreter that runs this, so nothing large is downloaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True)
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob("*.whl")
    check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory() as folder:
        print(import_from(wheel, Path(folder)))
    return 0


def check_contents(sdist: Path, wheel: Path) -> None:
    wheel_names = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        sdist_names = {name.split("/", 1)[-1] for name in archive.getnames()}
    foreign = [n for n in wheel_names if not n.startswith(("lightning_hivemind/", "lightning_hivemind-"))]
    if foreign:
        raise SystemExit(f"the wheel holds what is not the package: {foreign}")
    missing = {"lightning_hivemind/py.typed", "lightning_hivemind/__init__.py"} - set(wheel_names)
    if missing:
        raise SystemExit(f"the wheel lacks {sorted(missing)}")
    missing = {"LICENSE", "README.md", "pyproject.toml", "Makefile", "constraints/cpu.txt"} - sdist_names
    if missing:
        raise SystemExit(f"the sdist lacks {sorted(missing)}")


def import_from(wheel: Path, folder: Path) -> str:
    """Install ``wheel`` into an environment in ``folder``; returns one line that says what was imported."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    Path(where.stdout.strip(), "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import sys, lightning_hivemind as package\n"
        "from importlib.metadata import version\n"
        "assert package.__file__.startswith(sys.prefix), package.__file__\n"
        "assert package.__version__ == version('lightning-hivemind')\n"
        "for name in package.__all__: getattr(package, name)\n"
        "print('imported', package.__name__, package.__version__, 'from the installed wheel')"
    )
    done = subprocess.run([python, "-c", code], check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
