"""Check a built site: each link and picture within it has its file, and each #anchor its element.

Links to other sites are counted and not followed.
"""

import argparse
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {x for x in (values.get("id"), values.get("name")) if x}
        self.links |= {x for x in (values.get("href"), values.get("src")) if x}


def check_site(root: Path) -> tuple[int, int, list[str]]:
    """Return the numbers of links within the site and to other sites, and the broken ones."""
    pages = {path.resolve(): Page(path) for path in root.rglob("*.html")}
    inside, outside, broken = 0, 0, list[str]()
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside += parts.scheme != "data"
                continue
            inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment) if target in pages else ""
            if not target.exists() or (anchor and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(root.resolve())}: {link}")
    return inside, outside, broken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    inside, outside, broken = check_site(parser.parse_args().site)
    print(*broken, sep="\n", end="\n" if broken else "")
    print(f"{inside} links followed, {len(broken)} broken; {outside} to other sites not followed")
    sys.exit(bool(broken))
