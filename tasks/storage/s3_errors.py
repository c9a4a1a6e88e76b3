"""From the answers of an S3 store to the errors of this program. No message here quotes what a store or client says
beyond its code, so none can carry a secret."""

from __future__ import annotations

import asyncio

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from tasks.errors import ErrorKind, error
from tasks.storage.problems import TransientStorageError, no_such_file
from tasks.storage.retry import ATTEMPTS

REQUEST_ERRORS = (
    OSError,  # what s3fs makes of error answers
    boto.BotoCoreError,
    boto.ClientError,
    boto.HTTPClientError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ResponseParserError,
)
_TRANSIENT_TYPES = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ConnectionError,
    ResponseParserError,  # a store which sheds load may send half an answer
)
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",  # the bytes were damaged on their way
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "XAmzContentSHA256Mismatch",
    }
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.TokenRetrievalError,
    boto.UnauthorizedSSOTokenError,
    boto.SSOTokenLoadError,
)


def facts(cause: BaseException) -> tuple[str, int]:
    """Return the error code and the HTTP status of a refused request; ("", 0) if no answer is behind the error."""
    link: BaseException | None = cause
    while link is not None:
        if isinstance(link, boto.ClientError):
            status = link.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(link.response.get("Error", {}).get("Code", "")), int(status)
        link = link.__cause__
    return "", 0


def is_transient(cause: BaseException) -> bool:
    """Tell whether the same request may do better later."""
    code, status = facts(cause)
    if code or status:
        return status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
    return isinstance(cause, _TRANSIENT_TYPES) and not isinstance(cause, _NO_CREDENTIALS)


def failure(cause: BaseException, url: str, kind: ErrorKind) -> Exception:
    """Make the error to raise for a request about `url` which will not be repeated."""
    code, status = facts(cause)
    story = f"{code} (HTTP status {status})" if status else type(cause).__name__
    if is_transient(cause):
        return TransientStorageError(f"{url}: {story} in {ATTEMPTS} attempts; check the store and AWS_ENDPOINT_URL")
    if isinstance(cause, _NO_CREDENTIALS):
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return error(kind, "no-credentials", f"{url}: no usable credentials were found: {story}", hint=hint)
    if code == "NoSuchBucket":
        hint = "check the name of the bucket and AWS_ENDPOINT_URL"
        return error(kind, "no-such-bucket", f"{url}: the bucket does not exist", hint=hint)
    if code in _EXPIRED:
        hint = "renew the credentials, then run the same command again; what is finished is kept"
        return error(kind, "expired-credentials", f"{url}: the credentials have expired: {story}", hint=hint)
    if status == 403:
        hint = (
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or AWS_PROFILE, and what they may do;"
            " a missing file looks the same to those who may not list the bucket"
        )
        return error(kind, "access-denied", f"{url}: the store denies access: {story}", hint=hint)
    if status == 404 and kind is ErrorKind.SOURCE:
        return no_such_file(url)
    hint = "check AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"
    return error(kind, "storage-refused", f"{url}: the store refuses the request: {story}", hint=hint)
