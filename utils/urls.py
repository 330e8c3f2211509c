"""URLs of data: recognising them, and keeping credentials out of whatever is printed or written."""

import re
from urllib.parse import urlsplit

SCHEMES = ("http", "https", "s3")


def is_url(path: str) -> bool:
    return "://" in path


def problem_of(url: str) -> str | None:
    """Why a URL is not accepted as the place of data, without quoting it; None if it is."""
    try:
        parts = urlsplit(url)
        user, host = parts.username or parts.password, parts.hostname
        _ = parts.port
    except ValueError:
        return "is not a valid URL"
    if parts.scheme.lower() not in SCHEMES:
        return f"must be a folder, or a URL of {', '.join(f'{each}://' for each in SCHEMES)}"
    remedy = "environment (AWS_PROFILE or AWS_ACCESS_KEY_ID, ...)" if parts.scheme == "s3" else "file ~/.netrc"
    if user:
        return f"contains a user or password, which would be written to the run's files; put them into the {remedy}"
    if parts.query or parts.fragment:
        return (
            "contains a query (what follows ? or #), such as the signature of a signed URL, which would be written to the "
            f"run's files; leave it out, and put credentials into the {remedy}"
        )
    return None if host else "names no server or bucket"


def redacted(text: str) -> str:
    """The text without what may be credentials in its URLs, or a key of AWS."""
    text = re.sub(r"(\w+://)[^/\s'\"]*@", r"\1***@", text)
    text = re.sub(r"(\w+://[^\s'\"?#]*)[?#][^\s'\")]*", r"\1?***", text)
    return re.sub(r"\b(AKIA|ASIA)[0-9A-Z]{12,}", r"\1***", text)
