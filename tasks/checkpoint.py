"""Pure. What one source file holds, as the unflatten task hands it on: small values, never tensor bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.errors import Problem
from tasks.storage import FileIdentity


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the `model` dict, and where its bytes stand."""

    name: str
    "as in the file, without wrapper modules"
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    "of its first element in the file"
    storage: str
    "key of its storage in the file: tensors of one storage are views of it"
    storage_offset: int
    "in elements"
    crc32: int | None = None
    "as the file states it, where the tensor is the whole of its storage"


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """One flat parameter as `shard_metadata` describes it; shared by all files of a model-parallel part."""

    path: str
    "of the FSDP unit in the model; empty for the root"
    key: str
    "of the flat parameter in the `model` dict"
    names: tuple[str, ...]
    "of the parameters glued in it, in order, relative to the unit"
    shapes: tuple[tuple[int, ...], ...]
    no_broadcast: bool = False

    def full_names(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{name}" if self.path else name for name in self.names)


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """`shard_metadata` without the padding, which each file has of its own."""

    flat_parameters: tuple[FlatParameter, ...]
    shared: tuple[tuple[str, str], ...]
    "(name, name of the parameter tied to it), in full"
    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What `cfg` (or the older `args`) says of the model; None where it is silent."""

    mp: int | None = None
    world_size: int | None = None
    layers: int | None = None
    embed_dim: int | None = None
    ffn_dim: int | None = None
    heads: int | None = None
    positions: int | None = None
    vocabulary: int | None = None
    "the dictionary's size, without the padding that the trainer adds"
    arch: str = ""
    activation: str = "relu"
    ties_embeddings: bool | None = None
    learned_positions: bool = True
    no_bias: bool = False
    no_final_norm: bool = False
    inner_norms: bool = False
    "normformer's norm between the feed-forward layers (`scale_fc`)"
    input_dim: int | None = None
    "of the token embedding, where it is projected"
    output_dim: int | None = None
    no_affine_norms: bool = False
    block_layers: int = 1
    "layers in one FSDP unit (`fsdp_checkpoint_wrap_layer_frequency`)"
    min_params_to_wrap: int | None = None
    checkpoints_activations: bool = False


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of the file that is training state, or that is neither weights nor state but holds tensors."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The optimizer's state of one parameter: of a flat one, or of a named one where the state is not sharded."""

    number: int
    "the optimizer's id of the parameter"
    moments: tuple[tuple[str, StoredTensor], ...]
    "(exp_avg and the like, where it stands)"
    scalars: tuple[tuple[str, str], ...]
    "(step and the like, what stands for its value when files are compared)"
    scales: tuple[tuple[str, float], ...] = ()
    "(moment, the factor that its stored numbers are to be multiplied by)"


@dataclass(frozen=True, slots=True)
class OptimizerIndex:
    """`last_optimizer_state` of one file."""

    parameters: tuple[ParameterState, ...]
    groups: tuple[tuple[int, ...], ...]
    "ids of the parameters of each of `param_groups`"
    id_map: tuple[tuple[int, int | None], ...] | None = None
    "(id of a named parameter, id of its flat one): there where the state is unsharded (fairscale `param_id_map`)"
    names: tuple[tuple[int, str], ...] = ()
    "of the named parameters, where the file states them (this tool's own files do)"


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """All that planning needs to know of one source file."""

    identity: FileIdentity
    mp: int
    dp: int
    tensors: tuple[StoredTensor, ...] = ()
    metadata: ShardMetadata | None = None
    paddings: tuple[int, ...] = ()
    "for each of the metadata's flat parameters, the elements of filler at the end of this file's shard"
    config: ModelConfig | None = None
    keys: tuple[str, ...] = ()
    "of the top level; empty for a bare state dict"
    training_state: tuple[StatePart, ...] = ()
    other_tensors: tuple[StatePart, ...] = ()
    optimizer: OptimizerIndex | None = None
    averages: tuple[tuple[str, tuple[StoredTensor, ...]], ...] = ()
    "moving averages of the weights: (key in extra_state, its tensors)"
    bytes_read: int = 0
    num_requests: int = 0
    problems: tuple[Problem, ...] = field(default=())
    state_problems: tuple[Problem, ...] = ()
    "of the training state alone"

    @property
    def label(self) -> str:
        return f"{self.identity.url} (mp={self.mp}, dp={self.dp})"
