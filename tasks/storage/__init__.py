"""Bytes on local disks, NFS, S3 and any other fsspec storage: exact reads, atomic writes.

    with open_reader(stat("s3://bucket/a.pt")) as reader:
        reader.read_into(0, memoryview(buffer))     # all of it, of that very file, or an error

Where is what: interface.py the promises, dispatch.py the functions, urls.py names; local*.py, s3*.py, generic.py the
backends; retry.py how often. Bit flips between a store and here are not noticed: digests are the callers'.
"""

from tasks.storage.dispatch import (
    buffered_bytes,
    checksum,
    create_only,
    delete,
    drop_pieces,
    exists,
    glob_files,
    holds,
    leftovers,
    list_files,
    make_directory,
    open_pieces,
    open_reader,
    open_writer,
    read_small,
    stat,
    unit_bytes,
    write_small,
)
from tasks.storage.interface import Backend, ByteReader, FileIdentity, ListedFile, PieceWriter, TargetWriter
from tasks.storage.patience import limited
from tasks.storage.problems import PiecesLostError, TransientStorageError
from tasks.storage.urls import basename, is_local, join, normalise, parent

__all__ = [
    "Backend",
    "ByteReader",
    "FileIdentity",
    "ListedFile",
    "PieceWriter",
    "PiecesLostError",
    "TargetWriter",
    "TransientStorageError",
    "basename",
    "buffered_bytes",
    "checksum",
    "create_only",
    "delete",
    "drop_pieces",
    "exists",
    "glob_files",
    "holds",
    "is_local",
    "join",
    "leftovers",
    "limited",
    "list_files",
    "make_directory",
    "normalise",
    "open_pieces",
    "open_reader",
    "open_writer",
    "parent",
    "read_small",
    "stat",
    "unit_bytes",
    "write_small",
]
