"""Owns how tests ask over HTTP: an answer's status and body, and the samples of a scrape."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pdlink.address import Address

PATIENCE_S = 60.0


def ask(address: Address, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def probe(address: Address, path: str) -> tuple[int, Any]:
    status, body = ask(address, path)
    return status, json.loads(body)


class Scrape:
    """One scrape, by name and labels."""

    def __init__(self, address: Address) -> None:
        status, self.text = ask(address, "/metrics")
        assert status == 200
        self.samples = [one for family in text_string_to_metric_families(self.text) for one in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples of that name with these labels among theirs."""
        return sum(one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items())
