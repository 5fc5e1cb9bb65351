"""How Sphinx builds the site: `make docs`. docs/_ext writes the pages that come from the source.

The build needs no network. With OPENREG_SITE_INVENTORIES=1 it reads the inventories of Python's and PyTorch's
documentation, and names such as torch.Tensor become links.
"""

import os
import sys
import tomllib
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import docstrings  # noqa: E402
import pages  # noqa: E402
import site_html  # noqa: E402

URLS = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["urls"]

project = "openreg_ops"
author = "The openreg_ops developers"
copyright = "The openreg_ops developers"
release = version = version_of("openreg_ops").partition("+")[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode", "sphinx_copybutton", "formulas"]
exclude_patterns = ["_ext", "_templates", "figures"]
nitpicky = False

if os.environ.get("OPENREG_SITE_INVENTORIES"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }

myst_heading_anchors = 4
smartquotes_action = "qe"  # not dashes: the options of commands begin with them
myst_enable_extensions = ["colon_fence", "dollarmath"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
linkcode_resolve = site_html.source_link(HERE.parent, URLS["Repository"])

html_theme = "furo"
html_title = f"openreg_ops {version}"
html_theme_options = {
    "source_repository": URLS["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
}
html_favicon = "_static/logo-light.svg"
html_context = {"urls": URLS}
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "project.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
highlight_language = "text"
pygments_dark_style = "a11y-dark"

copybutton_prompt_text = "$ "  # of a console block, only the commands are copied
copybutton_line_continuation_character = "\\"


def setup(app):
    app.connect("builder-inited", lambda app: pages.write(HERE))
    app.connect("source-read", site_html.link_notes)
    app.connect("source-read", site_html.name_owner(URLS))
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("html-page-context", site_html.omit_edit_link)
    app.add_post_transform(site_html.InlineFigures)
    app.add_post_transform(site_html.WrapCpp)
