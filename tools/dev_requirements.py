"""Print the requirements of development, as pyproject.toml lists them, one a line."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
print("\n".join(project["dependency-groups"]["dev"]))
