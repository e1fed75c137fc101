"""Another JAX implementation: the Flax encoders of transformers 4.57, which has CLIP's, DINOv2's and Whisper's.

    python -m benchmarks.peers --encoder NAME --dtype DTYPE --folder FOLDER

is run by `benchmarks.speed --peer-python` with an interpreter that has `transformers>=4.57,<4.58`, flax and jax: it
cannot have jaxenc too, which needs a newer huggingface_hub. It reads numbers of items from stdin and answers each with
the seconds that encoding so many took, as a JSON object in a line. Weights are random: they cost the same.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PEERS = ("clip", "dinov2", "whisper")  # families


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of config.json")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    # what libraries print must not be taken for an answer
    answers, sys.stdout = sys.stdout, sys.stderr
    config = json.loads((args.folder / "config.json").read_text())
    encode, shape = made(args.encoder.partition(":")[0], config, args.dtype)

    import jax
    import numpy as np

    for line in sys.stdin:
        given = np.random.default_rng(0).standard_normal((int(line), *shape), np.float32)
        started = time.perf_counter()
        rows = np.asarray(encode(given))
        answer = {"seconds": time.perf_counter() - started, "items": len(rows), "versions": {"jax": jax.__version__}}
        print(json.dumps(answer), file=answers, flush=True)


def made(family: str, config: dict[str, Any], dtype: str) -> tuple[Callable[[Any], Any], tuple[int, ...]]:
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
