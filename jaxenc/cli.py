"""The command line: jaxenc list | plan | encode | demo."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import jaxenc
from jaxenc import console
from jaxenc.console import Debug, Json, Output, Quiet, Version
from jaxenc.demo import run_demo
from jaxenc.errors import InputError
from sharding_rules import PROFILES, device_mesh

VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif"}

app = typer.Typer(
    help="Vision and audio encoders of multimodal models in JAX, on any device mesh.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Mesh = Annotated[str, typer.Option("--mesh", help="Axis sizes, such as data=1,model=8.")]
Tower = Annotated[str | None, typer.Option("--tower", help="vision or audio, where a checkpoint has both.")]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="auto, tensor, hybrid, data, replicate, or tensor, pad or replicate by group, such as "
        "attention=pad,mlp=tensor.",
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        "--layout",
        help="Of the batch: rows keeps items whole, length spreads the tokens of each over devices, auto does either "
        "by predicted time.",
    ),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; as stored where not given.")]


def main() -> None:
    """Entry point of `jaxenc`."""
    console.main(app)


@app.callback()
def options(version: Version = False) -> None:
    """What comes before a command."""


@app.command("list")
def list_encoders(as_json: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """The encoders there are."""
    found = jaxenc.encoders()
    lines = [
        f"{e.name:18} {e.modality:7} heads {'/'.join(map(str, dict.fromkeys(e.heads))):12} "
        f"variants: {', '.join(e.variants)}\n{'':18} {'':7} in {', '.join(e.published)}"
        for e in found
    ]
    data = [
        {
            "name": e.name,
            "modality": e.modality,
            "variants": dict(zip(e.variants, ({"heads": heads} for heads in e.heads), strict=True)),
            "published": e.published,
        }
        for e in found
    ]
    Output(as_json, quiet).result({"encoders": data}, "\n".join(lines))


@app.command()
def plan(
    name: Annotated[str, typer.Argument(metavar="NAME|SRC", help="family, family:variant, or a checkpoint.")],
    mesh: Mesh,
    batch: Annotated[int, typer.Option(help="Items encoded together.", min=1)] = 8,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens an item that enter the first block; a typical item's where not given.", min=1),
    ] = None,
    strategy: Strategy = "auto",
    tower: Tower = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; where not given as stored in a checkpoint, bfloat16 without one."),
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(help="Bytes of parameters a device may hold; the fastest that fits is then taken.", min=1),
    ] = None,
    layout: Layout = "auto",
    device: Annotated[
        str | None, typer.Option(help=f"Whose speed is predicted: {', '.join(PROFILES)}; h100 where not given.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Where every axis of an encoder would go on a mesh, and why. Needs neither weights nor devices."""
    made = jaxenc.plan(
        name,
        mesh_shape=console.parse_mesh(mesh),
        tower=tower,
        batch=batch,
        tokens=tokens,
        dtype=dtype,
        strategy=strategy,
        memory_limit=memory_limit,
        layout=layout,
        device=device,
    )
    Output(as_json, quiet).result(made.to_json(), str(made), coloured=made)


@app.command()
def encode(
    src: Annotated[str, typer.Argument(help="Hub id, folder or file of PyTorch weights, or converted checkpoint.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Pictures, videos or recordings.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the rows go: NAME.safetensors or NAME.npz.")],
    mesh: Mesh = "data=1,model=1",
    tower: Tower = None,
    dtype: Dtype = None,
    strategy: Strategy = "auto",
    layout: Layout = "auto",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Report bad files and encode the others.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Encodes files, and writes one array [rows, dim] for each."""
    if out.suffix not in (".safetensors", ".npz"):
        raise typer.BadParameter(f"{out}: the name must end in .safetensors or .npz")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out}: there is no folder {out.parent}")
    output = Output(as_json, quiet)
    devices = device_mesh(console.parse_mesh(mesh))
    encoder = jaxenc.load(src, mesh=devices, tower=tower, dtype=dtype, strategy=strategy)
    output.progress(f"{encoder!r}: encoding {len(files)} files")
    kinds = {file: _kind(encoder, file) for file in files}
    rows: dict[Path, Any] = {}
    for kind in dict.fromkeys(kinds.values()):
        chosen = [file for file in files if kinds[file] == kind]
        on_error = "skip" if skip_bad else "raise"
        encoded = encoder.encode(  # type: ignore[call-overload]
            **{kind: chosen}, on_error=on_error, layout=layout, progress=not (quiet or as_json)
        )
        rows.update(zip(chosen, encoded, strict=True))
    written = {str(file): rows[file] for file in files if rows[file] is not None}
    if not written:
        raise InputError(f"none of the {len(files)} files could be read")
    _write(out, written)
    shapes = {name: list(array.shape) for name, array in written.items()}
    skipped = [str(file) for file in files if rows[file] is None]
    lines = [f"{name}: {shape[0]} rows of {shape[1]}" for name, shape in shapes.items()]
    lines += [f"{name}: skipped" for name in skipped]
    output.result({"out": str(out), "rows": shapes, "skipped": skipped}, "\n".join([*lines, f"written to {out}"]))


@app.command()
def demo(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Hub id or folder, for real weights.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """A picture and speech through encoders with 16 and 20 heads, on eight virtual CPU devices."""
    output = Output(as_json, quiet)
    results = run_demo(model, say=output.progress if as_json else typer.echo)
    if as_json:
        output.result({"towers": results}, "")


def _kind(encoder: jaxenc.Encoder, file: Path) -> str:
    if "videos" in encoder.config.kinds and file.suffix.lower() in VIDEO_SUFFIXES:
        return "videos"
    return encoder.config.kinds[0]


def _write(out: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes beside the file and renames, so that what has the name is whole."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".npz":
            # NumPy's own format knows no bfloat16
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **{name: array.astype(np.float32) for name, array in arrays.items()})
        else:
            from safetensors.numpy import save_file

            save_file(arrays, partial)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
