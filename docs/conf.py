"""Configuration of the documentation: ``sphinx-build -W -b html docs build/docs``."""

from __future__ import annotations

from spardl import __version__

project = "spardl"
author = "spardl authors"
copyright = author  # noqa: A001 - the name that Sphinx reads
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["results/**"]
templates_path = ["_templates"]

# Headings get the anchors that code hosts give them, so that links work in both places.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
autosummary_imported_members = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Napoleon takes the text before a colon in "Returns:" for a type and links its words.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"spardl {release}"
copybutton_exclude = ".linenos, .gp, .go"
