"""What the configuration was, and what changed between two starts of a run. Pure.

The configuration of the last start is in config.json, and configs.jsonl has a line for each start that had another one
than the start before. Nothing of the environment is in them; what a key itself may hold, a password in a URL for one,
is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan_lite.config.drift import Change, rule_of
from torchtitan_lite.config.job_config import flat_config
from torchtitan_lite.report.lines import number_or_nan
from torchtitan_lite.report.starts import ReportedStart

HIDDEN = "(hidden)"
_SECRET_KEY = re.compile(
    r"passw|secret|credential|private_key|api_?key|access_?key|auth|_token$|[.](token|key)$", re.IGNORECASE
)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_IN_QUERY = re.compile(
    r"([?&][^=&\s]*(?:token|signature|credential|secret|key|sig)[^=&\s]*=)[^&\s]+", re.IGNORECASE
)

Config = Mapping[str, Any]
"""Values by section.key."""


def without_secret_values(config: object) -> dict[str, Any]:
    """Return the values of a configuration by `section.key`, secrets hidden; none of what is not one."""
    values = flat_config(config) if isinstance(config, dict) else {}
    return {key: HIDDEN if _SECRET_KEY.search(key) and value else value for key, value in values.items()}


def shown_on_page(value: Any) -> str:
    """Return `value` as the page shows it, without the login and the signature of a URL in it."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = "true" if value is True else "false" if value is False else "" if value is None else str(value)
    return _SECRET_IN_QUERY.sub(rf"\1{HIDDEN}", _LOGIN_IN_URL.sub(f"{HIDDEN}@", text)) or "(none)"


def configs_of(starts: Sequence[ReportedStart], lines: Iterable[Mapping[str, Any]], last: Config) -> dict[int, Config]:
    """Return the configuration of each start that is known, by its number.

    `lines` are those of configs.jsonl, in their order; `last` is the configuration of the last start.
    """
    found: dict[int, Config] = {}
    written = [(number_or_nan(line.get("time")), without_secret_values(line.get("config"))) for line in lines]
    for start in starts:
        # A start writes its line before the first sign of the next one, and a start without a line has the last one's.
        until = [config for time, config in written if time <= start.last_sign and config]
        if until:
            found[start.number] = until[-1]
    if starts and last:
        found[starts[-1].number] = last
    return found


def differences(before: Config, now: Config) -> list[Change]:
    """Return the keys whose values differ, in the order of `now`; a key that one of them lacks is not compared."""
    return [
        Change(key, shown_on_page(before[key]), shown_on_page(value), rule_of(key))
        for key, value in now.items()
        if key in before and shown_on_page(before[key]) != shown_on_page(value)
    ]
