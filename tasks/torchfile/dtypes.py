"""Pure: element types, the legacy storage classes that name them in a checkpoint, and their sizes.

Does not know what a value looks like: this package moves bytes. A type without a storage class of its own (``float8``,
``uint16``) lies in an ``UntypedStorage`` and is named beside the tensor.

>>> DTYPE_OF_STORAGE_TYPE["HalfStorage"], ITEM_SIZE_BYTES["float16"]
('float16', 2)
"""

from __future__ import annotations

UNTYPED_STORAGE = "UntypedStorage"

# The list is closed: torch names every later type with a torch.dtype beside an untyped storage.
DTYPE_OF_STORAGE_TYPE = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    UNTYPED_STORAGE: "",
}

STORAGE_TYPE_OF_DTYPE = {dtype: storage_type for storage_type, dtype in DTYPE_OF_STORAGE_TYPE.items()}

# Types that only an untyped storage holds.
UNTYPED_DTYPES = {
    "float8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2fnuz": 1,
    "float8_e4m3fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "complex32": 4,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}

ITEM_SIZE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "bfloat16": 2,
    "complex128": 16,
    "complex64": 8,
    "qint8": 1,
    "qint32": 4,
    "quint8": 1,
    "quint4x2": 1,
    "quint2x4": 1,
    "": 1,
    **UNTYPED_DTYPES,
}


def storage_type_of(dtype: str) -> str:
    """Name the storage class that holds a type: ``storage_type_of("float16") == "HalfStorage"``."""
    return STORAGE_TYPE_OF_DTYPE.get(dtype, UNTYPED_STORAGE)
