"""Bytes on local disks, NFS, S3 and any other fsspec storage: exact reads, atomic writes."""
