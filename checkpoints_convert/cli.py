"""The command line: checkpoints-convert inspect | convert | verify | export."""

import logging
import math
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

import checkpoints_convert
from checkpoints_convert import CheckpointError, rows
from checkpoints_convert.convert import check_destination
from jaxenc import console
from jaxenc.console import Debug, Json, Output, Quiet, Version
from jaxenc.encoder import checkpoint_metadata
from jaxenc.loading import StoredEncoder, open_checkpoint
from jaxenc.models import published_configs
from jaxenc.progress import BytesBar

app = typer.Typer(
    help="PyTorch checkpoints <-> checkpoints for JAX: only the bytes that are needed, both ways.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Src = Annotated[str, typer.Argument(metavar="SRC", help="Hub id, or folder or file of PyTorch safetensors.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be read and written, and touch nothing.")]
DTYPES = ("float32", "bfloat16", "float16")
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
    """What towers, tensors and bytes are there, and which would be read; fails where `convert` would.

    Of a converted checkpoint: what it holds, and where that came from.
    """
    if checkpoints_convert.is_checkpoint(src):
        converted, said = _inspect_converted(src)
        Output(as_json, quiet).result(converted, said)
        return
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
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16, to the nearest (ties to even); as it comes if not given."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the converted checkpoint at DST.")] = False,
    dry_run: DryRun = False,
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Writes one tower as a checkpoint that `jaxenc.load` reads on any mesh, a piece at a time."""
    if dtype not in (None, *DTYPES):
        raise typer.BadParameter(f"--dtype {dtype}: it can be {', '.join(DTYPES)}")
    output = Output(as_json, quiet)
    check_destination(dst, source=src, overwrite=overwrite)
    bar = BytesBar(shown=not quiet)
    stored = open_checkpoint(src, tower=tower, revision=revision, progress=bar.fetched)
    source = stored.source or src
    read = _read(stored)
    data: dict[str, Any] = {"source": src, "destination": str(dst), "encoder": stored.config.family}
    if dry_run:
        arrays = checkpoints_convert.incoming(source, stored.mapping, dtype).values()
        dtypes = " and ".join(dict.fromkeys(array.dtype.name for array in arrays))
        size_bytes = sum(array.nbytes for array in arrays)
        data |= {"dry_run": True, "dtype": dtypes, "tensors": _tensors(stored), "size_bytes": size_bytes}
        lines = [f"would read {sum(read.values()) / 1e6:,.1f} MB, {_tensors(stored)} tensors, of {len(read)} files:"]
        lines += [f"  {size / 1e6:10,.1f} MB of {file}" for file, size in read.items()]
        lines.append(f"would write {stored.config.family}: {size_bytes / 1e6:,.1f} MB of {dtypes} in {dst}")
        output.result(data | {"read_bytes_by_file": read}, "\n".join(lines))
        return
    with bar.counting(f"converting {src}", sum(read.values())) as progress:
        done = checkpoints_convert.convert_checkpoint(
            source,
            stored.mapping,
            dst,
            dtype=dtype,
            metadata=checkpoint_metadata(stored.config, stored.provenance),
            overwrite=overwrite,
            progress=progress,
        )
    for count, what in (
        (done.nonfinite, "NaN or infinite in the source; they are stored as they are"),
        (done.overflowed, f"too large for {dtype}: infinite now"),
        (done.underflowed, f"too small for {dtype}: zero now"),
    ):
        if count:
            logging.getLogger(__name__).warning(f"warning: {count} value{'s are' if count > 1 else ' is'} {what}")
    dtypes = " and ".join(done.dtypes)
    data |= {"dtype": dtypes, "parameters": done.parameters, "size_bytes": done.size_bytes}
    counts = {"nonfinite": done.nonfinite, "overflowed": done.overflowed, "underflowed": done.underflowed}
    size = f"{done.parameters / 1e6:,.1f} M parameters, {done.size_bytes / 1e6:,.1f} MB of {dtypes}"
    output.result(data | counts, f"{stored.config.family}: {size} in {dst}")


@app.command()
def verify(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="What was converted; or DST alone, to check its own checksums.")
    ],
    dst: Annotated[Path | None, typer.Argument(metavar="[DST]", help="What `convert` made of it.")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="torch", help="Also compare rows with those of transformers, given SRC's own tensors."),
    ] = None,
    tower: Tower = None,
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compares every tensor with what the inverse mapping makes of the converted checkpoint, bit for bit.

    Without SRC, compares the converted checkpoint with the checksums that were kept when it was written. Against torch,
    encodes a photograph, a video or speech too, with DST or without it with SRC.
    """
    if against not in (None, "torch"):
        raise typer.BadParameter(f"--against {against}: it can be torch")
    output = Output(as_json, quiet)
    if dst is None and against is None:
        _verify_checksums(src, output)
        return
    reference = rows.require() if against else ""  # before anything is read
    bar = BytesBar(shown=not quiet)
    source = checkpoints_convert.open_source(src, revision=revision, progress=bar.fetched)
    stored = open_checkpoint(src if dst is None else dst, tower=tower, revision=None if dst else revision)
    mapping = checkpoints_convert.detect(source, stored.config.mappings())
    data: dict[str, Any] = {"source": src}
    lines: list[str] = []
    problems: list[str] = []
    if dst is not None:
        data["destination"] = str(dst)
        total = sum(array.nbytes for array in checkpoints_convert.stored_arrays(dst).values())
        with bar.counting(f"verifying {dst}", total) as progress:
            report = checkpoints_convert.verify(source, mapping, dst, progress=progress)
        data |= {
            "exact": report.exact,
            "widened": report.widened,
            "rounded": report.rounded,
            "differing": list(report.differing),
            "nonfinite": report.nonfinite,
        }
        problems += report.differing
        if report.exact or not report.widened:
            lines.append(f"{report.exact} tensors equal bit for bit")
        if report.widened:
            lines.append(f"{report.widened} tensors equal (stored as {stored.dtype.name})")
        if report.rounded:
            lines.append(f"{report.rounded} tensors equal after rounding to {stored.dtype.name}")
        if report.nonfinite:
            lines.append(f"{report.nonfinite} values of the source are NaN or infinite")
    if against:
        size = sum(source.info(name).size_bytes for name in mapping.names)
        with bar.counting(f"comparing with {reference}", size):
            found = rows.differences(source, mapping, stored.config, dst)
        data["against"] = found.data
        lines += found.lines
        problems += found.problems
    output.result(data | {"ok": not problems}, "\n".join(lines))
    if problems:
        raise CheckpointError(f"{src if dst is None else dst}: differs from {src if dst else reference}", problems)


