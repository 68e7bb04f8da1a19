"""Sphinx configuration; `make docs` builds with warnings as errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "lightning-hivemind"
author = "The lightning-hivemind developers"
copyright = author
_version = (HERE.parent / "src" / "lightning_hivemind" / "_version.py").read_text(encoding="utf-8")
release = version = re.findall(r'__version__ = "(.+)"', _version)[0]

extensions = ["myst_parser", "sphinx_copybutton", "from_source"]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
highlight_language = "python"
copybutton_prompt_text = "$ "
nitpicky = True  # a reference to a name that is not documented is an error
html_theme = "furo"
html_title = f"{project} {release}"
