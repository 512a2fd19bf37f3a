"""The site. `make docs` builds it into docs/_build/html.

The source folder is the whole repository, so a relative link works here and on GitHub. Notebooks
show their stored outputs: nothing is executed. A link to a file that is not a page copies the file.
"""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import jaxllm

project, author, release = "jaxllm", "the authors of jaxllm", jaxllm.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "BENCHMARKS.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "convert", "docs/_build", "jaxllm", "scripts", "tests"]
html_theme, html_title = "furo", "jaxllm"
html_show_copyright = False
default_role = "py:obj"  # docstrings have `names` in single backticks
nb_execution_mode = "off"
myst_heading_anchors = 4
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has them
python_maximum_signature_line_length = 88

REFERENCE = Path(__file__).parent / "reference"
MODULES = [
    module
    for page in sorted(REFERENCE.glob("*.md"), key=lambda page: (page.stem != "jaxllm", page))
    for module in re.findall(r"automodule:: (\S+)", page.read_text(encoding="utf-8"))
]
LLMS = "# jaxllm\n\n> Language models as pure functions in JAX. The cache is a value.\n"
MADE = ("Alias for field number", "Returns a new object replacing")  # NamedTuple, flax.struct
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # owner/name, set where GitHub builds the site
COLAB = "https://colab.research.google.com/github/{}/blob/main/{}.ipynb"
REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'


def public_names() -> dict[str, str]:
    """Return the first public path of each object, by the path of its definition."""
    names: dict[str, str] = {}
    for module in MODULES:
        for name in getattr(importlib.import_module(module), "__all__", ()):
            thing = getattr(importlib.import_module(module), name)
            defined = (
                f"{getattr(thing, '__module__', module)}.{getattr(thing, '__qualname__', name)}"
            )
            names.setdefault(defined, f"{module}.{name}")
    return names


NAMES = public_names()


def skip_second_mention(
    app: Sphinx, kind: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    """Skip what the page of `jaxllm` describes, on other pages, and docstrings that are made."""
    is_top = kind == "module" and name in jaxllm.__all__ and getattr(jaxllm, name) is thing
    is_made = (getattr(thing, "__doc__", None) or "").startswith(MADE)
    return True if is_made or (is_top and app.env.docname != "docs/reference/jaxllm") else None


def tidy_docstring(
    app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Keep a module's first paragraph, without lists of files; keep "k, v: text" together."""
    lines[:] = [re.sub(r"^( +\w+), (?=\w+: )", r"\1,", line) for line in lines]
    if kind == "module" and "" in lines:
        del lines[lines.index("") :]


def resolve_name(
    app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Link the path of a definition to its public name; leave other code without a link."""
    if node.get("refdomain") != "py":
        return None
    target = NAMES.get(node["reftarget"]) or NAMES.get(f"jaxllm.{node['reftarget']}")
    found = env.domains["py"].objects.get(target)
    if found is None:
        return content
    return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content, target)


def check_reference(app: Sphinx, env: Any) -> None:
    """Warn of public names that the reference lacks."""
    for missing in sorted({*NAMES.values()} - env.domains["py"].objects.keys()):
        logging.getLogger(__name__).warning("%s is public but not in the reference", missing)


def link_colab(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Put a link to Colab above a notebook, if the site is built from a repository on GitHub."""
    if REPOSITORY and page.startswith("notebooks/"):
        link = COLAB.format(REPOSITORY, page)
        context["body"] = f'<p><a href="{link}">Open in Colab</a></p>' + context["body"]


def write_extras(app: Sphinx, exception: Exception | None) -> None:
    """Write index.html and llms.txt (https://llmstxt.org): all pages, as Markdown if they are."""
    if exception is not None:
        return
    lines = [LLMS]
    pages = (app.env.get_doctree(page) for page in (root_doc, "docs/reference/index"))
    for tree in (tree for page in pages for tree in page.findall(addnodes.toctree)):
        lines.append(f"## {tree['caption']}\n")
        for page in tree["includefiles"]:
            is_text = app.env.doc2path(page).suffix == ".md" and "/reference/" not in page
            file = f"_sources/{page}.md.txt" if is_text else f"{page}.html"
            lines.append(f"- [{app.env.titles[page].astext()}]({file})")
        lines.append("")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (Path(app.outdir) / "index.html").write_text(REDIRECT, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", skip_second_mention)
    app.connect("autodoc-process-docstring", tidy_docstring, priority=400)  # before napoleon
    app.connect("missing-reference", resolve_name)
    app.connect("env-updated", check_reference)
    app.connect("html-page-context", link_colab)
    app.connect("build-finished", write_extras)
