"""The page's files: linked for the server, or all in one."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any

_SCRIPTS = ("dom.js", "source.js", "curves.js", "table.js", "episode.js", "page.js")
_STYLE = "page.css"
_HERE = "<!-- style and scripts -->"

STATIC = {f"static/{_STYLE}": "text/css"} | {f"static/{name}": "text/javascript" for name in _SCRIPTS}


@cache
def static_file(path: str) -> bytes:
    assert path in STATIC or path == "static/page.html"
    return resources.files("isotrain.tools.view").joinpath(path).read_bytes()


@cache
def linked_page() -> bytes:
    links = [f'<link rel="stylesheet" href="static/{_STYLE}">']
    links += [f'<script src="static/{name}" defer></script>' for name in _SCRIPTS]
    return _page("\n".join(links)).encode()


def whole_page(content: dict[str, Any]) -> bytes:
    """One file that loads nothing: the browser runs exactly these scripts, and no other."""
    style = static_file(f"static/{_STYLE}").decode()
    script = "\n".join(static_file(f"static/{name}").decode() for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # Inside a script element only these three could end it; in JSON they may be written as numbers.
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return _page(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="application/json" id="exported">{data}</script>\n',
        # Inline scripts cannot be deferred: this one stands behind what it works on.
        f"<script>{script}</script>\n",
    ).encode()


def _page(head: str, end: str = "") -> str:
    before, after = static_file("static/page.html").decode().split(_HERE)
    body, closing = after.split("</body>")
    return f"{before}{head}{body}{end}</body>{closing}"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
