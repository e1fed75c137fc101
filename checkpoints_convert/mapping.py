"""Renames, reshapes, permutes and stacks tensors: a mapping is data, and runs both ways.

A target parameter is one tensor of the file, or one a layer stacked on a leading axis (`{layer}` in the name), or
several stacked (query, key and value), or both (layers first). Each stacked piece takes the same small steps: reshape,
transpose, reorder along one axis. The first two are views on the mapped file and the third commutes with slicing, so a
slice of a parameter costs the bytes of that slice.
"""

import difflib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from collections.abc import Mapping as MappingABC
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.sources import NumpyArray, Source
from checkpoints_convert.values import to_round_once

Index = tuple[slice, ...]

FLOATS = tuple(np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
# JAX on CPU takes over a NumPy buffer without a copy only at this alignment.
ALIGNMENT_BYTES = 64
_QUANTISED = re.compile(
    r"(_packed|_blocks|_scales?|_scale_inv|_zero_point|_shape|_g_idx|\.qweight|\.qzeros|\.scales|\.g_idx|\.absmax|\.quant_map)(_\d+)?$|\.quant_state\."
)
_DEQUANTISE = (
    "a quantised tower cannot be read; take a checkpoint that leaves the tower in bfloat16, as most quantised language "
    "models do, or the original, or write the tower's weights out in bfloat16 first"
)


@dataclass(frozen=True)
class Reorder:
    """out[..., i, ...] = in[..., order[i], ...] along `axis`, counted in one piece as the target holds it."""

    axis: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One target parameter and the tensors that fill it.

    Args:
        target: Path of the parameter.
        source: Tensor name, or several that are stacked on a leading axis. With "{layer}": one a layer, stacked before.
        stored: Shape of each tensor in the file.
        shape: What it is reshaped to; None leaves it.
        transpose: Axes order after the reshape; None leaves it.
        reorder: Permutation after the transpose, for all the sources or one (or None) for each.
        layers: Number of layers where it is not the mapping's.
    """

    target: str
    source: str | tuple[str, ...]
    _: KW_ONLY
    stored: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    transpose: tuple[int, ...] | None = None
    reorder: Reorder | tuple[Reorder | None, ...] | None = None
    layers: int | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """The name patterns, one for each stacked source."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def layered(self) -> bool:
        """Whether there is one tensor a layer."""
        return "{layer}" in self.sources[0]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of one tensor after the steps, before stacking."""
        shape = self.stored if self.shape is None else self.shape
        return shape if self.transpose is None else tuple(shape[axis] for axis in self.transpose)

    def reorder_of(self, part: int) -> Reorder | None:
        """The permutation of the part-th stacked source."""
        return self.reorder[part] if isinstance(self.reorder, tuple) else self.reorder


@dataclass(frozen=True)
class Mapping:
    """How the tensors of one tower become parameters, and back.

    Args:
        name: The tower's family.
        layout: "original" (as published), "transformers" (as transformers names it in memory), or another name of whom
            it is from.
        entries: One for each parameter.
        prefixes: What the tower owns: a tensor under these that no entry names is an error, everything else is ignored.
        layers: How many layers "{layer}" stands for.
        unused: Starts of names of tensors under `prefixes` that are not wanted: blocks that no output needs.
        aliases: (prefix used in `entries` and `prefixes`, other spellings of it); `located` picks a checkpoint's.
    """

    name: str
    layout: str
    _: KW_ONLY
    entries: tuple[Entry, ...]
    prefixes: tuple[str, ...]
    layers: int = 0
    unused: tuple[str, ...] = ()
    aliases: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each target parameter."""
        return {entry.target: self._lead(entry) + entry.piece_shape for entry in self.entries}

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that the file must have, by name."""
        return {name: entry.stored for entry in self.entries for _, _, name in self._pieces(entry)}

    def located(self, names: Set[str]) -> "Mapping":
        """The same mapping with its prefixes spelt as in `names` (the first spelling where none occurs)."""
        mapping = self
        for prefix, spellings in self.aliases:
            candidates = [mapping._renamed(prefix, spelling) for spelling in (prefix, *spellings)]
            mapping = max(candidates, key=lambda candidate: candidate.hits(names))
        return mapping

    def hits(self, names: Set[str]) -> int:
        """How many of the tensors it needs are among `names`."""
        return len(self.names.keys() & names)

    def read(
        self, source: Source, target: str, index: Index | None = None, dtype: npt.DTypeLike | None = None
    ) -> NumpyArray:
        """One parameter, or a slice of it: only the slice's bytes are read.

        Args:
            source: Where the tensors are.
            target: Path of the parameter.
            index: Unit-step slices, one for each axis; None for all of it.
            dtype: What to cast to; None keeps the file's.

        Returns:
            A new array, aligned so that JAX can take it over.
        """
        entry = self.entry(target)
        index = _whole(self.shapes[target], index)
        if dtype is None:
            dtype = source.info(next(name for _, _, name in self._pieces(entry))).dtype
        out = empty_aligned(tuple(part.stop - part.start for part in index), dtype)
        for fill in self.fills(source, target, [(index, out)]):
            fill()
        return out

    def fills(
        self, source: Source, target: str, slices: Sequence[tuple[Index, NumpyArray]]
    ) -> list[Callable[[], None]]:
        """The reads that fill slices of one parameter, to be run in any order or at once: each takes one tensor.

        Args:
            source: Where the tensors are.
            target: Path of the parameter.
            slices: (unit-step index, array to fill) of each slice wanted.
        """
        entry = self.entry(target)
        lead = len(self._lead(entry))
        wanted = [(_whole(self.shapes[target], index), out) for index, out in slices]
        fills: list[Callable[[], None]] = []
        for position, part, name in self._pieces(entry):
            parts = [
                (index[lead:], out[tuple(at - span.start for span, at in zip(index, position, strict=False))])
                for index, out in wanted
                if all(span.start <= at < span.stop for span, at in zip(index, position, strict=False))
            ]
            if parts:
                fills.append(partial(_fill, source, name, entry, part, parts))
        return fills

    def check(self, source: Source, targets: MappingABC[str, tuple[int, ...]] | None = None) -> list[str]:
        """Everything that keeps this mapping from filling `targets` from `source`.

        Args:
            source: The checkpoint. Only files that hold the tower's tensors are opened.
            targets: Shape of each parameter wanted; None asks the source alone.

        Returns:
            The problems, each starting with the name of the culprit; empty if there is none.
        """
        known = self.names
        problems = [] if targets is None else self._target_problems(targets)
        near = self._near(source.names, known)
        indexed = len(source.names)
        problems += source.open(near)
        # an opened file may hold tensors that the index is silent about
        near += self._near(itertools.islice(source.names, indexed, None), known)
        present = {name for name in near if not name.startswith(self.unused)}
        owned = {name for name in present if name.startswith(self.prefixes)}

        layer_problems, excused = self._layer_problems(present)
        problems += layer_problems
        missing = defaultdict(list)
        misshapen = defaultdict(list)
        quantised = defaultdict(list)
        for entry in self.entries:
            for position, part, name in self._pieces(entry):
                info = source.tensors.get(name)
                if name not in present:
                    if name not in excused:
                        missing[entry.sources[part]].append((position, name))
                elif info is not None:
                    if info.shape != entry.stored:
                        misshapen[entry.sources[part], entry.stored, info.shape].append((position, name))
                    if info.dtype not in FLOATS:
                        quantised[entry.sources[part], info.dtype].append((position, name))
        problems += [f"{_spelt(pattern, at)}: missing" for pattern, at in missing.items()]
        problems += [
            f"{_spelt(pattern, at)}: shape {list(actual)}, expected {list(expected)}"
            for (pattern, expected, actual), at in misshapen.items()
        ]
        problems += [
            f"{_spelt(pattern, at)}: dtype {dtype}, not a float of 16 bits or more: {_DEQUANTISE}"
            for (pattern, dtype), at in quantised.items()
        ]
        problems += self._unknown_problems(owned - known.keys() - excused, present)
        return problems

    def export(self, params: MappingABC[str, Any]) -> Iterator[tuple[str, NumpyArray]]:
        """The inverse: the tensors as the file holds them, bit for bit.

        Args:
            params: Path -> array. One parameter is on the host at a time, and of a `StoredArray` one piece.

        Yields:
            Tensor name and contiguous array.

        Raises:
            CheckpointError: A parameter is missing, unknown or misshapen.
        """
        self.outputs(params)
        for entry in self._by_width(params):
            value = params[entry.target]
            if hasattr(value, "__array__"):  # a stored one is read where it is indexed
                value = np.asarray(value)
            shape = entry.stored if entry.shape is None else entry.shape
            for position, part, name in self._pieces(entry):
                piece, reorder = value[position], entry.reorder_of(part)
                if reorder is not None:
                    piece = np.take(piece, np.argsort(reorder.order), axis=reorder.axis)
                if entry.transpose is not None:
                    piece = piece.transpose(np.argsort(entry.transpose))
                yield name, np.ascontiguousarray(piece.reshape(shape)).reshape(entry.stored)

    def outputs(self, params: MappingABC[str, Any]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each tensor that `export` makes, by name, in its order.

        Raises:
            CheckpointError: A parameter is missing, unknown or misshapen.
        """
        problems = self._target_problems({path: tuple(value.shape) for path, value in params.items()})
        if problems:
            raise CheckpointError(f"{self.name}: these parameters do not make a checkpoint", problems)
        return {
            name: (entry.stored, np.dtype(params[entry.target].dtype))
            for entry in self._by_width(params)
            for _, _, name in self._pieces(entry)
        }

    def sources(self, target: str) -> list[str]:
        """The tensors that fill `target`, in order."""
        return [name for _, _, name in self._pieces(self.entry(target))]

    def entry(self, target: str) -> Entry:
        """The entry that fills `target`."""
        return next(entry for entry in self.entries if entry.target == target)

    def _near(self, names: Iterable[str], known: MappingABC[str, Any]) -> list[str]:
        """Those that matter to this tower: in a large checkpoint few, and the rest is looked at once."""
        return [name for name in names if name in known or name.startswith(self.prefixes)]

    def _by_width(self, params: MappingABC[str, Any]) -> list[Entry]:
        """Entries of wide dtypes first: in a file each tensor then starts at a multiple of its values' size."""
        return sorted(self.entries, key=lambda entry: -np.dtype(params[entry.target].dtype).itemsize)

    def _lead(self, entry: Entry) -> tuple[int, ...]:
        layers = (self._layers(entry),) if entry.layered else ()
        return layers if isinstance(entry.source, str) else (*layers, len(entry.source))

    def _layers(self, entry: Entry) -> int:
        return self.layers if entry.layers is None else entry.layers

    def _pieces(self, entry: Entry) -> Iterator[tuple[tuple[int, ...], int, str]]:
        """(place among the leading axes, which of the stacked sources, tensor name) of each piece."""
        for layer in range(self._layers(entry)) if entry.layered else (None,):
            for part, pattern in enumerate(entry.sources):
                name = pattern if layer is None else pattern.replace("{layer}", str(layer))
                layered = () if layer is None else (layer,)
                yield (layered if isinstance(entry.source, str) else (*layered, part)), part, name

    def _renamed(self, prefix: str, spelling: str) -> "Mapping":
        if prefix == spelling:
            return self

        def rename(name: str) -> str:
            return spelling + name.removeprefix(prefix) if name.startswith(prefix) else name

        entries = tuple(
            replace(e, source=rename(e.source) if isinstance(e.source, str) else tuple(map(rename, e.source)))
            for e in self.entries
        )
        prefixes, unused = tuple(map(rename, self.prefixes)), tuple(map(rename, self.unused))
        return replace(self, entries=entries, prefixes=prefixes, unused=unused)

    def _target_problems(self, targets: MappingABC[str, tuple[int, ...]]) -> list[str]:
        shapes = self.shapes
        times = Counter(entry.target for entry in self.entries)
        problems = [f"{path}: filled by {count} entries of the mapping" for path, count in times.items() if count > 1]
        for name, count in Counter(name for e in self.entries for _, _, name in self._pieces(e)).items():
            if count > 1:
                problems.append(f"{name}: used {count} times by the mapping")
        for path in targets.keys() - shapes.keys():
            problems.append(f"{path}: no tensor fills this parameter{_nearest(path, shapes)}")
        for path in shapes.keys() - targets.keys():
            problems.append(f"{path}: the mapping fills it, but there is no such parameter{_nearest(path, targets)}")
        for path in targets.keys() & shapes.keys():
            if tuple(targets[path]) != shapes[path]:
                problems.append(
                    f"{path}: parameter of shape {list(targets[path])}, the checkpoint's gives {list(shapes[path])}"
                )
        return sorted(problems)

    def _layer_problems(self, present: set[str]) -> tuple[list[str], set[str]]:
        """Layers too many or too few, said once; and the names that this already accounts for."""
        problems: list[str] = []
        excused: set[str] = set()
        by_stem = defaultdict(list)
        for entry in self.entries:
            for pattern in entry.sources if entry.layered else ():
                by_stem[pattern.split("{layer}")[0], self._layers(entry)].append(pattern)
        for (stem, layers), patterns in by_stem.items():
            layer_of = {
                name: int(match[1])
                for name in present
                if name.startswith(stem) and (match := re.match(r"(0|[1-9]\d*)\.", name[len(stem) :]))
            }
            found, expected = set(layer_of.values()), set(range(layers))
            if not found:
                continue
            if found - expected:
                problems.append(
                    f"{stem}: layers {_ranges(found - expected)} are there, but the config says {layers} layers"
                )
            if expected - found:
                problems.append(
                    f"{stem}: layers {_ranges(expected - found)} are missing: the config says {layers} layers, "
                    f"the checkpoint has {len(found & expected)} of them"
                )
            excused |= {name for name, layer in layer_of.items() if layer not in expected}
            excused |= {p.replace("{layer}", str(layer)) for p in patterns for layer in expected - found}
        return problems, excused

    def _unknown_problems(self, unknown: set[str], present: set[str]) -> list[str]:
        known = self.names
        # An unknown name is most often the new spelling of a missing one.
        candidates = [name for name in known if name not in present] or list(known)
        groups = defaultdict(list)
        for name in sorted(unknown):
            groups[re.sub(r"(?<=\.)\d+(?=\.)", "N", name)].append(name)
        problems = []
        for names in groups.values():
            more = f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
            why = f", part of a quantised one: {_DEQUANTISE}" if _QUANTISED.search(names[0]) else ""
            problems.append(f"{names[0]}{more}: unknown tensor in the tower{why or _nearest(names[0], candidates)}")
        return problems


def detect(source: Source, mappings: MappingABC[str, Mapping]) -> Mapping:
    """The mapping whose names the checkpoint uses, with its prefixes spelt as there.

    Args:
        source: The checkpoint; only its names are looked at.
        mappings: The candidates, by layout.

    Raises:
        CheckpointError: None of them has a name in common with the checkpoint.
    """
    names = source.names
    best = max((mapping.located(names) for mapping in mappings.values()), key=lambda mapping: mapping.hits(names))
    if not best.hits(names):
        prefixes = sorted({prefix for mapping in mappings.values() for prefix in mapping.prefixes})
        there = ", ".join(f"{prefix} ({count})" for prefix, count in top_level(names).items())
        raise CheckpointError(
            f"{source.name}: no {best.name} tower: nothing under {', '.join(prefixes)}; there is {there or 'nothing'}"
        )
    return best


def top_level(names: Iterable[str]) -> dict[str, int]:
    """How many names there are under each first component, most first."""
    return dict(Counter(name.partition(".")[0] for name in names).most_common())


def norm(target: str, source: str, size: int, *, bias: bool = True) -> tuple[Entry, ...]:
    """Scale and bias of a LayerNorm over `size` channels; of an RMSNorm, which has no bias, the scale."""
    scale = Entry(f"{target}/scale", f"{source}.weight", stored=(size,))
    return (scale, Entry(f"{target}/bias", f"{source}.bias", stored=(size,)))[: 1 + bias]


def linear(
    target: str,
    source: str,
    *,
    stored: tuple[int, ...],
    shape: tuple[int, ...] | None = None,
    bias: bool = True,
    bias_shape: tuple[int, ...] | None = None,
) -> tuple[Entry, ...]:
    """Kernel and bias of a linear or convolution layer.

    Args:
        target: Path of the layer.
        source: Name of the layer in the file.
        stored: Shape of the weight in the file, outputs first.
        shape: Shape of the kernel; None for the stored one.
        bias: Whether there is one.
        bias_shape: Shape of the bias; None for the stored one, [outputs].
    """
    kernel = Entry(f"{target}/kernel", f"{source}.weight", stored=stored, shape=shape)
    return (kernel, Entry(f"{target}/bias", f"{source}.bias", stored=stored[:1], shape=bias_shape))[: 1 + bias]


def half_split_to_pairs(head_dim: int) -> tuple[int, ...]:
    """Order that takes rotary channels from [first halves | second halves] of the pairs to pairs side by side."""
    return tuple(half * (head_dim // 2) + pair for pair in range(head_dim // 2) for half in range(2))


def pairs_to_half_split(head_dim: int) -> tuple[int, ...]:
    """The inverse: order that takes rotary channels from pairs side by side to [first halves | second halves]."""
    return tuple(2 * pair + half for half in range(2) for pair in range(head_dim // 2))


def empty_aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> NumpyArray:
    """An uninitialised array that starts at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[skip : skip + size_bytes].view(dtype).reshape(shape)


def _fill(source: Source, name: str, entry: Entry, part: int, parts: list[tuple[Index, NumpyArray]]) -> None:
    info, reorder = source.info(name), entry.reorder_of(part)
    if info.shape != entry.stored:
        raise CheckpointError(f"{source.name}: {name}: shape {list(info.shape)}, expected {list(entry.stored)}")
    starts = [_contiguous(entry.piece_shape, index) for index, _ in parts]
    same_bytes = entry.transpose is None and reorder is None and all(info.dtype == out.dtype for _, out in parts)
    # An array with padding is filled in part, and that part need not lie side by side.
    if same_bytes and None not in starts and all(out.flags.c_contiguous for _, out in parts):
        for start, (_, out) in zip(starts, parts, strict=True):
            source.read_into(name, out, start=start or 0)
        return
    view = source.read(name).reshape(entry.stored if entry.shape is None else entry.shape)
    if entry.transpose is not None:
        view = view.transpose(entry.transpose)
    for index, out in parts:
        if reorder is None:
            taken = view[index]
        else:
            others = tuple(slice(None) if axis == reorder.axis else span for axis, span in enumerate(index))
            taken = np.take(view[others], np.asarray(reorder.order)[index[reorder.axis]], axis=reorder.axis)
        np.copyto(out, to_round_once(taken, out.dtype), casting="unsafe")


def _contiguous(shape: tuple[int, ...], index: Index) -> int | None:
    """First element of the slice if its elements lie side by side in a C-ordered array, else None."""
    start, stride, partial = 0, 1, False
    for size, span in zip(reversed(shape), reversed(index), strict=True):
        if partial and span.stop - span.start > 1:
            return None
        partial = partial or span.stop - span.start < size
        start += span.start * stride
        stride *= size
    return start


def _whole(shape: tuple[int, ...], index: Index | None) -> Index:
    index = (index or ()) + (slice(None),) * (len(shape) - len(index or ()))
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    if any(step != 1 for _, _, step in spans):
        raise ValueError(f"index {index}: only unit steps can be read")
    return tuple(slice(start, max(start, stop)) for start, stop, _ in spans)


def _spelt(pattern: str, found: list[tuple[tuple[int, ...], str]]) -> str:
    if len(found) == 1 or "{layer}" not in pattern:
        return found[0][1]
    return f"{pattern} of layers {_ranges({position[0] for position, _ in found})}"


def _ranges(numbers: Iterable[int]) -> str:
    spans = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        spans.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(spans)


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"; the nearest known is {close[0]}" if close else ""
