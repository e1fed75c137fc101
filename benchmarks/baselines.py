"""How others put items on devices: what ours is measured against."""

from collections.abc import Sequence


def greedy(tokens: Sequence[int], devices: int) -> tuple[list[int], list[int], list[int]]:
    """The serving engines' rule: whole items, the largest first, each to the device with the fewest tokens so far.

    Equal sizes keep their order, and of equal devices the first takes the next.

    Returns:
        Items device by device, how many each device has, and its tokens.
    """
    assigned: list[list[int]] = [[] for _ in range(devices)]
    loads = [0] * devices
    for item in sorted(range(len(tokens)), key=lambda item: -tokens[item]):
        device = loads.index(min(loads))
        assigned[device].append(item)
        loads[device] += tokens[item]
    return [item for items in assigned for item in items], [len(items) for items in assigned], loads
