"""What pyproject.toml cannot say: the plugin template, which lies at the top level, travels inside the package
`dsx`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TEMPLATE = ROOT / "plugin_template"


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


setup(cmdclass={"build_py": BuildWithTemplate})
