"""The log of a command: text or JSON, set up once or again, and never over a log that others have set up."""

from __future__ import annotations

import json
import logging
import sys

from pdlink.observability.logs import JsonFormatter
from tests import processes


def record(text: str, *values: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("pdlink.decode", logging.WARNING, "file.py", 3, text, values, None)
    made.__dict__.update(more)
    return made


def test_a_record_is_one_json_object_with_its_fields() -> None:
    text = JsonFormatter().format(record("moved %d\nbytes", 5, pdlink={"num_bytes": 5, "peers": ("a",), "level": "x"}))
    assert "\n" not in text
    said = json.loads(text)
    assert said.pop("time").endswith("+00:00")
    assert said == {
        "level": "warning",
        "logger": "pdlink.decode",
        "message": "moved 5\nbytes",
        "num_bytes": 5,
        "peers": ["a"],
    }


def test_a_traceback_is_a_member_of_its_object() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    said = json.loads(JsonFormatter().format(made))
    assert said["traceback"].endswith("ValueError: no")


SET_UP = """
import logging
from pdlink.observability.logs import set_up
{before}
set_up("warning")
set_up("info", "json")
logging.getLogger("pdlink.x").info("said %d", 1)
"""


def lines(before: str = "") -> list[str]:
    command = [sys.executable, "-c", SET_UP.format(before=before)]
    return processes.run(command, check=True).stderr.splitlines()


def test_setting_up_again_replaces_what_was_set_up() -> None:
    (line,) = lines()
    assert json.loads(line)["message"] == "said 1"


def test_a_log_that_the_process_has_set_up_is_left_alone() -> None:
    assert lines("logging.basicConfig(level='INFO', format='theirs %(message)s')") == ["theirs said 1"]
