"""The documentation's site in a browser: the front page, the search, a page with a flame graph, and narrow screens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PATIENCE = 60_000 * float(os.environ.get("DPROBES_TEST_PATIENCE", "1"))
"""Milliseconds until a page that does not show what it must is an error."""

PHONE = {"width": 390, "height": 844}
SCREEN = {"width": 1400, "height": 900}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built as by ``make lint``."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert built.returncode == 0, built.stderr
    return directory


SECTIONS = ("tutorial", "how-to", "reference", "explanation")


@pytest.mark.parametrize(
    ("listed", "page", "message"),
    [
        ("* [Page](page.md): a page.", "# Page", ""),
        ("", "# Page", 'not included in the "nav" configuration'),
        ("* [Page](page.md): a page.", "[dead](gone.md)", "the target 'how-to/gone.md' is not found"),
        ("* [Page](page.md): a page.", "[dead](index.md#gone)", "does not contain an anchor '#gone'"),
    ],
)
def test_dead_links_and_pages_that_no_index_lists_are_errors(
    tmp_path: Path, listed: str, page: str, message: str
) -> None:
    for section in SECTIONS:
        (tmp_path / "docs" / section).mkdir(parents=True)
        (tmp_path / "docs" / section / "index.md").write_text("# Index\n")
    (tmp_path / "docs" / "index.md").write_text("# Front page\n")
    (tmp_path / "docs" / "assets").mkdir()
    (tmp_path / "docs" / "how-to" / "index.md").write_text(f"# Index\n\n{listed}\n")
    (tmp_path / "docs" / "how-to" / "page.md").write_text(f"{page}\n")
    hooks = f"hooks: [{ROOT / 'tools' / 'site_hooks.py'}]"
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nplugins: []\n{hooks}\n")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert (built.returncode != 0) == bool(message), built.stderr
    assert message in built.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, timeout=PATIENCE)
        yield started
        started.close()


class Visit:
    """A page of the site in a window, with the addresses that it asked other machines for, and its errors."""

    def __init__(self, browser: Any, site: Path, size: dict[str, int]) -> None:
        self.page = browser.new_page(viewport=size)
        self.page.set_default_timeout(PATIENCE)
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self._note(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._site = site

    def _note(self, address: str) -> None:
        if not address.startswith(("file:", "data:", "blob:")):
            self.foreign.append(address)

    def go(self, name: str) -> None:
        self.page.goto((self._site / name).as_uri())

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture
def visit(browser: Any, site: Path, request: pytest.FixtureRequest) -> Iterator[Visit]:
    visit = Visit(browser, site, getattr(request, "param", SCREEN))
    yield visit
    visit.page.close()
    assert (visit.foreign, visit.errors) == ([], [])


def test_the_front_page_leads_to_each_section(visit: Visit) -> None:
    visit.go("index.html")
    tabs = visit.page.locator(".md-tabs__link").all_inner_texts()
    assert [tab.strip() for tab in tabs] == ["DProbes", "Tutorial", "How-to", "Reference", "Explanation"]
    for section in ("Tutorial", "How-to", "Reference", "Explanation"):
        visit.go("index.html")
        visit.page.locator("article").get_by_role("link", name=section, exact=True).click()
        assert section == visit.page.locator("article h1").inner_text().strip("¶ \n")


@pytest.mark.parametrize(
    ("term", "page"),
    [
        ("lhist", "reference/dpc.html"),
        ("WATCHPOINT_LEN_INVALID", "reference/errors.html"),
        ("overhead", "reference/verbs.html"),
        ("ProbeSession", "reference/python-api.html"),
    ],
)
def test_the_search_finds_the_page_of_a_term(visit: Visit, term: str, page: str) -> None:
    visit.go("index.html")
    visit.page.locator(".md-search__input").click()
    visit.page.keyboard.type(term)
    # A page is a result of its own, and its sections are further ones: one of them is the place of the term.
    found = visit.page.locator(f'.md-search-result__link[href*="{page}"]')
    found.first.wait_for(state="attached")


def test_the_page_about_views_shows_a_flame_graph(visit: Visit) -> None:
    visit.go("reference/views.html")
    picture = visit.page.locator('article img[src$="flame-graph.png"]')
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("async image => { await image.decode(); return image.naturalWidth }") > 1000
    # The picture leads to the flame graph itself, which is a page with its own scripts.
    visit.page.locator('article a[href$="flame-graph.html"]').first.click()
    visit.page.get_by_text("readQueryFromClient").first.wait_for()


def test_the_page_about_perfetto_shows_its_view_of_a_trace(visit: Visit) -> None:
    visit.go("reference/perfetto.html")
    picture = visit.page.locator('article img[src$="perfetto.png"]')
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("async image => { await image.decode(); return image.naturalWidth }") > 1000


@pytest.mark.parametrize("visit", [PHONE], indirect=True)
def test_no_page_scrolls_sideways_on_a_phone(visit: Visit, site: Path) -> None:
    pages = sorted(str(path.relative_to(site)) for path in site.glob("*/*.html"))
    assert len(pages) > 30
    wide = []
    for page in ("index.html", *pages):
        if page.startswith("assets/"):
            continue
        visit.go(page)
        wide += [page] if visit.value("document.documentElement.scrollWidth") > PHONE["width"] else []
    assert wide == []
