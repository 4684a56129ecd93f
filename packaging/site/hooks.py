# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: documents of the repository's root are pages too, and links to sources lead to the repository."""
import pathlib
import posixpath
import sys

from mkdocs.structure.files import File

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import links

SOURCE = links.addresses().get("source", "https://source.invalid/")  # .invalid: a name that never resolves (RFC 2606)
DOCUMENT_OF = {page: document for document, page in links.PAGES.items()}


def on_files(files, config):
    for document, page in links.PAGES.items():
        files.append(File.generated(config, page, content=(links.ROOT / document).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    folder = posixpath.dirname(here) or "."
    return links.lead(markdown, DOCUMENT_OF.get(here, f"docs/{here}"),
                      lambda goal, anchor: posixpath.relpath(goal, folder) + anchor,
                      lambda path, anchor: SOURCE + path + anchor)
