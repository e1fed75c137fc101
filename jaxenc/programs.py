"""The programs of one encoder: one for each budget, compiled as the platform computes it fastest."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxenc.layers.implementations import IMPLEMENTATIONS, AttentionName
from jaxenc.layers.linear import Matrices, products_of_matrices
from jaxenc.layers.parameters import Shard, flatten
from jaxenc.models import abstract_module
from jaxenc.models.base import EncoderConfig
from jaxenc.packing import Budget
from sharding_rules import Plan

Params = dict[str, Any]
PRECISIONS = {"ieee": "highest", "tf32": "tensorfloat32"}
# On CPU, of one device. A loop over stacked layers copies a layer's weights before it uses them: half the time of a
# batch of 250 tokens in bfloat16, and a hundredth of one of 10,000. A program with a copy of the block for every layer
# copies none, and takes a tenth of a second a layer longer to compile
APART_TOKENS = 2048
APART_BYTES = 2**20
# To here one product uses two threads badly in Eigen, and a third less time goes into two of half the channels each
PARTS_TOKENS, PARTS = 512, 2
# So many at a time, an MLP's columns stay in the cache: two fifths less time for 4,096 tokens in bfloat16, an eighth in
# float32, and the same for 1,024
TOKENS = 512
# Of so many terms PyTorch's float32 sums (MKL) are off by 3.5e-7, one term after the other by 1.2e-6
TERMS, SUM_ERROR = 4096, 5e-7
# Channels. On wide registers XLA's sums of 512 terms err 1.4 times as much as PyTorch's, those of 768 and more 1.2
WIDE = 768


class Programs:
    """Parameters and a batch's arrays -> rows.

    Attributes:
        compiled: budget -> its program, so far as there was need of it.
        jitted: (params, inputs, capture) -> rows and captured blocks, compiled for whatever shapes come.
    """

    def __init__(
        self, config: EncoderConfig, plan: Plan, *, dtype: DTypeLike, precision: str, attention: AttentionName | None
    ):
        """Compiles nothing yet; see `Encoder` for the arguments.

        Raises:
            ValueError: no such precision or attention.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; it can be {' or '.join(map(repr, PRECISIONS))}")
        if attention not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"attention is {attention!r}; it can be {', '.join(map(repr, IMPLEMENTATIONS))}, or None")
        self.config = config
        self.plan = plan
        self.dtype = jnp.dtype(dtype)
        self.precision = precision
        self.attention = attention
        self.compiled: dict[Budget, jax.stages.Compiled] = {}
        self.jitted = jax.jit(self._run, static_argnames="capture")
        self._graph, self._abstract = nnx.split(abstract_module(config, dtype=dtype))

    @property
    def mesh(self) -> Mesh:
        """The plan's devices."""
        assert isinstance(self.plan.mesh, Mesh)  # parameters are on devices
        return self.plan.mesh

    def input_sharding(self, name: str) -> NamedSharding:
        """Where an array of a batch goes."""
        return NamedSharding(self.mesh, self.plan.spec(*self.config.input_axes[name]))

    @property
    def parts(self) -> Mapping[str, int]:
        """Parts of the batch and of each token axis."""
        return {"batch": self.plan.rows_parts, **self.plan.length_parts}

    def shapes(self, budget: Budget) -> dict[str, jax.ShapeDtypeStruct]:
        """Of the arrays of a batch."""
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.input_sharding(name))
            for name, array in self.config.layout((), (), budget, self.parts).inputs.items()
        }

    def apart(self, budget: Budget) -> bool:
        """Whether its program takes an array for each layer, as `layers_apart` makes them."""
        return self._one_cpu and budget.tokens <= APART_TOKENS and self._layer_bytes >= APART_BYTES

    def layers_apart(self, params: Params) -> Params:
        """Parameters with a list of arrays, one for each layer, for every stacked one, whose memory they share."""
        cut = {}
        for path, array in flatten(params).items():
            if self.plan.parameters[path].axes[:1] == ("layers",):
                cut[path] = [jax.device_put(layer, self.mesh.devices.flat[0]) for layer in np.asarray(array)]
            else:
                cut[path] = array
        return unflatten_dict(cut, sep="/")

    def lower(self, budget: Budget, params: Params) -> jax.stages.Lowered:
        """Its program, not compiled yet."""
        # the plan's own mesh, whatever mesh the caller has set around this
        with jax.set_mesh(self.mesh), products_of_matrices(self.matrices(budget)):
            return self.jitted.lower(params, self.shapes(budget), capture=())

    def program(self, budget: Budget, params: Params) -> jax.stages.Compiled:
        """Its program, compiled at the first call."""
        if budget not in self.compiled:
            self.compiled[budget] = self.lower(budget, params).compile(compiler_options=self.options())
        return self.compiled[budget]

    def matrices(self, budget: Budget) -> Matrices | None:
        """How its products are written.

        XLA on CPU copies a kernel of several axes before it multiplies, its convolutions in 16 bits take twice as long
        as the products of which they are sums, and what it makes of many tokens goes through memory.
        """
        if not self._one_cpu:
            return None
        parts = PARTS if self._eigen and budget.tokens <= PARTS_TOKENS else 1
        return Matrices(parts, taps=not self._eigen, tokens=TOKENS)

    def options(self) -> dict[str, str | bool]:
        """What the compiler is told."""
        return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"} if self._eigen else {}

    @property
    def _layer_bytes(self) -> int:
        stacked = (p.shape[1:] for p in self.plan.parameters.values() if p.axes[:1] == ("layers",))
        return self.dtype.itemsize * sum(map(math.prod, stacked))

    @property
    def _eigen(self) -> bool:
        """Whether products come from Eigen.

        XLA takes its CPU products from YNNPACK, which is a third faster where registers are wide, and there about as
        good as PyTorch where channels are many. Elsewhere its float32 sums err up to three times as much, and Eigen's
        do not. (YNNPACK's sums without products err less than XLA's own, and are faster, everywhere.) Not on several
        (virtual) devices: their programs share one pool of threads, where Eigen can pack the next block over one that
        is still to be used.
        """
        if not self._one_cpu or self.dtype != jnp.float32:
            return False
        return self.config.embed < WIDE or sum_error() > SUM_ERROR

    @property
    def _one_cpu(self) -> bool:
        return self.mesh.size == 1 and self.plan.platform == "cpu"

    def _run(self, params: Params, inputs: Mapping[str, jax.Array], *, capture: tuple[int, ...]) -> Any:
        state = jax.tree.map(lambda leaf: leaf, self._abstract)
        # the compiler takes layers that are stacked and then used one by one for what they were
        nnx.replace_by_pure_dict(state, jax.tree.map(_stacked, params, is_leaf=_is_apart))
        apart = any(map(_is_apart, jax.tree.leaves(params, is_leaf=_is_apart)))
        module = nnx.merge(self._graph, state)
        # the one place where products get their precision: XLA's default for float32 is TF32 on recent GPUs
        precision = PRECISIONS[self.precision] if self.dtype == jnp.float32 else None
        with jax.default_matmul_precision(precision):
            return module(inputs, shard=Shard(self.plan, self.attention, layers_apart=apart), capture=capture)


@cache
def sum_error() -> float:
    """How far XLA's float32 products of `TERMS` terms are off on this CPU: root mean square, of the products' own."""
    x, kernel = np.random.default_rng(0).standard_normal((2, 64, TERMS), np.float32)
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        products = np.asarray(jax.jit(lambda x, kernel: x @ kernel.T)(x, kernel))
    truth = x.astype(np.float64) @ kernel.astype(np.float64).T
    return float(np.sqrt(np.square(products - truth).mean() / np.square(truth).mean()))


def _is_apart(leaf: Any) -> bool:
    return isinstance(leaf, list)


def _stacked(leaf: Any) -> jax.Array:
    return jnp.stack(leaf) if _is_apart(leaf) else leaf
