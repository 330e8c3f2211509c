"""What went wrong with a server, in words without credentials, whether it is worth another try, and what to do."""

import errno
from typing import NamedTuple

from utils.errors import DataError
from utils.text import redacted

# Classes of aiohttp, botocore and ssl by their names: none of these is imported for the other.
NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
NO_CREDENTIALS |= {"SSOError", "TokenRetrievalError", "ConfigParseError", "ConfigNotFound", "InvalidConfigError"}
NO_CONNECTION = {"ClientConnectorError", "EndpointConnectionError", "gaierror", "ConnectionRefusedError"}
NO_TRUST = {"ClientSSLError", "ClientConnectorCertificateError", "SSLError", "SSLCertVerificationError"}
MALFORMED = {"ParamValidationError", "InvalidURL", "ValueError", "RecursionError"}  # the last: of endless redirects
TRANSIENT_STATUS = {408, 421, 425, 429}  # of those below 500
# What s3fs makes of answers that no other try changes: another region, a malformed request or name.
LASTING_ERRNO = {errno.EINVAL, errno.ENAMETOOLONG, errno.EPERM, getattr(errno, "EREMCHG", errno.EINVAL)}


class ShortAnswerError(Exception):
    """A server sent fewer bytes than were asked of it."""


class NotThereError(DataError):
    """There is no such file or folder."""


class DeniedError(DataError):
    """It may not be read."""


class Trouble(NamedTuple):
    """A failed request."""

    words: str
    remedy: str
    lasts: bool = True  # another try would fail as well
    no_connection: bool = False
    kind: type[DataError] = DataError  # to raise


def judge(error: BaseException, scheme: str) -> Trouble:
    """What a library's error means."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec calls each failure to get the size of a file this
    names, status = {each.__name__ for each in type(error).__mro__}, _status_of(error)
    words = redacted(f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " "))
    if names & NO_CREDENTIALS:
        return Trouble(f"there are no credentials for it ({words})", _credentials(scheme), kind=DeniedError)
    if isinstance(error, PermissionError) or status in (401, 403):
        return Trouble(f"access is denied ({words})", _credentials(scheme), kind=DeniedError)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        remedy = "check the names in DATA.DATA_PATH (-data_path), and that it is still there"
        return Trouble(f"it is not there ({words})", remedy, kind=NotThereError)
    if names & NO_TRUST:
        return Trouble(
            f"no secure connection ({words})", "check the address, and SSL_CERT_FILE where a company has its own"
        )
    if names & NO_CONNECTION:
        remedy = "check the host in DATA.DATA_PATH (for S3 also AWS_ENDPOINT_URL), the network, and HTTPS_PROXY behind a proxy"
        return Trouble(f"no connection ({words})", remedy, lasts=False, no_connection=True)
    is_refused = status is not None and status < 500 and status not in TRANSIENT_STATUS
    if is_refused or isinstance(error, OSError) and error.errno in LASTING_ERRNO or names & MALFORMED:
        remedy = (
            "check the bucket's name, and its region in AWS_DEFAULT_REGION" if scheme == "s3" else "check the address"
        )
        return Trouble(words, remedy)
    return Trouble(words, "check the server and the network", lasts=False)


def _status_of(error: BaseException) -> int | None:
    """The status that a server answered with, as aiohttp and botocore say it."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(error, "status", None)


def _credentials(scheme: str) -> str:
    if scheme == "s3":
        return (
            "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, of one who may list and read it; for a "
            "public bucket FSSPEC_S3_ANON=true"
        )
    return "if it needs a password, put it into the file ~/.netrc; if not, ask who runs the server"
