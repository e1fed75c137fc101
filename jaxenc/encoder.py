"""Encoder: preprocess -> pack -> apply -> unpack, on the layout that the plan decided."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree, Shaped

import checkpoints_convert
from jaxenc import packing
from jaxenc.errors import InputError
from jaxenc.items import AudioItem, Item, VisionItem
from jaxenc.ladder import full_work, ladder_of
from jaxenc.layers.implementations import AttentionName
from jaxenc.layers.parameters import flatten
from jaxenc.models.base import EncoderConfig
from jaxenc.packer import Packer, pack
from jaxenc.packing import Batch, Budget, Placed
from jaxenc.programs import Params, Programs
from jaxenc.progress import with_progress
from jaxenc.reading import OnError, read_ahead, read_all
from jaxenc.streaming import Stream
from sharding_rules import Batching, Plan, Workload
from sharding_rules.costs import Cost

BatchLayout = Literal["auto", "rows", "length"]


@dataclass(frozen=True)
class ItemRows:
    """What one picture, video or recording becomes.

    Attributes:
        rows: output rows, all its items together.
        grids: for vision, (frames, rows, columns) of patches of each item: a video has an item for every few frames.
        timestamps: for videos, seconds at which each item starts.
    """

    rows: int
    grids: tuple[tuple[int, int, int], ...] = ()
    timestamps: tuple[float, ...] = ()


class Encoder:
    """One encoder with its parameters, laid out on a mesh. Made by `jaxenc.load` and `jaxenc.from_config`.

    Attributes:
        config: sizes.
        plan: where every axis went, and why.
        params: nested dict of arrays.
        dtype: of parameters and products.
    """

    def __init__(
        self,
        config: EncoderConfig,
        plan: Plan,
        params: Params,
        *,
        dtype: DTypeLike,
        precision: str = "ieee",
        attention: AttentionName | None = None,
        budgets: Sequence[Budget] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ):
        """Use `jaxenc.load` or `jaxenc.from_config`.

        Args:
            config: sizes.
            plan: made for these parameters.
            params: already where the plan wants them.
            dtype: of parameters and products.
            precision: of float32 products, "ieee" or "tf32".
            attention: the implementation to try first.
            budgets: shapes that batches can have; the encoder's own ladder where not given.
            provenance: where the parameters came from; kept in saved checkpoints.
        """
        self.config = config
        self.plan = plan
        self.params = params
        self.dtype = jnp.dtype(dtype)
        self.provenance = dict(provenance or {})
        self._ladder = ladder_of(config, plan, budgets)
        self._programs = Programs(config, plan, dtype=dtype, precision=precision, attention=attention)

    def __repr__(self) -> str:
        """Name, dtype and layout in a line."""
        return f"Encoder({self.plan.encoder}, {self.dtype.name}, {self.plan.strategy} on {dict(self.plan.mesh.shape)})"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Shapes that batches have so far: long calls, and items longer than all of them, may add some, up to eight."""
        return self._ladder.budgets

    @property
    def compiled(self) -> Mapping[Budget, jax.stages.Compiled]:
        """The programs so far, by budget."""
        return self._programs.compiled

    @property
    def costs(self) -> Mapping[Budget, Cost]:
        """What the program of each budget is predicted to cost: FLOPs, memory, traffic, seconds."""
        return {budget: self.plan.predict(*self._full(budget)) for budget in self.budgets}

    # --- files and arrays in, rows out

    @overload
    def encode(
        self,
        *,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        audio: Sequence[Any] | None = None,
        on_error: OnError = "raise",
        layout: BatchLayout = "auto",
        out_sharding: Sharding | None = None,
        progress: bool = False,
    ) -> list[Any]: ...

    @overload
    def encode(
        self,
        *,
        images: Iterable[Any] | None = None,
        videos: Iterable[Any] | None = None,
        audio: Iterable[Any] | None = None,
        on_error: OnError = "raise",
        layout: BatchLayout = "auto",
        out_sharding: Sharding | None = None,
        progress: bool = False,
    ) -> Iterator[Any]: ...

    def encode(
        self,
        *,
        images: Iterable[Any] | None = None,
        videos: Iterable[Any] | None = None,
        audio: Iterable[Any] | None = None,
        on_error: OnError = "raise",
        layout: BatchLayout = "auto",
        out_sharding: Sharding | None = None,
        progress: bool = False,
    ) -> list[Any] | Iterator[Any]:
        """Encodes pictures, videos or recordings.

        A list gives a list. Anything else that can be iterated over gives an iterator, of any length in flat memory:
        threads read ahead while devices compute, and nothing is read before the first result is asked for. A batch is
        computed when enough waits to fill it, or when there is no more.

        Args:
            images: paths, bytes, PIL images or arrays [height, width, 3].
            videos: paths, or (frames [n, height, width, 3], frames a second).
            audio: paths, or (samples, samples a second), or 16 kHz samples.
            on_error: "raise" stops at the first bad one, after the results before it; "skip" logs it and puts None in
                its place.
            layout: "rows" keeps every item on one part of the batch, "length" spreads the tokens of every item over
                all of them, "auto" does what is predicted to be fastest; the numbers are the same.
            out_sharding: where the results shall live; on the host where not given.
            progress: shows a bar on stderr, where that is a terminal or a notebook.

        Returns:
            An array [rows, dim] for each, in input order: of NumPy, or of JAX with `out_sharding`.

        Raises:
            InputError: names the bad one and what is wrong with it.
        """
        kind, sources = self._given(images=images, videos=videos, audio=audio)
        results = self._results(
            sources,
            partial(self._read, kind),
            on_error=on_error,
            layout=layout,
            out_sharding=out_sharding,
            progress=kind if progress else None,
        )
        return list(results) if isinstance(sources, Sequence) else results

    def preprocess(
        self,
        *,
        images: Iterable[Any] | None = None,
        videos: Iterable[Any] | None = None,
        audio: Iterable[Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[Item]:
        """The items of files and arrays, on the host; a video is one item for every few frames. See `encode`."""
        kind, sources = self._given(images=images, videos=videos, audio=audio)
        groups = read_all(read_ahead(sources, partial(self._read, kind)), _known(on_error))
        return [item for group in groups if group is not None for item in group]

    def output_rows(
        self,
        *,
        images: Iterable[Any] | None = None,
        videos: Iterable[Any] | None = None,
        audio: Iterable[Any] | None = None,
    ) -> list[ItemRows]:
        """How many rows `encode` will return for each, and their grids: what a prompt needs for its placeholders."""
        kind, sources = self._given(images=images, videos=videos, audio=audio)

        def read(position: int, source: Any) -> Iterator[ItemRows]:
            for item in self._read(kind, position, source):
                rows = self.config.output_rows(item)
                if isinstance(item, VisionItem):
                    yield ItemRows(rows, (item.grid,), () if item.timestamp is None else (item.timestamp,))
                else:
                    yield ItemRows(rows)

        return [
            ItemRows(
                rows=sum(part.rows for part in parts),
                grids=tuple(grid for part in parts for grid in part.grids),
                timestamps=tuple(seconds for part in parts for seconds in part.timestamps),
            )
            for parts in read_all(read_ahead(sources, read), "raise")
            if parts is not None
        ]

    @overload
    def encode_items(  # type: ignore[overload-overlap]
        self,
        items: Sequence[Item],
        *,
        on_error: OnError = "raise",
        layout: BatchLayout = "auto",
        out_sharding: Sharding | None = None,
        progress: bool = False,
    ) -> list[Any]: ...

    @overload
    def encode_items(
        self,
        items: Iterable[Item],
        *,
        on_error: OnError = "raise",
        layout: BatchLayout = "auto",
        out_sharding: Sharding | None = None,
        progress: bool = False,
    ) -> Iterator[Any]: ...

    def encode_items(
        self,
        items: Iterable[Item],
        *,
        on_error: OnError = "raise",
        layout: BatchLayout = "auto",
        out_sharding: Sharding | None = None,
        progress: bool = False,
    ) -> list[Any] | Iterator[Any]:
        """Encodes preprocessed items; see `encode`."""

        def read(position: int, item: Item) -> Iterator[Item]:
            yield self._checked(item, f"item {position}")

        results = self._results(
            items,
            read,
            on_error=on_error,
            layout=layout,
            out_sharding=out_sharding,
            progress="items" if progress else None,
        )
        return list(results) if isinstance(items, Sequence) else results

    # --- the pieces of it

    def pack(self, items: Sequence[Item], *, layout: BatchLayout = "auto") -> Batch:
        """One batch of all items; for the layout see `encode`.

        Raises:
            InputError: there are none, or they do not fit in the largest budget; names both sizes.
        """
        if not items:
            raise InputError("pack: there are no items")
        items = [self._checked(item, f"item {i}") for i, item in enumerate(items)]
        batches = list(
            pack(
                list(map(self.config.pieces, items)),
                self._ladder,
                window=self.config.window,
                units=list(map(self.config.item_unit, items)),
                names=[item.name for item in items],
                layout=layout,
                together=True,
            )
        )
        if len(batches) != 1:
            tokens = sum(sum(self.config.pieces(item)) for item in items)
            largest = self._ladder.largest
            raise InputError(
                f"{len(items)} items of {tokens} tokens make {len(batches)} batches: the largest budget is "
                f"{largest.rows} rows of {largest.row} tokens. Pack fewer, use encode_items, or load with budgets="
            )
        budget, placed = batches[0]
        return self.config.layout(items, placed, budget, self._programs.parts)

    def apply(self, params: Params, batch: Batch, capture: Sequence[int] | Literal["all"] = ()) -> Any:
        """Runs the encoder on one batch: a pure function, for your own jit, grad or pipeline.

        Inside `jax.set_mesh`, of any axes, it works on the plan's own mesh; see `Plan.call`.

        Args:
            params: as `encoder.params`.
            batch: as `encoder.pack` makes it.
            capture: blocks (from 0; negative ones from the end) whose outputs are wanted too, or "all".

        Returns:
            Rows [b, m, dim]; with `capture`, a pair of them and block -> tokens [b, n, embed].

        Raises:
            RulesError: the surrounding mesh has other devices, inside jit or grad; names both meshes.
        """
        run = partial(self._programs.jitted, capture=self._blocks(capture))
        inputs = dict(batch.inputs)
        shardings = self._param_shardings, {name: self._programs.input_sharding(name) for name in inputs}
        rows, captured = self.plan.call(run, params, inputs, shardings=shardings)
        return (rows, captured) if captured else rows

    def unpack(self, out: Shaped[Array, "b m d"], batch: Batch) -> list[np.ndarray]:
        """The rows of each item [rows, dim], in the order they were packed; on the host."""
        return self._unpack(out, batch.rows)

    def unpack_tokens(self, captured: Shaped[Array, "b n d"], batch: Batch) -> list[np.ndarray]:
        """The same for a captured block's output: the tokens of each item [tokens, embed], in the item's own order."""
        return self._unpack(captured, batch.tokens)

    def warmup(self, budgets: Sequence[Budget] | None = None) -> None:
        """Compiles for the given budgets, or for all that there are, ahead of the first call.

        With `jax_compilation_cache_dir` set, JAX keeps the programs for the next process.
        """
        for budget in self.budgets if budgets is None else budgets:
            self._program(budget)

    def memory(self, budget: Budget) -> int:
        """Bytes on each device while a batch of this budget is computed: parameters, inputs, all between, and rows.

        What the compiler planned: the program is compiled, where it is not yet, and nothing runs.

        Raises:
            NotImplementedError: the compiler of this platform does not say.
        """
        planned = self._program(budget).memory_analysis()
        if planned is None:
            raise NotImplementedError(f"{self.plan.platform}: the compiler does not say")
        sizes = (planned.argument_size_in_bytes, planned.temp_size_in_bytes, planned.output_size_in_bytes)
        return sum(sizes) - planned.alias_size_in_bytes

    def with_params(self, params: PyTree[Array]) -> "Encoder":
        """The same encoder with other parameters, such as trained ones, placed where the plan wants them.

        Args:
            params: shaped as `encoder.params`, or as they are without the plan's padding.

        Returns:
            An encoder that shares this one's programs.

        Raises:
            ValueError: all parameters that are missing, unknown or of another shape.
        """
        given, own = flatten(params), flatten(self.params)
        problems = [f"{path} is missing" for path in own.keys() - given.keys()]
        problems += [f"{path} is unknown" for path in given.keys() - own.keys()]
        problems += [
            f"{path} is {given[path].shape}, expected {own[path].shape}"
            for path in own.keys() & given.keys()
            if given[path].shape not in (own[path].shape, self.plan.parameters[path].shape)
        ]
        if problems:
            raise ValueError(f"parameters do not fit {self.plan.encoder}: {'; '.join(sorted(problems))}")
        placed = {path: self._placed(path, given[path]) for path in own}
        other = Encoder(
            self.config,
            self.plan,
            unflatten_dict(placed, sep="/"),
            dtype=self.dtype,
            provenance={**self.provenance, "changed": True},
        )
        other._programs, other._ladder = self._programs, self._ladder
        return other

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes a converted checkpoint, which `jaxenc.load` reads on any mesh: without the plan's padding."""
        shapes = {path: parameter.shape for path, parameter in self.plan.parameters.items()}
        params = checkpoints_convert.strip_padding(flatten(self.params), shapes)
        checkpoints_convert.save_checkpoint(
            path, params, metadata=checkpoint_metadata(self.config, self.provenance), overwrite=overwrite
        )

    # --- private

    def _full(self, budget: Budget) -> tuple[Workload, Batching]:
        return full_work(self.config, self.plan, budget)

    def _given(self, **kinds: Iterable[Any] | None) -> tuple[str, Iterable[Any]]:
        """The one kind of sources that a call was given."""
        given = {kind: sources for kind, sources in kinds.items() if sources is not None}
        if len(given) != 1:
            raise TypeError(f"give exactly one of {', '.join(f'{kind}=[...]' for kind in self.config.kinds)}")
        kind, sources = next(iter(given.items()))
        if kind not in self.config.kinds:
            raise TypeError(f"{self.plan.encoder} encodes {' and '.join(self.config.kinds)}, not {kind}")
        if isinstance(sources, str | bytes) or hasattr(sources, "__array__") or not isinstance(sources, Iterable):
            raise TypeError(f"{kind}= takes a list, even of one; a {type(sources).__name__} was given")
        return kind, sources

    def _read(self, kind: str, position: int, source: Any) -> Iterator[Item]:
        name = str(source) if isinstance(source, str | Path) else f"{kind}[{position}]"
        for item in self.config.read(kind, source, name=name):
            yield self._checked(item, name)

    def _checked(self, item: Item, name: str) -> Item:
        """The item, with a name for errors if it had none."""
        expected = VisionItem if self.config.modality == "vision" else AudioItem
        name = getattr(item, "name", "") or name
        if not isinstance(item, expected):
            raise InputError(
                f"{name}: is of type {type(item).__name__}; {self.plan.encoder} encodes {expected.__name__}"
            )
        named = item if item.name else replace(item, name=name)
        self.config.check(named)
        return named

    def _results(
        self,
        sources: Iterable[Any],
        read: Callable[[int, Any], Iterator[Item]],
        *,
        on_error: OnError,
        layout: BatchLayout,
        out_sharding: Sharding | None,
        progress: str | None,
    ) -> Iterator[Any]:
        """What `encode` gives out, one by one; `progress` is what a bar counts, where one is wanted."""
        stream = Stream(
            self.config,
            self._packer(layout),
            launch=self._launch,
            fetch=_to_host,
            place=lambda rows: rows if out_sharding is None else jax.device_put(rows, out_sharding),
            on_error=_known(on_error),
        )
        batch = max(budget.tokens for budget in self.budgets)
        runs = read_ahead(sources, read, size=lambda item: sum(self.config.pieces(item)), limit=batch)
        results = stream.results(runs)
        if progress is None:
            return results
        return with_progress(results, what=progress, total=len(sources) if isinstance(sources, Sized) else None)

    def _packer(self, layout: BatchLayout) -> Packer:
        return Packer(self._ladder, window=self.config.window, layout=layout)

    def _launch(
        self, items: Sequence[Item], placed: Sequence[Placed], budget: Budget
    ) -> tuple[jax.Array, packing.Slots]:
        batch = self.config.layout(items, placed, budget, self._programs.parts)
        return self._dispatch(budget, batch), batch.rows

    @cached_property
    def _param_shardings(self) -> Params:
        shardings: Params = self.plan.shardings(self.params)
        return shardings

    def _placed(self, path: str, array: Any) -> jax.Array:
        sharding = self.plan.sharding(path)
        placed = jax.device_put(self.plan.pad(path, array), sharding)
        if placed.dtype == self.dtype:
            return placed
        # within the mesh of a caller's set_mesh, JAX refuses to cast what is on another
        with nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(self._programs.mesh):
            return jax.device_put(placed.astype(self.dtype), sharding)

    def _dispatch(self, budget: Budget, batch: Batch) -> jax.Array:
        sharding = self._programs.input_sharding
        inputs = {name: _place(np.asarray(array), sharding(name)) for name, array in batch.inputs.items()}
        rows, _ = self._program(budget)(self._params_of(budget), inputs)
        return rows

    def _program(self, budget: Budget) -> jax.stages.Compiled:
        return self._programs.program(budget, self._params_of(budget))

    def _params_of(self, budget: Budget) -> Params:
        """The parameters, as the program of a budget takes them."""
        return self._layers_apart if self._programs.apart(budget) else self.params

    @cached_property
    def _layers_apart(self) -> Params:
        return self._programs.layers_apart(self.params)

    def _blocks(self, capture: Sequence[int] | Literal["all"]) -> tuple[int, ...]:
        layers = self.config.transformer.layers
        wanted = range(layers) if capture == "all" else capture
        if wrong := [block for block in wanted if not -layers <= block < layers]:
            raise ValueError(f"capture={wrong}: {self.plan.encoder} has blocks 0 to {layers - 1}")
        return tuple(block % layers for block in wanted)

    def _unpack(self, out: Shaped[Array, "b m d"], slots: packing.Slots) -> list[np.ndarray]:
        held = np.asarray(slots.item)
        counts = np.bincount(held[held >= 0]) if (held >= 0).any() else np.zeros(0, int)
        results: dict[int, np.ndarray] = {}
        packing.unpack(_to_host(out), slots, results, counts.tolist())
        return [results[i] for i in range(len(counts))]


def checkpoint_metadata(config: EncoderConfig, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a converted checkpoint says of itself, so that `jaxenc.load` needs nothing else."""
    rest = {key: value for key, value in provenance.items() if key != "config"}
    return {
        "family": config.family,
        "sizes": asdict(config),  # type: ignore[call-overload]
        "config": provenance.get("config"),
        "provenance": rest,
    }


def _known(on_error: OnError) -> OnError:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; it can be 'raise' or 'skip'")
    return on_error


def _place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array on the mesh, each process giving the parts its devices hold."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _to_host(array: jax.Array) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
