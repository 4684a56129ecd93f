# SPDX-License-Identifier: Apache-2.0
"""Where a link of a document leads once the document has left the repository: to a page of the site of the documents,
or, for a source, to the repository. The site itself (packaging/site) and the description of the wheel use it."""
import pathlib
import posixpath
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Documents of the root are pages too. docs/README.md is the first page, so README.md has another name.
PAGES = {"README.md": "about.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FIRST_PAGE = {"README.md": "index.html"}  # the site's name for docs/README.md
LINK = re.compile(r"\]\(((?!https?:|#)[^)#\s]+)(#[^)\s]*)?\)")


def addresses():
    """{"site": ..., "source": ...} of packaging/addresses.txt; an address that nobody has set is not there."""
    lines = (ROOT / "packaging" / "addresses.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return {row[0]: row[1].rstrip("/") + "/" for row in rows if len(row) == 2}


def page_of(path):
    """The page of the site, a path below docs/, that a file of the repository is; None: it is none."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def lead(markdown, document, page, source):
    """The text of `document`, a path in the repository, with each link leading to page(page of the site, anchor), or
    for what is no page to source(path, anchor)."""
    folder = posixpath.dirname(document)

    def target(match):
        path, anchor = posixpath.normpath(posixpath.join(folder, match[1])), match[2] or ""
        goal = page_of(path)
        return f"]({page(goal, anchor) if goal else source(path, anchor)})"
    return LINK.sub(target, markdown)


def on_the_site(markdown, document, site, source):
    """`lead` by addresses, for text that is shown elsewhere."""
    def address(page, anchor):
        return site + re.sub(r"\.md$", ".html", FIRST_PAGE.get(page, page)) + anchor
    return lead(markdown, document, address, lambda path, anchor: source + path + anchor)
