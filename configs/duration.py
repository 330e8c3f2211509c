"""Parses durations such as 3h30m."""

import re

_NUMBER = r"(\d+(?:\.\d+)?)"
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FORM = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in _UNITS))


def to_seconds(text: str) -> float | None:
    """Seconds of "3h30m", "90m", "1.5h" or "5400"; None if the text is not a duration."""
    text = text.strip().lower()
    if re.fullmatch(_NUMBER, text):
        return float(text)
    match = _FORM.fullmatch(text)
    if not text or not match:
        return None
    return sum(float(number or 0) * unit for number, unit in zip(match.groups(), _UNITS.values(), strict=True))
