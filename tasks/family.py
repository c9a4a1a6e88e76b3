"""Pure. A family is a table of rules: how each tensor of one kind of model is cut over model-parallel parts.

Every tensor must match exactly one rule, and every role that a model cannot do without at least one tensor, or
nothing is planned. The order of the table is the order of the model's modules, which is the order in which FSDP
flattens them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tasks.errors import ErrorKind, Problem
from tasks.geometry import Box

# Wrapper modules that FSDP and activation checkpointing put into names; hooks normally strip them (fairscale
# `_clean_path`).
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_fpw_module"})

_LEGACY_NORM = re.compile(r"(.*ffn_layernorm)\.lns\.(\d+)\.(weight|bias)")


@lru_cache(maxsize=1 << 16)
def clean_name(name: str) -> str:
    """
    >>> clean_name("_fsdp_wrapped_module.decoder.layers.0._fpw_module.fc1.weight")
    'decoder.layers.0.fc1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def modern_name(name: str) -> str:
    """Return the name that a norm of old normformer runs (one for each part, in a list) has in the whole model.

    >>> modern_name("decoder.layers.0.ffn_layernorm.lns.1.bias")
    'decoder.layers.0.ffn_layernorm.bias'
    """
    return _LEGACY_NORM.sub(r"\1.\3", name)


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tensors whose names match are placed on the model-parallel axis."""

    pattern: str
    "regular expression for the whole name, or for the part after the layer's prefix"
    cut: int | None
    "the axis that is cut over the parts; None: the same on every part"
    per_layer: bool = True
    role: str = ""
    "what a model cannot do without; rules of one role stand in for each other"
    buffer: bool = False
    members: tuple[str, ...] = ()
    "templates of the names of the tensors that stand one after another in a fused one; {} is the pattern's group"
    member_of: str = ""
    "template of the name of the fused tensor that holds this one, where tensors are fused"
    tied_to: str = ""
    "the tensor that this one repeats, where the model ties them"
    unit: str = ""
    "what one step of the cut axis is, in words; 'head' where a cut must keep attention heads whole"


@dataclass(frozen=True)
class Family:
    """The rules of one kind of model."""

    name: str
    layer_pattern: str
    "matches the start of the names in a layer; its groups are the numbers that order layers"
    rules: tuple[Rule, ...]

    @cached_property
    def _layer(self) -> re.Pattern[str]:
        return re.compile(self.layer_pattern)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(rule.pattern) for rule in self.rules)

    @cached_property
    def _found(self) -> dict[tuple[bool, str], tuple[int, ...]]:
        """What `find` has found, by whether it is in a layer and the name there: layers are alike."""
        return {}

    @cached_property
    def _first_layer_rule(self) -> int:
        return next((index for index, rule in enumerate(self.rules) if rule.per_layer), len(self.rules))

    def split_layer(self, name: str) -> tuple[str, str, tuple[int, ...]]:
        """Return the layer's prefix (empty outside of layers), the rest of the name, and the layer's numbers."""
        match = self._layer.match(name)
        if match is None:
            return "", name, ()
        return match.group(0), name[match.end() :], tuple(int(group) for group in match.groups() if group)

    def find(self, name: str) -> tuple[int, ...]:
        """Return the indices of all rules that a clean name matches: exactly one, where all is well."""
        prefix, rest, _ = self.split_layer(name)
        found = self._found.get((bool(prefix), rest))
        if found is None:
            pairs = enumerate(zip(self.rules, self._patterns, strict=True))
            found = tuple(
                i for i, (rule, pattern) in pairs if rule.per_layer == bool(prefix) and pattern.fullmatch(rest)
            )
            self._found[bool(prefix), rest] = found
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return Family, (self.name, self.layer_pattern, self.rules)  # without what is cached

    def rule(self, name: str) -> Rule:
        """Return the one rule of a name that `check_names` has accepted."""
        return self.rules[self.find(name)[0]]

    def members(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that are fused in this one, in order, or the name itself.

        >>> from tasks.families.opt import OPT
        >>> OPT.members("decoder.layers.0.self_attn.qkv_proj.bias")[0]
        'decoder.layers.0.self_attn.k_proj.bias'
        """
        templates = self.rules[found[0]].members if (found := self.find(name)) else ()
        return tuple(self._fill(name, template) for template in templates) or (name,)

    def fused_name(self, name: str) -> str:
        """Return the name of the fused tensor that holds this one where tensors are fused, or ''."""
        template = self.rules[found[0]].member_of if (found := self.find(name)) else ""
        return self._fill(name, template) if template else ""

    def _fill(self, name: str, template: str) -> str:
        prefix, rest, _ = self.split_layer(name)
        match = self._patterns[self.find(name)[0]].fullmatch(rest)
        return prefix + template.format(*(match.groups() if match else ()))

    def order(self, name: str) -> tuple[int, ...]:
        """Return a sort key: the order of the model's modules."""
        _, _, numbers = self.split_layer(name)
        index = found[0] if (found := self.find(name)) else len(self.rules)
        # Fused or not, weight before bias of one module: the table has one rule for both.
        suffix = int(name.endswith("bias"))
        return (self._first_layer_rule, *numbers, index, suffix) if numbers else (index, suffix)

    def check_names(self, names: Iterable[str]) -> list[Problem]:
        """Refuse names that no rule or several rules match, and roles that no tensor takes."""
        found = {name: self.find(name) for name in names}
        problems = []
        if unmatched := sorted(name for name, rules in found.items() if not rules):
            problems.append(
                Problem(
                    ErrorKind.PLAN,
                    "unmatched-tensors",
                    f"{len(unmatched)} tensors match no rule of the family {self.name}: {some(unmatched)}",
                    hint="names are those of metaseq, as in decoder.layers.0.fc1.weight: rename them in the source",
                )
            )
        if doubly := sorted(name for name, rules in found.items() if len(rules) > 1):
            message = f"{len(doubly)} tensors match several rules of the family {self.name}: {some(doubly)}"
            problems.append(Problem(ErrorKind.PLAN, "ambiguous-rules", message, hint="rules must exclude each other"))
        taken = {self.rules[index].role for rules in found.values() for index in rules}
        missing = {rule.role: rule.pattern for rule in self.rules if rule.role and rule.role not in taken}
        if missing:
            listed = some([f"{role} ({pattern})" for role, pattern in missing.items()])
            problems.append(
                Problem(
                    ErrorKind.PLAN,
                    "unused-rules",
                    f"no tensor matches the rules of the family {self.name} for: {listed}",
                    hint="the checkpoint is incomplete, or of another family",
                )
            )
        return problems


def some(names: list[str], limit: int = 8) -> str:
    """Join names for a message; of many, the first few and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def local_box(shape: tuple[int, ...], cut: int | None, part: int, num_parts: int) -> Box:
    """Return the box of a global tensor that one model-parallel part holds.

    >>> local_box((8, 3), 0, 1, 4)
    Box(start=(2, 0), shape=(2, 3))
    """
    if cut is None:
        return Box((0,) * len(shape), shape)
    step = shape[cut] // num_parts
    start = tuple(part * step if dim == cut else 0 for dim in range(len(shape)))
    return Box(start, tuple(step if dim == cut else n for dim, n in enumerate(shape)))


def global_shape(local: tuple[int, ...], cut: int | None, num_parts: int) -> tuple[int, ...]:
    """Return the shape of the whole tensor from that of one part.

    >>> global_shape((2, 3), 0, 4)
    (8, 3)
    """
    return tuple(n * num_parts if dim == cut else n for dim, n in enumerate(local))
