"""PyTorch checkpoints to named JAX arrays and back, reading only what each device needs.

source = open_source("moonshotai/Kimi-K2.5")
mapping = detect(source, mappings.kimi_k25.mappings(layers=27, embed=1152, ...))
targets = {path: Target(shape, "bfloat16", sharding) for path, shape in mapping.shapes.items()}
params = load_parameters(source, mapping, targets)
save_checkpoint("kimi", params, {"source": source.name})
"""

from checkpoints_convert import mappings
from checkpoints_convert.convert import (
    Conversion,
    Target,
    checksums,
    convert_checkpoint,
    incoming,
    is_checkpoint,
    load_parameters,
    read_metadata,
    restore_checkpoint,
    restore_host,
    save_checkpoint,
    stored_arrays,
    stored_targets,
    strip_padding,
)
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.export import Claim, export_checkpoint, export_claim, export_parameters, export_shards
from checkpoints_convert.mapping import Entry, Mapping, Reorder, detect
from checkpoints_convert.sources import Source, TensorInfo, open_source
from checkpoints_convert.verify import Report, inspect, verify, verify_checksums

__all__ = [
    "CheckpointError",
    "Claim",
    "Conversion",
    "Entry",
    "Mapping",
    "Reorder",
    "Report",
    "Source",
    "Target",
    "TensorInfo",
    "checksums",
    "convert_checkpoint",
    "detect",
    "export_checkpoint",
    "export_claim",
    "export_parameters",
    "export_shards",
    "incoming",
    "inspect",
    "is_checkpoint",
    "load_parameters",
    "mappings",
    "open_source",
    "read_metadata",
    "restore_checkpoint",
    "restore_host",
    "save_checkpoint",
    "stored_arrays",
    "stored_targets",
    "strip_padding",
    "verify",
    "verify_checksums",
]
