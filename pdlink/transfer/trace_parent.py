"""Owns the text of a W3C trace context (`traceparent`) that travels with a request. It starts and ends no span.

Source: W3C Trace Context, section 3.2. What is no such text is dropped, as that says: a trace must fail no request.
"""

from __future__ import annotations

import re

_TEXT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
MAX_CHARS = 55


def clean(text: str) -> str:
    """`text` where it is a trace context of the four fields that every version has, else nothing."""
    return text if len(text) <= MAX_CHARS and _TEXT.fullmatch(text) else ""