@app.command()
def export(
    dst: Annotated[Path, typer.Argument(metavar="DST", help="A converted checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    layout: Annotated[
        str, typer.Option(help="original (as published) or transformers (as it names them).")
    ] = "original",
    max_shard_size: Annotated[str, typer.Option(help="What a file may have: bytes, or such as 5GB or 500MiB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the export at OUT.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Writes a converted checkpoint as PyTorch safetensors again, and says what is known of them."""
    output, most = Output(as_json, quiet), parse_size(max_shard_size)
    stored = open_checkpoint(dst)
    claim = checkpoints_convert.export_claim(dst)
    mappings = stored.config.mappings()
    if layout not in mappings:
        raise typer.BadParameter(f"--layout {layout}: there is {', '.join(mappings)}")
    mapping = mappings[layout]
    if layout == stored.provenance.get("layout"):  # with prefixes spelt as they came
        mapping = mapping.located(set(stored.provenance.get("tensors", ())))
    arrays = checkpoints_convert.stored_arrays(dst)
    shards = checkpoints_convert.export_shards(arrays, mapping, max_shard_bytes=most)
    total = sum(shard.size_bytes for shard in shards)
    files = [shard.file for shard in shards]
    data = {
        "source": str(dst),
        "destination": str(out),
        "layout": layout,
        "files": files,
        "exact": claim.exact,
        "claim": claim.text,
    }
    if dry_run:
        lines = [f"would read {total / 1e6:,.1f} MB of {dst}", f"would write into {out}:"]
        lines += [f"  {s.size_bytes / 1e6:10,.1f} MB, {len(s.tensors)} tensors, {s.file}" for s in shards]
        written = {shard.file: shard.size_bytes for shard in shards}
        count = sum(len(shard.tensors) for shard in shards)
        output.result(
            data | {"dry_run": True, "tensors": count, "written_bytes_by_file": written},
            "\n".join([*lines, claim.text]),
        )
        return
    with BytesBar(shown=not quiet).counting(f"exporting {dst}", total) as progress:
        checkpoints_convert.export_checkpoint(
            dst, mapping, out, max_shard_bytes=most, overwrite=overwrite, progress=progress
        )
    output.result(data, f"{out}: {', '.join(files)}\n{claim.text}")


def _inspect_converted(path: str) -> tuple[dict[str, Any], str]:
    """What there is in a converted checkpoint, as JSON and in words."""
    metadata, claim = checkpoints_convert.read_metadata(path), checkpoints_convert.export_claim(path)
    tensors: dict[str, dict[str, Any]] = {}
    for name, stored in checkpoints_convert.stored_targets(path).items():
        size, dtype = math.prod(stored.shape), jnp.dtype(stored.dtype)
        tensors[name] = {"shape": list(stored.shape), "dtype": dtype.name, "size_bytes": size * dtype.itemsize}
    provenance = {key: value for key, value in metadata["provenance"].items() if key != "tensors"}
    found: dict[str, Any] = {
        "source": path,
        "converted": True,
        "encoder": metadata["family"],
        "sizes": metadata["sizes"],
        "provenance": provenance,
        "parameters": sum(math.prod(tensor["shape"]) for tensor in tensors.values()),
        "size_bytes": sum(tensor["size_bytes"] for tensor in tensors.values()),
        "exact": claim.exact,
        "claim": claim.text,
        "tensors": tensors,
    }
    dtypes = ", ".join(sorted({tensor["dtype"] for tensor in tensors.values()}))
    lines = [
        f"{path}: a converted checkpoint of {found['encoder']}, {len(tensors)} tensors, "
        f"{found['parameters'] / 1e6:,.1f} M parameters, {found['size_bytes'] / 1e6:,.1f} MB ({dtypes})"
    ]
    if "source" in provenance:
        revision = f" at revision {provenance['revision']}" if provenance.get("revision") else ""
        lines.append(f"from {provenance['source']}{revision}, {provenance['layout']} layout")
    return found, "\n".join([*lines, claim.text])


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MiB or 1000.

    Raises:
        typer.BadParameter: It is not one, or it is nothing.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kMGT]?)(i?)B)?", text.strip(), re.IGNORECASE)
    size = 0
    if match:
        number, prefix, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper()))
    if size < 1:
        raise typer.BadParameter(f"{text!r}: write a size as 5GB, 500MiB or a number of bytes")
    return size


