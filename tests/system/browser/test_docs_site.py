"""The site that `make docs` builds: no warning, no broken link, found by its search, open to all.

It needs the extra `docs`, and Chromium for the search and for axe-core.
"""

import functools
import http.server
import posixpath
import subprocess
import sys
import threading
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from tests import ROOT
from tests.site_parts import QUESTIONS
from tests.system.browser.pages import violations

pytest.importorskip("sphinx", reason="Sphinx is not here: `make docs` installs the extra docs")
pytestmark = pytest.mark.slow

AMONG_FIRST = 5
GRAVE = {"serious", "critical"}
LOOKED_AT = (
    "docs/index", "README", "docs/course", "notebooks/c01_what_is_in_a_step",
    "notebooks/00_quickstart", "docs/finetuning", "docs/combinations", "reference/functions",
    "reference/memlab.predict", "reference/techniques/checkpointing", "reference/cards", "search",
)  # fmt: skip
FOUND = """() => /\\d+ page|found|did not match/.test(
  document.querySelector("#search-results .search-summary")?.innerText ?? "")"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    source, html = folder / "source", folder / "html"
    for words in (
        [ROOT / "docs" / "pages.py", source],
        ["-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-c", ROOT / "docs", source, html],
    ):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return html


class Read(HTMLParser):
    """The links of a page, and what they may lead to in it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.links += [values[k] for k in ("href", "src") if values.get(k)]
        self.anchors |= {values["id"]} if "id" in values else set()


def test_no_link_inside_of_the_site_is_broken(site):
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    templates = "_static/"  # which the theme leaves there
    read = {name: Read(text) for name, text in pages.items() if not name.startswith(templates)}
    assert len(read) > 130
    broken = []
    for name, page in read.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = posixpath.join(posixpath.dirname(name), unquote(parts.path))
            target = posixpath.normpath(place) if parts.path else name
            is_there = (site / target).is_file()
            if is_there and parts.fragment and target in read:
                is_there = unquote(parts.fragment) in read[target].anchors
            if not is_there:
                broken.append((name, link))
    assert broken == []


def test_no_page_loads_anything_from_another_host(site):
    for path in site.rglob("*.html"):
        for line in path.read_text().splitlines():
            assert "<script" not in line or 'src="http' not in line, path


def test_every_public_name_has_a_page_with_an_example(site):
    pages = list((site / "reference").glob("memlab.*.html"))
    assert len(pages) > 50
    assert [p.name for p in pages if "&gt;&gt;&gt;" not in p.read_text()] == []


@pytest.fixture(scope="module")
def address(site):
    """Return the address of a server of the site."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that writes no line for each request."""

    def log_message(self, *_):
        """Write nothing."""


def test_the_search_finds_what_people_ask_for(browser, address):
    assert len(QUESTIONS) == 14
    page = browser.new_page()
    missed = {}
    for question in QUESTIONS:
        page.goto(f"{address}/search.html?q={question['asked'].replace(' ', '+')}")
        page.wait_for_function(FOUND)
        links = page.locator("#search-results ul.search > li > a")
        hrefs = links.evaluate_all("all => all.map(a => a.getAttribute('href'))")
        names = [h.partition("?")[0].partition("#")[0].removesuffix(".html") for h in hrefs]
        first = list(dict.fromkeys(names))[:AMONG_FIRST]
        if question["page"] not in first:
            missed[question["asked"]] = first
    page.close()
    assert missed == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_shuts_people_out(browser, address, theme):
    assert len(LOOKED_AT) == 12
    context = browser.new_context(color_scheme=theme, reduced_motion="reduce")
    asked, found = [], {}
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    for name in LOOKED_AT:
        page.goto(f"{address}/{name}.html")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        rules = violations(page, "body")
        found[name] = [
            (rule["id"], rule["nodes"][0]["html"]) for rule in rules if rule["impact"] in GRAVE
        ]
    context.close()
    assert {name: rules for name, rules in found.items() if rules} == {}
    buttons = (ROOT / "README.md").read_text()
    others = [url for url in asked if not url.startswith((address, "data:"))]
    assert [url for url in others if url not in buttons] == []


def test_no_page_is_wider_than_a_telephone(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    wide = []
    for name in LOOKED_AT:
        page.goto(f"{address}/{name}.html")
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(name)
    page.close()
    assert wide == []
