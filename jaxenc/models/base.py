"""What every family has: a config, which is its sizes and its host side, and a module.

A family's file says what is its own: a method without a docstring there does what is said of it here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from jaxenc.items import Item
from jaxenc.layers.parameters import Shard
from jaxenc.layers.transformer import TransformerConfig
from jaxenc.packing import Batch, Budget, Placed
from sharding_rules import Workload


class EncoderConfig(ABC):
    """An encoder: its sizes, its module, and what the host has to know of it. One frozen dataclass a family.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        merge: patches a side that become one row, where there are patches that do.
        family: its name.
        modality: "vision" or "audio".
        kinds: arguments of `Encoder.encode` that it takes.
        published: models that use it.
        model_types: of the config.json files that describe it; "model (tower)" where the type of its `vision_config`
            decides.
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    merge: int = 1

    family: ClassVar[str]
    modality: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    published: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]]

    # --- what it is

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self | None:
        """Reads a published config.json; None where that of a model with several towers does not describe this one.

        Raises:
            ConfigError: a size is missing or wrong, or a setting names a function that this encoder does not compute.
        """

    @abstractmethod
    def build(self, *, dtype: DTypeLike) -> "EncoderModule":
        """The module; its parameters hold zeros until they are given."""

    @abstractmethod
    def mappings(self) -> Mapping[str, KeyMapping]:
        """PyTorch's keys for the parameters, by layout."""

    @property
    @abstractmethod
    def transformer(self) -> TransformerConfig:
        """The stack of blocks."""

    @property
    @abstractmethod
    def input_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Logical axes of each array that `layout` makes and the module reads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed // self.heads

    def sizes(self, *more: str) -> dict[str, Any]:
        """What the tensors of all encoders depend on, and `more` of what those of one do, by field."""
        return {name: getattr(self, name) for name in ("layers", "embed", "heads", "mlp", *more)}

    # --- how much there is

    @property
    def group(self) -> int:
        """Tokens that become one output row: those of merge x merge patches."""
        return self.merge**2

    @property
    def window(self) -> int | None:
        """Tokens of an attention window; None where an item attends as a whole."""
        return None

    @property
    def unit(self) -> int:
        """Tokens that a row's length is a multiple of: a window, or those of an output row."""
        return self.window or self.group

    @property
    @abstractmethod
    def typical_tokens(self) -> int:
        """Tokens of the item that a plan is made for where nothing else is said."""

    @abstractmethod
    def pieces(self, item: Any) -> tuple[int, ...]:
        """Tokens of each part of an item that attends by itself."""

    def item_unit(self, item: Any) -> int:
        """Tokens of an item that stay together where it is spread over devices: those of an output row."""
        return self.group

    @abstractmethod
    def output_rows(self, item: Any) -> int:
        """Rows that come out."""

    @abstractmethod
    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group."""

    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from, ascending; the last but one holds the largest item, the last several."""

    def token_axes(self, budget: Budget, parts: Mapping[str, int]) -> Mapping[str, int]:
        """Size of every token axis in a row of a budget, where each axis is divided over so many devices."""
        return {"length": budget.row, "stem_length": budget.row, "projector_length": budget.row // self.group}

    # --- items in, arrays out

    @abstractmethod
    def read(self, kind: str, source: Any, *, name: str) -> Iterable[Item]:
        """The items of one file or array, as the published processor makes them; of a long one, as they are wanted."""

    @abstractmethod
    def check(self, item: Any) -> None:
        """Refuses an item that this encoder cannot encode.

        Raises:
            InputError: names the item and what is wrong with it.
        """

    @abstractmethod
    def layout(self, items: Sequence[Any], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]) -> Batch:
        """The arrays of one batch; of an empty one, their shapes. `parts` are those of the batch and of token axes."""


class EncoderModule(nnx.Module):
    """The arrays of a batch -> output rows."""

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b rows out"], dict[int, Float[Array, "b n embed"]]]:
        """Encodes one batch.

        Args:
            inputs: the arrays of the config's `layout`.
            shard: constrains activations by name.
            capture: blocks (from 0) whose outputs are wanted too.

        Returns:
            Output rows, and the captured blocks' outputs.
        """
        raise NotImplementedError
