"""How Sphinx builds the site: `make docs`. docs/_ext writes the pages that come from the source."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import docstrings  # noqa: E402
import pages  # noqa: E402
import site_html  # noqa: E402

project = "openreg_ops"
author = "The openreg_ops developers"
copyright = "The openreg_ops developers"
release = version = version_of("openreg_ops").partition("+")[0]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_ext", "figures"]
nitpicky = False

myst_heading_anchors = 4
smartquotes_action = "qe"  # not dashes: the options of commands begin with them
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"openreg_ops {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
highlight_language = "text"


def setup(app):
    app.connect("builder-inited", lambda app: pages.write(HERE))
    app.connect("source-read", site_html.link_notes)
    app.connect("autodoc-process-docstring", docstrings.process)
    app.add_post_transform(site_html.InlineFigures)
