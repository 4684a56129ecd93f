#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the built site: ./dev site runs it.

    check.py SITE             every link of README, as the wheel's description has it, leads to a page and heading of
                              the site, and no page loads anything from elsewhere
    check.py SITE --browse    in a headless Chromium too (Debian: chromium): a search finds its section, and no
                              request leaves this machine
"""
import argparse
import contextlib
import functools
import html.parser
import http.server
import json
import pathlib
import re
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import links

SITE, SOURCE = "https://site.invalid/", "https://source.invalid/"
# What a reader types, and the page that shows it.
SEARCHES = {"state pool": "engines.html", "determinism causality": "accuracy.html"}


class Page(html.parser.HTMLParser):
    """The ids of a page, and what a browser would load with it."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.loads = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.add(given.get("id"))
        if tag in ("script", "img", "iframe", "source"):
            self.loads.append(given.get("src") or "")
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "modulepreload"):
            self.loads.append(given.get("href") or "")


@functools.cache
def page_at(path):
    return Page(path.read_text()) if path.suffix == ".html" else None


def problems_of_readme(site):
    text = links.on_the_site((links.ROOT / "README.md").read_text(), "README.md", SITE, SOURCE)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    if not any(target.startswith(SITE) for target in targets):
        yield "README has no link to the site: nothing was checked"
    for target in targets:
        if target.startswith(SOURCE):
            if not (links.ROOT / target.removeprefix(SOURCE).split("#")[0]).exists():
                yield f"README links to {target}, which is no file of the repository"
        elif target.startswith(SITE):
            path, _, anchor = target.removeprefix(SITE).partition("#")
            if not (site / path).is_file():
                yield f"README links to {target}: the site has no such page"
            elif anchor and anchor not in page_at(site / path).ids:
                yield f"README links to {target}: the page has no such heading"
        elif not target.startswith(("https://", "#")):
            yield f"README links to {target}, which leads nowhere outside the repository"


def problems_of_pages(site):
    for path in sorted(site.rglob("*.html")):
        for load in page_at(path).loads:
            if re.match(r"(https?:)?//", load):
                yield f"{path.relative_to(site)} loads {load}"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def headless():
    from selenium import webdriver
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-background-networking", "--disable-component-update",
                 "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))


def asked_for(browser):
    """Every address that the pages asked for."""
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return sorted({event["params"]["request"]["url"] for event in events
                   if event["method"] == "Network.requestWillBeSent"})


def first_result(browser, address, words):
    """What a reader sees first who types these words, and the page it leads to."""
    from selenium.webdriver.support.ui import WebDriverWait
    browser.get(f"{address}index.html?q={words.replace(' ', '+')}")
    link = WebDriverWait(browser, 60).until(lambda b: b.find_elements("css selector", ".md-search-result__link"))[0]
    return " ".join((link.get_attribute("textContent") or "").split()), link.get_attribute("href")


def problems_in_a_browser(site):
    with served(site) as address:
        browser = headless()
        try:
            for words, page in SEARCHES.items():
                text, leads_to = first_result(browser, address, words)
                print(f"'{words}' finds {leads_to.removeprefix(address)}: {text[:100]}")
                if not leads_to.startswith(address + page):
                    yield f"a search for '{words}' leads to {leads_to}, not to {page}"
            requests = asked_for(browser)
        finally:
            browser.quit()
        print(f"{len(requests)} requests, to", *{re.match(r"\w+:(//[^/]+)?", url)[0] for url in requests})
        if not any(url.startswith(address) for url in requests):
            yield "the browser's log holds no request: nothing was checked"
        yield from (f"a page asked for {url}" for url in requests if not url.startswith((address, "data:", "blob:")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--browse", action="store_true", help="in a headless Chromium too")
    arguments = parser.parse_args()
    found = [*problems_of_readme(arguments.site), *problems_of_pages(arguments.site)]
    if arguments.browse:
        found += problems_in_a_browser(arguments.site)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"site: {len(found)} problems" if found else "site: good")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
