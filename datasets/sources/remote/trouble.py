"""What went wrong with a server, in words without credentials, whether it is worth another try, and what to do."""

import errno
from typing import NamedTuple

from utils.text import redacted

# Classes of aiohttp, botocore and ssl by their names: none of these is imported for the other.
NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
NO_CONNECTION = {"ClientConnectorError", "EndpointConnectionError", "gaierror", "ConnectionRefusedError"}
NO_TRUST = {"ClientSSLError", "ClientConnectorCertificateError", "SSLError", "SSLCertVerificationError"}
TRANSIENT_STATUS = {408, 421, 425, 429}  # of those below 500
# What s3fs makes of answers that no other try changes: another region, a malformed request or name.
LASTING_ERRNO = {errno.EINVAL, errno.ENAMETOOLONG, errno.EPERM, getattr(errno, "EREMCHG", errno.EINVAL)}


class ShortAnswerError(Exception):
    """A server sent fewer bytes than were asked of it."""


class Trouble(NamedTuple):
    """A failed request."""

    words: str
    remedy: str
    lasts: bool = True  # another try would fail as well
    no_connection: bool = False


def judge(error: BaseException, scheme: str) -> Trouble:
    """What a library's error means."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec calls each failure to get the size of a file this
    names = {each.__name__ for each in type(error).__mro__}
    status = getattr(error, "status", None)
    words = redacted(f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " "))
    if names & NO_CREDENTIALS:
        return Trouble("there are no credentials for it", _credentials(scheme))
    if isinstance(error, PermissionError) or status in (401, 403):
        reason = f"{status} {error.message}" if status else str(error)
        return Trouble(f"access is denied ({redacted(reason)})", _credentials(scheme))
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return Trouble(
            "it is not there", "check the name in DATA.DATA_PATH (-data_path), and that nobody is moving files"
        )
    if names & NO_TRUST:
        return Trouble(
            f"no secure connection ({words})", "check the address, and SSL_CERT_FILE where a company has its own"
        )
    if names & NO_CONNECTION:
        remedy = "check the host in DATA.DATA_PATH (for S3 also AWS_ENDPOINT_URL), the network, and HTTPS_PROXY behind a proxy"
        return Trouble(f"no connection ({words})", remedy, lasts=False, no_connection=True)
    if status is not None:
        again = status >= 500 or status in TRANSIENT_STATUS
        return Trouble(
            f"the server answers {status} {redacted(str(error.message))}", "check the server", lasts=not again
        )
    if scheme == "s3" and isinstance(error, OSError) and error.errno in LASTING_ERRNO:
        return Trouble(words, "check the bucket's name, and its region in AWS_DEFAULT_REGION")
    lasts = isinstance(error, ValueError | TypeError) or names & {"ParamValidationError", "InvalidURL"}
    return Trouble(words, "check the server and the network", lasts=bool(lasts))


def _credentials(scheme: str) -> str:
    if scheme == "s3":
        return (
            "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, of one who may list and read it; for a "
            "public bucket FSSPEC_S3_ANON=true"
        )
    return "if it needs a password, put it into the file ~/.netrc; if not, ask who runs the server"
