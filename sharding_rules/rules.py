"""Which mesh axes each logical axis may use, in order of preference."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

BATCH = "batch"

Axes = tuple[str, ...]
Rule = None | str | tuple[str | Axes, ...]


class RulesError(ValueError):
    """The rules, the parameters and the mesh do not fit together; the message names both sides."""


class IndivisibleAxisError(ValueError):
    """A dimension does not divide over the mesh axes it has to use; the message says what would work."""


@dataclass(frozen=True)
class Parameter:
    """Names and shape of one parameter: all that a plan needs to know of it.

    Args:
      shape: Size of each dimension.
      axes: Logical name of each dimension, e.g. `("layers", "heads", "head_dim", "embed")`; None for one that is
        never divided.
      dtype: What it is held in on the device; decides its bytes.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: DTypeLike


class AxisRules(Mapping[str, Rule]):
    """Which mesh axes each logical axis may use: ordered, immutable, and complete.

    A rule is `None` (never divided), a mesh axis, or a tuple of alternatives in order of preference, an alternative
    being one mesh axis or a tuple of mesh axes used together::

        AxisRules(heads="model", mlp=(("fsdp", "model"), "model"), batch="data", embed=None)

    A name that is not listed is an error wherever it is used, so a typo never means "replicated". `batch` lists the
    mesh axes that the batch may use, all at once; it also gets what the weights leave of their own mesh axes.

    Where two dimensions of one parameter would land on one mesh axis, resolving raises `RulesError`: neither the
    order of the rules nor the order of the dimensions silently picks a winner. In activations the batch comes first:
    another dimension does not use a mesh axis that the batch uses (`embed="fsdp", batch="fsdp"` divides the kernels
    over fsdp, and in activations the batch).

    Raises:
      RulesError: A rule is not of that form.
    """

    def __init__(self, /, **rules: Rule) -> None:
        self._alternatives = {name: _parse(name, rule) for name, rule in rules.items()}
        self._rules = rules

    def __getitem__(self, name: str) -> Rule:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))

    def __repr__(self) -> str:
        return f"AxisRules({', '.join(f'{name}={rule!r}' for name, rule in self._rules.items())})"

    def replace(self, /, **rules: Rule) -> "AxisRules":
        """These rules with some of them changed or added."""
        return AxisRules(**{**self._rules, **rules})

    def for_mesh(self, mesh: Mesh | AbstractMesh) -> "AxisRules":
        """These rules without the alternatives that name mesh axes the mesh lacks.

        Resolving treats such a name as an error. This is the explicit way to use general rules (data and model) on a
        mesh that has fewer axes (model only).

        Raises:
          RulesError: The mesh has none of the mesh axes in the rules.
        """
        kept = {
            name: tuple(axes for axes in alternatives if set(axes) <= set(mesh.axis_names)) or None
            for name, alternatives in self._alternatives.items()
        }
        if not any(kept.values()) and any(self._alternatives.values()):
            raise RulesError(f"none of the rules' mesh axes is in the mesh ({describe_mesh(mesh)}): {self!r}")
        return AxisRules(**kept)

    def alternatives(self, name: str) -> tuple[Axes, ...]:
        """The mesh axes that a logical axis may use, in order of preference; empty where it is never divided."""
        return self._alternatives[name]

    def check_name(self, name: str, *, where: str) -> None:
        """Raise a RulesError, naming `where` and the nearest known name, for a name without a rule."""
        if name not in self._rules:
            raise RulesError(
                f"{where}: there is no rule for axis {name!r}{nearest(name, self) or '.'} "
                f"Name every axis in the rules; {name}=None means never divided."
            )

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise a RulesError for a rule naming a mesh axis that the mesh lacks."""
        for name, alternatives in self._alternatives.items():
            for axis in flatten(alternatives):
                if axis not in mesh.axis_names:
                    raise RulesError(
                        f"rule {name}={self[name]!r} names mesh axis {axis!r}, which the mesh ({describe_mesh(mesh)}) "
                        f"does not have{nearest(axis, mesh.axis_names) or '.'}"
                    )


def _parse(name: str, rule: Rule) -> tuple[Axes, ...]:
    entries = () if rule is None else (rule,) if isinstance(rule, str) else rule
    if not isinstance(entries, tuple):
        raise RulesError(f"rule {name}={rule!r} should be None, a mesh axis, or a tuple of alternatives")
    alternatives = tuple((entry,) if isinstance(entry, str) else entry for entry in entries)
    for axes in alternatives:
        if not isinstance(axes, tuple) or not axes or not all(isinstance(axis, str) for axis in axes):
            raise RulesError(f"rule {name}={rule!r}: an alternative is a mesh axis or a tuple of them, not {axes!r}")
        if len(set(axes)) < len(axes):
            raise RulesError(f"rule {name}={rule!r} names a mesh axis twice in one alternative")
    return alternatives


def flatten(alternatives: Iterable[Axes]) -> Axes:
    """The distinct mesh axes in some alternatives, in order."""
    return tuple(dict.fromkeys(axis for axes in alternatives for axis in axes))


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'heads'?` where some known name is near, else nothing."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """A mesh in words: `data=1, model=8`."""
    return describe_shape(mesh.shape)


def describe_shape(shape: Mapping[str, int]) -> str:
    """The axes of a mesh in words: `data=1, model=8`."""
    return ", ".join(f"{axis}={size}" for axis, size in shape.items())
