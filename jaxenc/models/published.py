"""Reading the sizes of a published config.json, whichever names it gives them."""

from collections.abc import Mapping
from typing import Any

from jaxenc.errors import ConfigError
from jaxenc.layers.mlp import Activation

Keys = tuple[str, ...]
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu_erf",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
LISTS = ("merge_kernel_size",)  # sizes that may be published as one a dimension


def read_sizes(family: str, config: Mapping[str, Any], keys: Mapping[str, Keys]) -> dict[str, Any]:
    """The size that each field has, under the first of its published names.

    Args:
        family: for the error.
        config: the encoder's part of a config.json.
        keys: field -> names it is published under.

    Returns:
        field -> whole number of at least 1, or a list of them where it may be one.

    Raises:
        ConfigError: all fields for which no name is there, two names disagree, or the value is no size, together.
    """
    found: dict[str, Any] = {}
    problems = []
    wrong = []
    for field, names in keys.items():
        values = {name: config[name] for name in names if config.get(name) is not None}
        if not values:
            problems.append(f"none of {', '.join(names)} is there")
        elif len({str(value) for value in values.values()}) > 1:
            problems.append(f"{' and '.join(f'{name} = {value}' for name, value in values.items())} disagree")
        else:
            name, value = next(iter(values.items()))
            sizes = value if name in LISTS and isinstance(value, list | tuple) and value else [value]
            # bool is an int to Python
            if not all(type(size) is int and size >= 1 for size in sizes):
                wrong.append(f"{name} is {value!r}")
            found[field] = value
    if wrong:
        problems.append(f"{', '.join(wrong)}; a whole number of at least 1 is needed")
    if problems:
        raise ConfigError(f"{family}: config.json: {'; '.join(problems)}")
    return found


def require(family: str, config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuses settings that would need another function than the one this family computes.

    Raises:
        ConfigError: every setting that is there and differs, together.
    """
    wrong = [
        f"{key} is {config[key]!r}, this encoder computes {value!r}"
        for key, value in known.items()
        if config.get(key, value) != value
    ]
    if wrong:
        raise ConfigError(f"{family}: config.json: {'; '.join(wrong)}")


def require_rotary(family: str, *, embed: int, heads: int) -> None:
    """Refuses heads of a width that a two-dimensional rotary embedding cannot turn.

    Raises:
        ConfigError: it is no multiple of 4.
    """
    if embed % heads or embed // heads % 4:
        raise ConfigError(
            f"{family}: hidden size {embed} over {heads} heads is not a multiple of 4 a head, as the two-dimensional "
            "rotary embedding needs"
        )


def activation_of(family: str, config: Mapping[str, Any], key: str) -> Activation:
    """The activation that a config.json names.

    Raises:
        ConfigError: it is not known here.
    """
    if config[key] not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ConfigError(f"{family}: config.json: {key} is {config[key]!r}; known are {known}")
    return ACTIVATIONS[config[key]]


def with_defaults(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what its class has by default where it says nothing, or null."""
    return {**defaults, **{key: value for key, value in config.items() if value is not None}}
