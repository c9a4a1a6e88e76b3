"""Pure. The source checkpoint as planning sees it: global tensors, and the pieces of them that each part holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.checkpoint import FlatParameter, ModelConfig
from tasks.family import Family
from tasks.layout import GlobalTensor, Mesh, SliceLayout
from tasks.storage import FileIdentity


@dataclass(frozen=True, slots=True)
class Padding:
    """Filler in a source file, which must be zeros where its place was inferred."""

    file: int
    offset_bytes: int
    length_bytes: int
    tensor: str


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerLayout:
    """Which of the optimizer's ids stands for which parameters, the same in all files."""

    ids: Mapping[str, int]
    "name of a parameter as it stands in the files -> id"
    groups: Mapping[int, int]
    "id -> number of its group in `param_groups`"
    with_state: frozenset[int]
    "ids that have state; the optimizer makes it at a parameter's first step"
    scalars: Mapping[int, tuple[tuple[str, str], ...]]
    "id -> (step and the like, what stands for its value)"
    num_groups: int
    holders: tuple[int, ...]
    "for each model-parallel part, the number of the first file that holds its state"
    scaled: bool
    "moments have factors of their own (`--fp16-adam-stats`)"


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Everything known of a source checkpoint. Small: no column grows with the number of elements."""

    family: Family
    mesh: Mesh
    files: tuple[FileIdentity, ...]
    "by number; the first mesh.mp * mesh.dp stand in order of (mp, dp)"
    file_ranks: tuple[tuple[int, int], ...]
    "(mp, dp) of each file"
    tensors: Mapping[str, GlobalTensor]
    "by name; fused tensors apart"
    entries: tuple[str, ...]
    "names as they stand in the files, fused or not, in order of the modules"
    slices: tuple[SliceLayout, ...]
    "by model-parallel rank"
    flat_parameters: tuple[FlatParameter, ...]
    "as stated or inferred; empty where the files are not flat and say nothing"
    flat: bool
    inferred: bool
    ties: tuple[tuple[str, str], ...]
    "(name, name of the tensor that repeats it)"
    untested_ties: tuple[tuple[str, str], ...]
    "ties between two stored copies: their bytes must be equal"
    paddings: tuple[Padding, ...]
    "filler to be tested for zeros"
    config: ModelConfig | None
    proven_equal: frozenset[str] = frozenset()
    "tensors whose copies the index has shown to be equal: nothing needs to be read"
    state_tensors: Mapping[str, GlobalTensor] = field(default_factory=dict)
    "moments and averages, by `layout.state_key`"
    moments: tuple[str, ...] = ()
    "states of the optimizer that have an element for each of a parameter's"
    averages: tuple[str, ...] = ()
    "keys of extra_state that hold averages of the weights"
    optimizer: OptimizerLayout | None = None
    dropped: tuple[str, ...] = ()
    "names of what the files hold and no target gets"

    def file_number(self, mp: int, dp: int) -> int:
        """Return the number of the first file of a rank."""
        return self.file_ranks.index((mp, dp))
