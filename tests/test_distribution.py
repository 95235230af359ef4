"""The wheel and the sdist: built from the tree, complete, and good for the demo in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert names == {name.removeprefix("src/") for name in tracked.stdout.split()}


def test_the_sdist_can_be_read_and_tested(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "docs/index.md", "tests/conftest.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", "killick-demo"))]


def test_the_demo_runs_from_the_wheel_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """Dependencies come from the environment of the tests, the package from the wheel alone."""
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "home"
    venv.create(home, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], capture_output=True, check=True)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def printed(*command: str | Path) -> str:
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    env = {name: value for name, value in os.environ.items() if not name.startswith(("KILLICK_", "PYTHON"))}
    where = printed(home / "bin" / "python", "-c", "import killick; print(killick.__file__)")
    assert where.strip() == str(packages / "killick" / "__init__.py")
    assert "ann 1, bob 1, cyd 1: one each" in printed(home / "bin" / "killick", "demo")
