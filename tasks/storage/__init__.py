"""Bytes on local disks, NFS, S3 and any other fsspec storage: exact reads, atomic writes.

    with open_reader(stat("s3://bucket/a.pt")) as reader:
        reader.read_into(0, memoryview(buffer))     # all of it, of that very file, or an error

Where is what: interface.py the promises, dispatch.py the functions, urls.py names; local*.py, s3*.py, generic.py the
backends; retry.py how often. Bit flips between a store and here are not noticed: digests are the callers'.
"""

from tasks.storage.dispatch import (
    buffered_bytes,
    create_only,
    delete,
    exists,
    glob_files,
    leftovers,
    list_files,
    make_directory,
    open_reader,
    open_writer,
    read_small,
    stat,
    write_small,
)
from tasks.storage.interface import Backend, ByteReader, FileIdentity, ListedFile, TargetWriter
from tasks.storage.problems import TransientStorageError
from tasks.storage.urls import basename, is_local, join, normalise, parent

__all__ = [
    "Backend",
    "ByteReader",
    "FileIdentity",
    "ListedFile",
    "TargetWriter",
    "TransientStorageError",
    "basename",
    "buffered_bytes",
    "create_only",
    "delete",
    "exists",
    "glob_files",
    "is_local",
    "join",
    "leftovers",
    "list_files",
    "make_directory",
    "normalise",
    "open_reader",
    "open_writer",
    "parent",
    "read_small",
    "stat",
    "write_small",
]
