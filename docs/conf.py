"""Settings of Sphinx for the site, which `make docs` builds of what `docs/pages.py` has made."""

import memlab

project = "memlab"
author = "memlab authors"
copyright = author  # noqa: A001, which Sphinx calls so
version = release = memlab.__version__
root_doc = "docs/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

nb_execution_mode = "off"  # what is shown has been run by `make notebooks`
nb_ipywidgets_js = {}  # no page asks another host for a script
nb_merge_streams = True
nb_render_markdown_format = "myst"  # so that a link of a chapter to the next leads to its page
myst_heading_anchors = 4

smartquotes = False
default_role = "code"  # docstrings write names as Markdown does
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_use_ivar = True
napoleon_use_rtype = False

# types of other projects have no page here, nor has every type inside of memlab: public names must
nitpick_ignore_regex = [("py:.*", r"(?!memlab\.).*|memlab\.\w+\..*")]

linkcheck_ignore = [r".*THE_OWNER.*"]  # the repository has no address yet

html_theme = "pydata_sphinx_theme"
html_title = "memlab"
html_extra_path = ["site"]  # what leads from / to the first page
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("names.js", {"defer": "defer"})]
html_sidebars = {"docs/index": [], "README": []}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "memlab"},
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "navigation_depth": 3,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app):
    """Leave out what scikit-learn adds to a class: its text refers to pages of its own site."""
    app.connect("autodoc-skip-member", _is_left_out)


def _is_left_out(app, kind, name, value, skip, options):
    return skip or not getattr(value, "__module__", "memlab").startswith("memlab")
