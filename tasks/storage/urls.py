"""Names of files, as local paths or URLs. Nothing here looks at storage.

>>> join("s3://bucket/run", "part 1.pt")
's3://bucket/run/part 1.pt'
>>> parent("s3://bucket/run/part 1.pt"), basename("/data/a.pt")
('s3://bucket/run', 'a.pt')
"""

from __future__ import annotations

import os.path

from tasks.errors import ErrorKind, error

_LOCAL_PREFIXES = ("file://", "local://")
_S3_PROTOCOLS = ("s3", "s3a")


def protocol(url: str) -> str:
    """Return the protocol; "file" for a plain path.

    >>> protocol("/data/a.pt"), protocol("file:///data/a.pt"), protocol("s3a://bucket/a.pt")
    ('file', 'file', 's3')
    """
    if is_local(url):
        return "file"
    name = url.split("://", 1)[0]
    return "s3" if name in _S3_PROTOCOLS else name


def is_local(url: str) -> bool:
    """Tell whether this is a path of the local file system, which includes every mounted one."""
    return "://" not in url or url.startswith(_LOCAL_PREFIXES)


def normalise(url: str) -> str:
    """Return the one form of the name which is compared, stored and shown.

    >>> normalise("file:///data/run/"), normalise("/data/./run"), normalise("s3a://bucket/run/")
    ('/data/run', '/data/run', 's3://bucket/run')
    """
    if is_local(url):
        for prefix in _LOCAL_PREFIXES:
            url = url.removeprefix(prefix)
        if not url:
            raise error(ErrorKind.USAGE, "empty-name", "an empty name was given for a file or directory")
        return os.path.abspath(url)
    _refuse_credentials(url)
    head, path = url.split("://", 1)
    path = path.rstrip("/")
    if protocol(url) == "s3":
        head = "s3"
        if not path:
            raise error(ErrorKind.USAGE, "no-bucket", f"{url} names no bucket", hint="write s3://BUCKET/NAME")
    return f"{head}://{path}"


def join(url: str, *names: str) -> str:
    """Put names below a directory."""
    for name in names:
        url = f"{url.rstrip('/')}/{name}" if not url.endswith("://") else url + name
    return url


def basename(url: str) -> str:
    """Return the last component; empty for a root."""
    return _path(url).rpartition("/")[2]


def parent(url: str) -> str:
    """Return the directory; a root and a bucket are their own.

    >>> parent("/a"), parent("s3://bucket"), parent("memory://a")
    ('/', 's3://bucket', 'memory://')
    """
    path = _path(url)
    head = url[: len(url) - len(path)]
    above, slash, _ = path.rpartition("/")
    if is_local(url):
        return head + (above or slash)
    if not slash:
        return url if protocol(url) == "s3" else head
    return head + above


def _path(url: str) -> str:
    return url.split("://", 1)[-1]


def _refuse_credentials(url: str) -> None:
    """Raise if the URL carries a password or a signature: it would end in plans and logs. Never shows it."""
    head, rest = url.split("://", 1)
    place, _, query = rest.partition("?")
    user, at, _ = place.split("/", 1)[0].rpartition("@")
    # Elsewhere a question mark may be a part of the name.
    signed = head.startswith("http") and any(word in query.lower() for word in ("signature=", "sig=", "token="))
    if (at and ":" in user) or signed:
        raise error(
            ErrorKind.USAGE,
            "credentials-in-url",
            f"a {head}:// URL carries credentials",
            hint="give them by the environment or by fsspec's configuration files, not in the URL",
        )
