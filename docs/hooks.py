"""Hooks of the site: links of notebooks, and a check of all links."""

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

log = logging.getLogger("mkdocs.hooks")  # whose warnings end a strict build


class Page(HTMLParser):
    """Anchors of a page, and what it links to or loads."""

    def __init__(self, file):
        super().__init__()
        self.anchors = {""}
        self.targets = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        """Note the anchor and the target of an element."""
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value)
            if name in ("href", "src"):
                self.targets.append(value)


def on_page_content(html, page, config, files):
    """Link from notebooks to pages, not to their Markdown."""
    if page.file.src_path.endswith(".ipynb"):
        html = re.sub(r'(href="[\w/-]+)\.md\b', r"\1.html", html)
    return html


def on_post_build(config):
    """Warn of links to files or anchors that are not in the site."""
    site = Path(config.site_dir).resolve()
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    for file, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            linked = (file.parent / unquote(url.path)).resolve() if url.path else file
            if url.scheme or url.netloc:
                continue  # of another site
            if not linked.is_file():
                log.warning(f"{file.relative_to(site)} links to {target}, which does not exist")
            elif linked in pages and unquote(url.fragment) not in pages[linked].anchors:
                log.warning(f"{file.relative_to(site)} links to {target}, an unknown anchor")
