"""A Plan: what was decided about every axis, why, what else there was, and the shardings that follow."""

import html
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sharding_rules.batching import Batching
from sharding_rules.costs import Collective, Cost, collectives, cost_of, dtype_of
from sharding_rules.holdings import Holding, holdings_json, holdings_of
from sharding_rules.mesh import AnyMesh
from sharding_rules.pictures import picture
from sharding_rules.printing import Fact, facts, first_word, header, tables, totals
from sharding_rules.profiles import DeviceProfile
from sharding_rules.rules import BATCH, Axes, IndivisibleAxisError, Parameter, RulesError, describe_mesh, nearest
from sharding_rules.strategies import Layout, partition_spec, parts_of
from sharding_rules.tables import WIDTH
from sharding_rules.trees import path_of
from sharding_rules.workload import Workload

if TYPE_CHECKING:
    from rich.console import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """What became of one axis.

    Args:
      group: The group it belongs to, `"batch"`, or `"parameters"` for a weight axis of no group.
      axis: Logical name.
      size: Its size; None for tokens, whose number the plan does not fix. For the batch, the items or windows.
      padded_size: The same with the zeros that are appended to make it divide.
      mesh_axes: Where it went; empty where it stays whole.
      parts: The number of parts.
      action: "sharded", "padded and sharded", "tokens sharded" (instead of the group's weights) or "replicated".
      reason: Why, in a sentence.
    """

    group: str
    axis: str
    size: int | None
    padded_size: int | None
    mesh_axes: Axes
    parts: int
    action: str
    reason: str

    @property
    def per_device(self) -> str:
        """What one device holds of it."""
        if self.padded_size is None:
            return f"1/{self.parts}" if self.parts > 1 else "all"
        share, rest = divmod(self.padded_size, self.parts)
        return f"up to {share + 1}" if rest else f"{share}"


@dataclass(frozen=True)
class Candidate:
    """One layout that was considered: a x b parts, its best batch layout and cost (None: not possible), its fate."""

    strategy: str
    weight_parts: int
    batch_parts: int
    batch_layout: str | None
    cost: Cost | None
    chosen: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Flat: the cost's numbers beside the rest, null where it is not possible."""
        cost = asdict(self.cost) if self.cost else dict.fromkeys(Cost.__dataclass_fields__)
        rest = {"strategy": self.strategy, "weight_parts": self.weight_parts, "batch_parts": self.batch_parts}
        rest["batch_layout"] = self.batch_layout
        return {**rest, **cost, "chosen": self.chosen, "reason": self.reason}


