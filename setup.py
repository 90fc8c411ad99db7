"""What pyproject.toml cannot say: the plugin template, which lies at the top level, travels inside the package `dsx`;
and the kernels' native.cpp files become one shared library, which is no Python extension."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TEMPLATE = ROOT / "plugin_template"
KERNELS = Path("kernels/dsx_kernels")

COMPILE = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-g0",
)


class BuildWithTemplate(build_py):
    """Copies `plugin_template/` to `dsx/_template` of the wheel; an editable install reads the checkout's."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._template():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return outputs
        return outputs + [str(target) for _, target in self._template()]

    def _template(self) -> list[tuple[Path, Path]]:
        files = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
        home = Path(self.build_lib) / "dsx" / "_template"
        return [(path, home / path.relative_to(TEMPLATE)) for path in files]


class BuildLibrary(build_ext):
    """A library that ctypes loads: named alike for every Python, and without Python's init function."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class WheelForAnyPython(bdist_wheel):
    """The wheel depends on the platform, not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


NATIVE = Extension(
    "dsx_kernels._native",
    sources=[str(path.relative_to(ROOT)) for path in sorted((ROOT / KERNELS).rglob("native.cpp"))],
    depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / KERNELS).rglob("*.h"))],
    language="c++",
    extra_compile_args=[*COMPILE, "-fvisibility=hidden"],
    extra_link_args=["-fopenmp"],
    optional=True,  # without a compiler the installation goes on, and the library is missing
)

setup(
    ext_modules=[NATIVE],
    cmdclass={"build_py": BuildWithTemplate, "build_ext": BuildLibrary, "bdist_wheel": WheelForAnyPython},
)
