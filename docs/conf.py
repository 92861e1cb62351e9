"""Sphinx: ``pip install ".[docs]" && sphinx-build -W docs docs/_build``."""

from lightning_gpp import __version__

project = "lightning_gpp"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["static"]
html_js_files = ["keyboard.js"]

myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
# Lightning's own hooks, which a strategy inherits, are documented there.
autodoc_default_options = {"inherited-members": False}
