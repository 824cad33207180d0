"""Print the requirements of a dependency group of pyproject.toml, one a line."""

import sys
import tomllib
from pathlib import Path

group = sys.argv[1]
project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
print("\n".join(project["dependency-groups"][group]))
