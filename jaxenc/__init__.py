"""Vision and audio encoders of multimodal models in JAX and Flax: exact, and laid out on any device mesh.

encoder = jaxenc.load("moonshotai/Kimi-K2.5", mesh=jaxenc.make_mesh(data=1, model=8))
rows = encoder.encode(images=["photo.jpg"])
print(encoder.plan)
"""

from checkpoints_convert import CheckpointError
from jaxenc.encoder import Encoder, ItemRows
from jaxenc.errors import ConfigError, InputError
from jaxenc.items import AudioItem, VisionItem
from jaxenc.loading import from_config, load, plan
from jaxenc.models import EncoderInfo, encoders
from jaxenc.packing import Batch, Budget
from jaxenc.rules import default_rules
from sharding_rules import AxisRules, IndivisibleAxisError, Plan, RulesError, make_mesh

__version__ = "0.1.0"

__all__ = [
    "AudioItem",
    "AxisRules",
    "Batch",
    "Budget",
    "CheckpointError",
    "ConfigError",
    "Encoder",
    "EncoderInfo",
    "IndivisibleAxisError",
    "InputError",
    "ItemRows",
    "Plan",
    "RulesError",
    "VisionItem",
    "default_rules",
    "encoders",
    "from_config",
    "load",
    "make_mesh",
    "plan",
]