@dataclass(frozen=True, repr=False)
class Plan:
    """The layout of one encoder on one mesh.

    `print(plan)` says in plain text what was decided and why, `rich.print(plan)` in colours and as wide as the
    terminal; in a notebook, a plan that ends a cell is shown with a picture of what each device holds.

    Args:
      encoder: The name it goes by.
      given_mesh: Axis sizes of the mesh that was asked about.
      layout: Where every logical axis goes.
      reason: Why this one, in a sentence or two.
      parameters: Names and true shapes, by path.
      parameter_specs: PartitionSpec of every parameter, by path.
      length_parts: For each groups' length axis, the number its tokens are divided by (and have to be a multiple of).
      batching: Where the items of the workload would go: whole in rows, or spread.
      cost: What it costs.
      profile: Of the devices, for predicted times.
      decisions: Axis by axis.
      candidates: All layouts that were considered, this one included.
    """

    encoder: str
    given_mesh: Mapping[str, int]
    layout: Layout
    reason: str
    parameters: Mapping[str, Parameter]
    parameter_specs: Mapping[str, PartitionSpec]
    length_parts: Mapping[str, int]
    batching: Batching
    cost: Cost
    profile: DeviceProfile
    decisions: tuple[Decision, ...]
    candidates: tuple[Candidate, ...]

    @property
    def mesh(self) -> AnyMesh:
        """The mesh that all shardings are on: the given devices, all axes Auto, the model axis perhaps split."""
        return self.layout.mesh

    @property
    def strategy(self) -> str:
        """tensor, hybrid, data, replicate, or `attention=replicate, mlp=tensor`."""
        return self.layout.strategy

    @property
    def axes(self) -> Mapping[str, Axes]:
        """Mesh axes of every logical axis."""
        return self.layout.axes

    @property
    def rows_parts(self) -> int:
        """The number of parts of the batch; a batch has to be a multiple of it."""
        return self.parts(BATCH)

    @property
    def platform(self) -> str | None:
        """Of the devices: "cpu", "gpu" or "tpu"; None where the plan was made without any."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else None

    @property
    def flops_per_device(self) -> float:
        """FLOPs of the busiest device, at exact token counts."""
        return self.cost.flops_per_device

    @property
    def flops_ideal(self) -> float:
        """All FLOPs over the number of devices."""
        return self.cost.flops_ideal

    @property
    def flops_ratio(self) -> float:
        """`flops_per_device / flops_ideal`; 1 is a fair share."""
        return self.cost.flops_ratio

    @property
    def padding_ratio(self) -> float:
        """Tokens once every part of the batch is as long as the fullest, over the tokens there are."""
        return self.cost.padding_ratio

    @property
    def param_bytes_per_device(self) -> int:
        """Bytes of parameters on each device."""
        return self.cost.param_bytes_per_device

    @property
    def collectives_per_layer(self) -> int:
        """All-reduces and all-gathers in each repeated layer."""
        return self.cost.collectives_per_layer

    @property
    def batch_layout(self) -> str:
        """How the workload is laid out: `rows` of whole items, `length` (all items spread), or `rows and length`."""
        return self.batching.layout

    def predict(self, workload: Workload, batching: Batching) -> Cost:
        """What another call would cost on this layout."""
        return cost_of(
            self.layout,
            workload=workload,
            batching=batching,
            profile=self.profile,
            dtype=dtype_of(self.parameters),
            param_bytes=self.param_bytes_per_device,
        )

    def collectives(self, workload: Workload, batching: Batching) -> tuple[Collective, ...]:
        """What devices would say to each other in such a call."""
        return collectives(self.layout, workload=workload, batching=batching, dtype=dtype_of(self.parameters))

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of one parameter on the devices, padding included."""
        self._check_path(path)
        return self.layout.shape(self.parameters[path])

    def pad(self, path: str, value: Any) -> Any:
        """An array with the zeros that this parameter has appended on the devices: as it is, if it has them."""
        zeros = [(0, padded - size) for padded, size in zip(self.shape(path), value.shape, strict=True)]
        return np.pad(np.asarray(value), zeros) if any(after for _, after in zeros) else value

    def parts(self, name: str) -> int:
        """The number of parts that a logical axis is divided into."""
        self._check(name)
        return parts_of(self.mesh, self.axes[name])

    def sharding(self, path: str) -> NamedSharding:
        """The sharding of one parameter."""
        self._check_path(path)
        return NamedSharding(self.mesh, self.parameter_specs[path])

    def shardings(self, tree: Any) -> Any:
        """The same tree with the sharding of each parameter, for `jax.jit(..., out_shardings=)` and the like.

        Args:
          tree: Parameters or their shapes, with the paths that `named_parameters` gave them.
        """
        return jax.tree_util.tree_map_with_path(lambda path, _: self.sharding(path_of(path)), tree)

    def place(self, tree: Any) -> Any:
        """The same tree with each parameter where it belongs, padded where the plan pads it.

        Args:
          tree: Parameters of their true shapes, on the host or on any device.

        Raises:
          KeyError: The plan knows no parameter of that path.
          ValueError: A parameter has another shape than the plan was made for.
        """

        def put(path: tuple[Any, ...], value: Any) -> jax.Array:
            name = path_of(path)
            sharding, planned = self.sharding(name), self.parameters[name].shape
            if value.shape != planned:
                raise ValueError(f"{name} has shape {list(value.shape)}, the plan was made for {list(planned)}")
            placed: jax.Array = jax.device_put(self.pad(name, value), sharding)
            return placed

        return jax.tree_util.tree_map_with_path(put, tree)

    def spec(self, *names: str | None) -> PartitionSpec:
        """The PartitionSpec of an activation whose dimensions have these logical names (None: never divided).

        The batch comes first: another dimension does not use a mesh axis that the batch uses.

        Raises:
          RulesError: A name is unknown, or two dimensions land on one mesh axis.
        """
        taken: dict[str, str] = {}
        dimensions: list[Axes] = []
        batch = self.axes[BATCH] if BATCH in names else ()
        for name in names:
            if name is None:
                dimensions.append(())
                continue
            self._check(name)
            dimensions.append(tuple(axis for axis in self.axes[name] if name == BATCH or axis not in batch))
            for axis in dimensions[-1]:
                if axis in taken:
                    raise RulesError(f"activation {names}: {taken[axis]!r} and {name!r} both use mesh axis {axis!r}")
                taken[axis] = name
        return partition_spec(dimensions)

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """`jax.lax.with_sharding_constraint` by logical names; on one device it does nothing.

        Args:
          x: An activation, in or out of jit.
          *names: The logical name of each dimension; None for one that is never divided.

        Returns:
          The same values.

        Raises:
          IndivisibleAxisError: A dimension does not divide. Inside jit JAX itself would silently replicate.
          RulesError: As for `spec`.
          ValueError: There is not one name a dimension, or the surrounding mesh has Explicit axes.
        """
        if len(names) != x.ndim:
            raise ValueError(f"constrain: {len(names)} names {names} for {x.ndim} dimensions {list(x.shape)}")
        sharding = NamedSharding(self.mesh, self.spec(*names))
        for dimension, (name, axes) in enumerate(zip(names, sharding.spec, strict=True)):
            mesh_axes = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
            parts = parts_of(self.mesh, mesh_axes)
            if x.shape[dimension] % parts:
                raise IndivisibleAxisError(
                    f"{self.encoder}: axis {name!r} (dimension {dimension} of {list(x.shape)}) has size "
                    f"{x.shape[dimension]}, which does not divide over the {parts} devices of mesh axes "
                    f"{', '.join(map(repr, mesh_axes))} ({describe_mesh(self.mesh)}). Make it a multiple of {parts}."
                )
        if self.mesh.size == 1:
            return x
        context = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit in context.axis_types:
            raise ValueError(
                f"{self.encoder}: the mesh of jax.set_mesh ({describe_mesh(context)}) has Explicit axes, the plan's "
                f"({describe_mesh(self.mesh)}) Auto ones. Call through Plan.call, through jax.sharding.auto_axes or "
                "outside set_mesh."
            )
        constrained: jax.Array = jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
        return constrained

    def per_device(
        self,
        function: Callable[..., jax.Array],
        *args: jax.Array,
        axes: Sequence[Sequence[str | None]],
        out: Sequence[str | None],
    ) -> jax.Array:
        """Runs a function on each device by itself, on the device's own part of the arguments.

        For loops whose length each device decides for itself. A device that has all of an argument's axis sees all of
        it, and nothing is said between devices; the gradient sums over them where they share an argument.

        Args:
          function: Of these arguments.
          *args: Arrays, inside jit, on the plan's mesh.
          axes: For each argument, the logical name of each dimension.
          out: The same for the result.

        Returns:
          The result, put together.

        Raises:
          RulesError: As for `spec`.
        """
        if self.mesh.size == 1:
            return function(*args)
        context = jax.sharding.get_abstract_mesh()
        specs = tuple(self.spec(*names) for names in axes)
        # values are not followed from device to device: loops start from zeros that are the same on all
        mapped = jax.shard_map(
            function,
            mesh=self.mesh if context.empty else context,
            in_specs=specs,
            out_specs=self.spec(*out),
            check_vma=False,
        )
        result: jax.Array = mapped(*args)
        return result

    def call(self, function: Callable[..., T], *args: Any, shardings: Sequence[Any]) -> T:
        """Calls a function that uses `constrain` on the plan's mesh, whatever mesh `jax.set_mesh` has set around it.

        Arguments and results cross over between the meshes, in and out of jit and grad. On a surrounding mesh that is
        not the plan's, results have their first dimension, the batch, divided over the plan's batch axes that this mesh
        has too, and nothing else (over its Explicit axes only, where it has any).

        Args:
          function: Of these arguments, to arrays whose first dimension is the batch.
          *args: Pytrees of arrays.
          shardings: For each argument, a pytree of where the plan wants its arrays.

        Returns:
          What the function returns.

        Raises:
          RulesError: The call is inside jit or grad and the surrounding mesh has another number of devices, or it is
            inside a shard_map; names both meshes. Plans for one device run there too, with arguments that are there.
        """
        context = jax.sharding.get_abstract_mesh()
        if context.empty or (context == self.mesh.abstract_mesh and not _other_devices(self.mesh, context, ())):
            return function(*args)
        if AxisType.Manual in context.axis_types:
            if self.mesh.size > 1:
                raise RulesError(
                    f"{self._beside(context)}, and this is inside its shard_map, where each device has its own program "
                    "and a plan cannot divide one over them. Call outside shard_map, or with a plan for one device."
                )
            return function(*args)
        if _other_devices(self.mesh, context, args):
            try:
                own = jax.set_mesh(self.mesh)  # type: ignore[arg-type]
            except ValueError:  # the one way to learn that a transformation is at work
                raise RulesError(
                    f"{self._beside(context)}: other devices, and JAX allows but one set of them inside jit and "
                    "grad. No strategy changes that: use jit and grad outside that set_mesh or within "
                    "jax.set_mesh(plan.mesh), or plan for the mesh that is set; there every strategy works."
                ) from None
            with own:
                return function(*args)

        kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
        kind = AxisType.Explicit if AxisType.Explicit in context.axis_types else AxisType.Auto
        shared = [a for a in self.axes[BATCH] if kinds.get(a) is kind and context.shape[a] == self.mesh.shape[a]]
        spec = partition_spec([tuple(shared)])

        def on_plans_mesh(*args: Any) -> T:
            if self.mesh.size != context.size:  # a plan for one device: it names no mesh, its arguments are here
                return function(*args)
            # from one mesh of Auto axes to another, which may split its axes: in a trace set_mesh could not do that
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                # grad outside jit takes the mesh of its residuals from the first arguments: they have to be on this one
                out = function(*jax.device_put(args, tuple(shardings)))
                # a split for which the surrounding mesh has no names would fail in whatever the caller does next
                return jax.device_put(out, NamedSharding(self.mesh, spec))

        def on_a_mesh(x: Any) -> Any:
            # where it is on none, JAX 0.12.1 takes the division that XLA chooses for one over this mesh's axes
            return jax.sharding.reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x

        if kind is AxisType.Explicit:
            args = jax.tree.map(on_a_mesh, args)
        called: T = jax.sharding.auto_axes(on_plans_mesh, axes=context.axis_names, out_sharding=spec)(*args)
        return called

    def holdings(self) -> tuple[Holding, ...]:
        """What every device holds, in the mesh's order: which heads, columns, tokens and items. Print one, or all."""
        return holdings_of(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, strings and numbers (bytes, FLOPs)."""
        return {
            "encoder": self.encoder,
            "mesh": dict(self.given_mesh),
            "plan_mesh": dict(self.mesh.shape),
            "strategy": self.strategy,
            "reason": self.reason,
            "decisions": [asdict(decision) | {"mesh_axes": list(decision.mesh_axes)} for decision in self.decisions],
            **asdict(self.cost),
            "batch_layout": self.batch_layout,
            "device": self.profile.name,
            "rows_parts": self.rows_parts,
            "length_parts": dict(self.length_parts),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "holdings": holdings_json(self),
        }

    def diff(self, other: "Plan") -> str:
        """What changes from this plan to another, on another mesh perhaps: a line each, or "no difference"."""
        mine, theirs = facts(self), facts(other)
        none = Fact("-")
        changes = [(key, mine.get(key, none), theirs.get(key, none)) for key in mine | theirs]
        changed = [(key, a, b) for key, a, b in changes if a.text != b.text]
        keys, befores = (max((len(f"{row[i]}") for row in changed), default=0) for i in (0, 1))
        return (
            "\n".join(f"{key:<{keys}}  {a!s:<{befores}}  ->  {b}{b.times(a)}" for key, a, b in changed)
            or "no difference"
        )

    def __str__(self) -> str:
        """Tables in plain text, below 120 columns."""
        before, after = (
            "\n".join(textwrap.fill(line, WIDTH) for line in lines) for lines in (header(self), totals(self))
        )
        return "\n\n".join([before, *(table.text() for table in tables(self)), after])

    def __repr__(self) -> str:
        """One line."""
        return (
            f"<Plan of {self.encoder} on ({describe_mesh(self.mesh)}): {self.strategy}, ratio {self.flops_ratio:.2f}>"
        )

    def _repr_html_(self) -> str:
        before, after = (
            "".join(f"<p>{html.escape(line)}</p>" for line in lines) for lines in (header(self), totals(self))
        )
        return "".join([before, picture(self), *(table.html() for table in tables(self)), after])

    def __rich__(self) -> "Group":
        """What `rich.print` shows."""
        from rich.console import Group
        from rich.text import Text

        title, *before = map(Text, header(self))
        title.stylize("bold")
        after = [Text.assemble((start, "cyan"), rest) for start, rest in map(first_word, totals(self))]
        return Group(title, *before, *tables(self), Text(), *after)

    def _check_path(self, path: str) -> None:
        if path not in self.parameter_specs:
            raise KeyError(f"{self.encoder} has no parameter {path!r}{nearest(path, self.parameter_specs)}")

    def _check(self, name: str) -> None:
        if name not in self.axes:
            raise RulesError(f"{self.encoder}: there is no rule for axis {name!r}{nearest(name, self.axes)}")

    def _beside(self, context: AbstractMesh) -> str:
        return (
            f"{self.encoder}: the plan's mesh is ({describe_mesh(self.mesh)}), the surrounding one "
            f"({describe_mesh(context)})"
        )


def _other_devices(mesh: AnyMesh, context: AbstractMesh, args: Any) -> bool:
    """Whether the plan, or its arguments if it is for one device, are elsewhere than the surrounding mesh."""
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args)] if mesh.size == 1 else [mesh]
    if any(other.size != context.size for other in meshes if not other.empty):
        return True
    try:
        around = jax.sharding.get_mesh()
    except ValueError:  # JAX does not say inside jit and grad; there it finds other devices itself, and names them
        return False
    return mesh.size == context.size and isinstance(mesh, Mesh) and [*around.devices.flat] != [*mesh.devices.flat]
