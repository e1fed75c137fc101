"""Logical axis names onto the axes of a device mesh, decided in one place and explained.

`resolve(parameters, mesh, rules=..., workload=...)` takes names, shapes, a mesh (abstract or not) and the work to
be done, and returns a `Plan`: a sharding for every parameter, constraints for activations by logical name, and
the reasons.
"""

from sharding_rules.batching import Batching
from sharding_rules.costs import Collective, Cost
from sharding_rules.holdings import BatchShare, Holding, Share
from sharding_rules.mesh import device_mesh, make_mesh, split_axis
from sharding_rules.plan import Candidate, Decision, Plan
from sharding_rules.profiles import PROFILES, DeviceProfile
from sharding_rules.resolver import resolve
from sharding_rules.rules import AxisRules, IndivisibleAxisError, Parameter, RulesError
from sharding_rules.trees import named_parameters
from sharding_rules.workload import GroupWork, Workload

__all__ = [
    "PROFILES",
    "AxisRules",
    "BatchShare",
    "Batching",
    "Candidate",
    "Collective",
    "Cost",
    "Decision",
    "DeviceProfile",
    "GroupWork",
    "Holding",
    "IndivisibleAxisError",
    "Parameter",
    "Plan",
    "RulesError",
    "Share",
    "Workload",
    "device_mesh",
    "make_mesh",
    "named_parameters",
    "resolve",
    "split_axis",
]
