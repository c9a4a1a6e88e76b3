"""Makes the training state of a target file: the source's own objects, with moments and averages made to fit.

A flat target's optimizer has an entry for each flat parameter, as sharded metaseq runs save it. An unflat target's
has one for each named parameter, in the form of fairscale's `gather_full_optim_state_dict` (`param_id_map`,
`uncollected_local_ids`), and besides `param_names` {id: name} and `tensor_numbers` {name: dtype}, so that nothing has
to be guessed when it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.formats.metaseq_state_reader import (
    ID_MAP_KEY,
    NAMES_KEY,
    OPTIMIZER_KEY,
    TENSOR_NUMBERS_KEY,
    holds_state,
    is_moment,
    is_scale,
)
from tasks.layout import state_key
from tasks.source import Source
from tasks.target import Entry, Slot, Target, Unit, fsdp_units
from tasks.target_checks import optimizer_id
from tasks.torchfile.objects import TensorRef

TensorOf = Callable[[int], TensorRef]
"Makes the tensor of a storage, by its number in the plan."
SingleCopy = Callable[[TensorRef], TensorRef]
"Makes a tensor with bytes of its own from one of the source."
NumberTensor = Callable[[str, float], TensorRef]
"Makes a tensor of one number, of a dtype."
NumberOf = Callable[[TensorRef], float]
"Reads the number of a tensor of one."


class StateMaker:
    """Makes one file's training state."""

    def __init__(
        self,
        source: Source,
        target: Target,
        tensor_of: TensorOf,
        single_copy: SingleCopy,
        number_tensor: NumberTensor,
        number_of: NumberOf,
        scales: Mapping[int, float],
    ) -> None:
        self._source = source
        self._target = target
        self._tensor_of = tensor_of
        self._single_copy = single_copy
        self._number_tensor = number_tensor
        self._number_of = number_of
        self._tensor_numbers: dict[str, str] = {}
        self._scales = scales
        self._numbers = {(slot.state, _name(slot)): number for number, slot in enumerate(target.slots)}

    def average(self, key: str, order: Sequence[str]) -> dict[str, TensorRef]:
        """Make a moving average of the weights: a dict like the model's, with the tensors that the source's had."""
        made = {name: self._tensor_of(self._numbers[key, name]) for name in order if (key, name) in self._numbers}
        if not self._target.options.flat:
            for name, repeated in self._target.ties:
                if name in made and self._repeats(key, repeated):
                    first = made[name]
                    made[repeated] = TensorRef(first.storage, 0, tuple(iter(first.shape)), tuple(iter(first.stride)))
        return made

    def _repeats(self, key: str, repeated: str) -> bool:
        """Tell whether a tied tensor stands under its second name too: as in the source, where that is unflat."""
        return not key or self._source.flat or state_key(key, repeated) in self._source.state_tensors

    def optimizer(self, held: dict[str, Any]) -> dict[str, Any]:
        """Make `last_optimizer_state` from that of a source file, which is changed in place."""
        flat = self._target.options.flat
        units = self._target.units if flat else fsdp_units_of(self._source, self._target)
        things: list[tuple[str, Entry, int]] = []
        for local, unit in enumerate(units):
            if flat:
                things.append((unit.key, unit.entries[0], local))
            else:
                things += [(entry.name, entry, local) for entry in unit.entries]
        self._tensor_numbers = dict(held.get(TENSOR_NUMBERS_KEY, {}))
        states = {}
        for number, (name, entry, _) in enumerate(things):
            old = optimizer_id(self._source, entry.members[0])
            if old in held["state"]:
                states[number] = self._entry(name, held["state"][old])
        groups = [
            {**group, "params": [n for n, (_, entry, _) in enumerate(things) if self._group(entry) == position]}
            for position, group in enumerate(held["param_groups"])
        ]
        made = {**held, "state": states, "param_groups": groups}
        for key in (ID_MAP_KEY, NAMES_KEY, TENSOR_NUMBERS_KEY, "uncollected_local_ids"):
            made.pop(key, None)
        if not flat:
            with_state = {local for number, (_, _, local) in enumerate(things) if number in states}
            made[ID_MAP_KEY] = {n: local if local in with_state else None for n, (_, _, local) in enumerate(things)}
            made["uncollected_local_ids"] = []
            made[NAMES_KEY] = {number: name for number, (name, _, _) in enumerate(things)}
            if self._tensor_numbers:
                made[TENSOR_NUMBERS_KEY] = self._tensor_numbers
        return made

    def _group(self, entry: Entry) -> int:
        old = optimizer_id(self._source, entry.members[0])
        return 0 if old is None or self._source.optimizer is None else self._source.optimizer.groups[old]

    def _entry(self, name: str, old: Mapping[str, Any]) -> dict[str, Any]:
        """Make the state of one parameter, in the order of the source's."""
        made: dict[str, Any] = {}
        for key, item in old.items():
            if is_moment(key, item):
                made[key] = self._tensor_of(self._numbers[key, name])
            elif is_scale(key, old):
                moment = key.removesuffix("_scale")
                if self._target.options.moments_dtype:
                    continue  # the numbers have taken it up
                scale = self._scales.get(self._numbers[moment, name], 1.0)
                made[key] = self._number_tensor(item.dtype, scale) if isinstance(item, TensorRef) else scale
            elif isinstance(item, TensorRef) and self._target.options.flat:
                # Optimizers count steps in place: two parameters must never share a step's bytes.
                made[key] = self._single_copy(item)
            elif isinstance(item, TensorRef):
                self._tensor_numbers[key] = item.dtype
                made[key] = self._number_of(item)
            elif key in self._tensor_numbers and self._target.options.flat:
                made[key] = self._number_tensor(self._tensor_numbers[key], item)
            else:
                made[key] = item
        return made


def fsdp_units_of(source: Source, target: Target) -> tuple[Unit, ...]:
    """Return the units in which the trainer would hold the parameters of an unflat target: they order the ids."""
    by_member = {member: entry for entry in target.named for member in entry.members}
    units = []
    for unit in fsdp_units(source):
        entries = dict.fromkeys(by_member[member] for entry in unit.entries for member in entry.members)
        units.append(Unit(unit.path, unit.key, tuple(entries)))
    return tuple(units)


def holds_optimizer(root: object) -> bool:
    """Tell files that hold the optimizer's state from those of ranks that left it to another."""
    return isinstance(root, dict) and holds_state(root.get(OPTIMIZER_KEY))


def _name(slot: Slot) -> str:
    return slot.unit.key if slot.unit else slot.entries[0].name
