# SPDX-License-Identifier: Apache-2.0
"""Metadata of the wheel that pyproject.toml leaves to the build (scikit-build-core calls it): on an index there are no
files beside README, so its links lead to the site and the repository, wherever packaging/addresses.txt says that
these are."""
import importlib.util
import pathlib


def links():
    path = pathlib.Path(__file__).with_name("links.py")
    spec = importlib.util.spec_from_file_location("kda_links", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dynamic_metadata(field, settings, project):
    found = links()
    known = found.addresses()
    if field == "readme":
        text = (found.ROOT / "README.md").read_text()
        if {"site", "source"} <= known.keys():
            text = found.on_the_site(text, "README.md", known["site"], known["source"])
        return {"content-type": "text/markdown", "text": text}
    if field == "urls":
        return {name: known[kind] + page for name, kind, page in
                (("Documentation", "site", ""), ("Changelog", "site", "changelog.html"), ("Source", "source", ""))
                if kind in known}
    raise ValueError(f"{field}: this provider knows readme and urls")
