"""The classes of a structured configuration, as metaseq's are; the files beside this one name them."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, List, Optional, Union  # noqa: UP035


class Backend(Enum):
    NCCL = "nccl"
    GLOO = "gloo"


@dataclass
class CheckpointConfig:
    save_dir: str = "checkpoints"
    checkpoint_suffix: str = ""
    # An interpolated copy, and a plain one with a type of its own.
    model_parallel_size: Any = "${common.model_parallel_size}"
    finetune_from_model: Optional[str] = None  # noqa: UP045
    keep_last_updates: int = -1


@dataclass
class DistributedConfig:
    distributed_world_size: int = 2
    distributed_rank: Optional[int] = 0  # noqa: UP045
    distributed_backend: Backend = Backend.NCCL
    use_sharded_state: bool = True
    device_id: int = 0
    ports: List[int] = None  # type: ignore[assignment]  # noqa: UP006


@dataclass
class UnionConfig:
    model_parallel_size: Union[int, str] = 2  # noqa: UP007
    use_sharded_state: Union[bool, int] = True  # noqa: UP007
