"""Build the wheel with the compiled searches, if the machine that builds it can compile them; else without them.

The rest of the build is described in pyproject.toml.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MOST_SECONDS = 900


class WithSearches(build_py):
    """Copy the package, and compile its searches into the copy."""

    def run(self) -> None:
        """Build; whatever fails in compiling leaves a package whose searches numba compiles at first use."""
        super().run()
        folder = Path(self.build_lib) / "memfit" / "system"
        if self.editable_mode or not folder.is_dir():
            return
        script = Path(__file__).parent / "building" / "machine_code.py"
        try:
            command = [sys.executable, "-s", str(script), str(folder.absolute())]
            subprocess.run(command, check=True, timeout=MOST_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            self.warn(f"memfit is built without compiled searches, numba compiles them at first use: {error}")
            for name in ("searches.so", "searches.json"):
                (folder / name).unlink(missing_ok=True)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files of the package, also the compiled ones."""
        found = [Path(self.build_lib) / "memfit" / "system" / name for name in ("searches.so", "searches.json")]
        return [*super().get_outputs(include_bytecode), *(str(each) for each in found if each.exists())]


class ForOneArchitecture(bdist_wheel):
    """A wheel for every version of Python, and for this architecture if the compiled searches are in it."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tags."""
        if not (Path(self.bdist_dir) / "memfit" / "system" / "searches.so").exists():
            return super().get_tag()
        return "py3", "none", self.plat_name.replace("-", "_").replace(".", "_")


setup(cmdclass={"build_py": WithSearches, "bdist_wheel": ForOneArchitecture})
