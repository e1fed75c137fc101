"""The command line: checkpoints-convert inspect | convert | verify | export."""

from pathlib import Path
from typing import Annotated

import jax
import typer

import checkpoints_convert
import jaxenc
from checkpoints_convert import CheckpointError
from checkpoints_convert.convert import check_destination
from jaxenc import console
from jaxenc.console import Debug, Json, Output, Quiet, Version
from jaxenc.loading import open_checkpoint
from jaxenc.models import published_configs

app = typer.Typer(
    help="PyTorch checkpoints <-> checkpoints for JAX: only the bytes that are needed, both ways.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Src = Annotated[str, typer.Argument(metavar="SRC", help="Hub id, or folder or file of PyTorch safetensors.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
Tower = Annotated[str | None, typer.Option(help="vision or audio, where the checkpoint has both.")]


def main() -> None:
    """Entry point of `checkpoints-convert`."""
    # weights pass through the host; an accelerator would only be in the way
    jax.config.update("jax_platforms", "cpu")
    console.main(app)


@app.callback()
def options(version: Version = False) -> None:
    """What comes before a command."""


@app.command()
def inspect(
    src: Src, revision: Revision = None, as_json: Json = False, quiet: Quiet = False, debug: Debug = False
) -> None:
    """What towers, tensors and bytes are there, and which would be read; fails where `convert` would."""
    source = checkpoints_convert.open_source(src, revision=revision)
    towers = published_configs(source.config, name=source.name)
    mappings = {config.family: checkpoints_convert.detect(source, config.mappings()) for config in towers}
    found = checkpoints_convert.inspect(source, mappings)
    lines = [f"{found['source']}: {found['tensors']} tensors in {found['files']} files"]
    for family, tower in found["towers"].items():
        lines.append(
            f"{family} ({tower['layout']} layout, under {', '.join(tower['prefixes'])}): "
            f"{len(tower['tensors'])} tensors, {tower['parameters'] / 1e6:,.1f} M parameters, "
            f"{tower['size_bytes'] / 1e6:,.1f} MB ({', '.join(tower['size_bytes_by_dtype'])}) would be read"
        )
        lines += [f"  {size / 1e6:10,.1f} MB of {file}" for file, size in tower["size_bytes_by_file"].items()]
        lines += [f"  problem: {problem}" for problem in tower["problems"]]
    if found["ignored"]:
        lines.append("ignored: " + ", ".join(f"{prefix}.* ({count})" for prefix, count in found["ignored"].items()))
    problems = sum(len(tower["problems"]) for tower in found["towers"].values())
    if problems:
        lines.append(f"convert would refuse this: {problems} problem{'s' * (problems != 1)}")
    Output(as_json, quiet).result(found, "\n".join(lines))
    if problems:
        raise typer.Exit(1)


@app.command()
def convert(
    src: Src,
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    tower: Tower = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; as stored where not given.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the converted checkpoint at DST.")] = False,
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Writes one tower as a checkpoint that `jaxenc.load` reads on any mesh."""
    output = Output(as_json, quiet)
    check_destination(dst, source=src, overwrite=overwrite)
    output.progress(f"reading {src}")
    encoder = jaxenc.load(src, tower=tower, dtype=dtype, revision=revision)
    leaves = jax.tree.leaves(encoder.params)
    output.progress(f"writing {dst}")
    encoder.save(dst, overwrite=overwrite)
    data = {
        "source": src,
        "destination": str(dst),
        "encoder": encoder.config.family,
        "dtype": encoder.dtype.name,
        "parameters": sum(leaf.size for leaf in leaves),
        "size_bytes": sum(leaf.nbytes for leaf in leaves),
    }
    text = (
        f"{encoder.config.family}: {data['parameters'] / 1e6:,.1f} M parameters, {data['size_bytes'] / 1e6:,.1f} MB of "
        f"{encoder.dtype.name} in {dst}"
    )
    output.result(data, text)


@app.command()
def verify(
    src: Src,
    dst: Annotated[Path, typer.Argument(metavar="DST", help="What `convert` made of it.")],
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compares every tensor with what the inverse mapping makes of the converted checkpoint, bit for bit."""
    stored = open_checkpoint(dst)
    source = checkpoints_convert.open_source(src, revision=revision)
    mapping = checkpoints_convert.detect(source, stored.config.mappings())
    report = checkpoints_convert.verify(source, mapping, dst)
    data = {
        "source": src,
        "destination": str(dst),
        "exact": report.exact,
        "widened": report.widened,
        "rounded": report.rounded,
        "differing": list(report.differing),
        "nonfinite": report.nonfinite,
        "ok": report.ok,
    }
    lines = [f"{report.exact} tensors equal bit for bit"] if report.exact or not report.widened else []
    if report.widened:
        lines.append(f"{report.widened} tensors equal (stored as {stored.dtype.name})")
    if report.rounded:
        lines.append(f"{report.rounded} tensors equal after rounding to {stored.dtype.name}")
    if report.nonfinite:
        lines.append(f"{report.nonfinite} values of the source are NaN or infinite")
    Output(as_json, quiet).result(data, "\n".join(lines))
    if not report.ok:
        raise CheckpointError(f"{dst}: differs from {src}", report.differing)


@app.command()
def export(
    dst: Annotated[Path, typer.Argument(metavar="DST", help="A converted checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    layout: Annotated[
        str, typer.Option(help="original (as published) or transformers (as it names them).")
    ] = "original",
    max_shard_size: Annotated[int, typer.Option(help="Bytes a file may have.", min=1)] = 5_000_000_000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the export at OUT.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Writes a converted checkpoint as PyTorch safetensors again."""
    mappings = open_checkpoint(dst).config.mappings()
    if layout not in mappings:
        raise typer.BadParameter(f"--layout {layout}: there is {', '.join(mappings)}")
    files = checkpoints_convert.export_checkpoint(
        dst, mappings[layout], out, max_shard_bytes=max_shard_size, overwrite=overwrite
    )
    data = {"source": str(dst), "destination": str(out), "layout": layout, "files": files}
    Output(as_json, quiet).result(data, f"{out}: {', '.join(files)}")