def _verify_checksums(dst: str, output: Output) -> None:
    total = sum(array.nbytes for array in checkpoints_convert.stored_arrays(dst).values())
    with BytesBar(shown=not output.quiet).counting(f"verifying {dst}", total) as progress:
        same, differing, without = checkpoints_convert.verify_checksums(dst, progress)
    data = {
        "destination": dst,
        "same": len(same),
        "differing": differing,
        "without_checksum": without,
        "ok": not (differing or without),
    }
    lines = [f"{len(same)} parameters are as they were written"] if same or not without else []
    if without:
        lines.append(f"{len(without)} parameters have no checksum: give SRC too")
    output.result(data, "\n".join(lines))
    if differing or without:
        problems = [*differing, *(f"{name}: has no checksum" for name in without)]
        raise CheckpointError(f"{dst}: is not known to be as it was written", problems)


def _tensors(stored: StoredEncoder) -> int:
    if stored.mapping is None:
        assert stored.path is not None
        return len(checkpoints_convert.stored_targets(stored.path))
    return len(stored.mapping.names)


def _read(stored: StoredEncoder) -> dict[str, int]:
    """Bytes that are read of each file."""
    if stored.source is None or stored.mapping is None:
        assert stored.path is not None
        arrays = checkpoints_convert.stored_arrays(stored.path)
        return {str(stored.path): sum(array.nbytes for array in arrays.values())}
    sizes: dict[str, int] = {}
    for name in stored.mapping.names:
        info = stored.source.info(name)
        sizes[info.file] = sizes.get(info.file, 0) + info.size_bytes
    return dict(sorted(sizes.items()))
