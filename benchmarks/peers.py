"""Other JAX implementations, each in an environment of its own: neither can be installed beside jaxenc.

    python -m benchmarks.peers PEER --encoder NAME --dtype DTYPE --folder FOLDER

is run by `benchmarks.speed --peer PEER=PYTHON`. `flax` are the encoders of `transformers>=4.57,<4.58` with flax and
jax; `easydel` is easydel with pillow and torch, without which it cannot be imported. It reads numbers of items from
stdin and answers each with the seconds that encoding so many took, as a JSON object in a line. Weights are random: they
cost the same.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PEERS = {"flax": ("clip", "dinov2", "whisper"), "easydel": ("clip",)}  # the families of each


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of config.json")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    # what libraries print must not be taken for an answer
    answers, sys.stdout = sys.stdout, sys.stderr
    config = json.loads((args.folder / "config.json").read_text())
    make = {"flax": flax, "easydel": easydel}[args.peer]
    encode, shape = make(args.encoder.partition(":")[0], config, args.dtype)

    import jax
    import numpy as np

    for line in sys.stdin:
        given = np.random.default_rng(0).standard_normal((int(line), *shape), np.float32)
        started = time.perf_counter()
        rows = np.asarray(encode(given))
        answer = {"seconds": time.perf_counter() - started, "items": len(rows), "versions": {"jax": jax.__version__}}
        print(json.dumps(answer), file=answers, flush=True)


Made = tuple[Callable[[Any], Any], tuple[int, ...]]


def easydel(family: str, config: dict[str, Any], dtype: str) -> Made:
    """The same of easydel's CLIP, with the attention that it takes on CPU."""
    import jax
    import jax.numpy as jnp
    from easydel.modules.clip.clip_configuration import CLIPVisionConfig
    from easydel.modules.clip.modeling_clip import CLIPVisionModel
    from flax import nnx

    compute = jnp.dtype(dtype)
    sizes = CLIPVisionConfig(**config["vision_config"])
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    model = CLIPVisionModel(sizes, dtype=compute, param_dtype=compute, precision=precision, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x).last_hidden_state)

    def encode(x: Any) -> Any:
        with sizes.mesh:
            return compiled(state, x.astype(compute))

    return encode, (3, sizes.image_size, sizes.image_size)


def flax(family: str, config: dict[str, Any], dtype: str) -> Made:
    """The compiled encoder, and the shape of an item."""
    import jax
    import jax.numpy as jnp
    import transformers

    compute = jnp.dtype(dtype)
    if family == "whisper":
        sizes = transformers.WhisperConfig.from_dict(config)
        # the decoder is made too, and not run
        model = transformers.FlaxWhisperForConditionalGeneration(sizes, dtype=compute)
        shape = (sizes.num_mel_bins, 2 * sizes.max_source_positions)
        run = lambda params, x: model.encode(x, params=params).last_hidden_state  # noqa: E731
    else:
        kind = {"clip": ("CLIPVisionConfig", "FlaxCLIPVisionModel"), "dinov2": ("Dinov2Config", "FlaxDinov2Model")}
        settings, module = (getattr(transformers, name) for name in kind[family])
        sizes = settings.from_dict(config.get("vision_config", config))
        model = module(sizes, dtype=compute)
        shape = (3, sizes.image_size, sizes.image_size)
        run = lambda params, x: model(x, params=params).last_hidden_state  # noqa: E731
    params = jax.tree.map(lambda leaf: leaf.astype(compute), model.params)
    compiled = jax.jit(run)
    return lambda x: compiled(params, x.astype(compute)), shape


if __name__ == "__main__":
    main()
