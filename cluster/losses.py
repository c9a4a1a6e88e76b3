"""What Ray loses by itself: workers, machines, and the payloads that were on them. Decides nothing but what is gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.machines import ray_machines

# Ray's `max_direct_call_object_size`: results up to this size travel with the reply and are kept by the driver.
_INLINE_BYTES = 100 << 10


def is_lost_by_ray(cause: BaseException) -> bool:
    """Tell a crash of a worker or machine, or a payload that went with it, from what a function raised."""
    from ray import exceptions

    return isinstance(
        cause,
        exceptions.WorkerCrashedError
        | exceptions.NodeDiedError
        | exceptions.LocalRayletDiedError
        | exceptions.ObjectLostError,
    )


def is_out_of_memory(cause: BaseException) -> bool:
    """Tell whether Ray killed a worker because its machine ran out of memory."""
    from ray import exceptions

    return isinstance(cause, exceptions.OutOfMemoryError)


def holds_error(ref: Any) -> bool:
    """Tell whether a reference holds an error; Ray logs those that nobody ever looked at."""
    import ray

    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return False
    except ray.exceptions.RayError:
        return True
    return False


def lost_needs(payloads: Mapping[str, Any], workers: Mapping[str, str], error: Any) -> list[str]:
    """Return the needs of a node whose payloads are gone: the one that Ray names and all that died with it.

    Ray names one at a time; finding them singly would use up the node's attempts. If Ray names none of the needs, it
    was the node's own summary that was lost, and nothing but the node has to run again.

    Args:
        payloads: references of the needs' payloads, by node.
        workers: Ray's ids of the machines that made them, by node.
        error: Ray's ObjectLostError.
    """
    from ray.experimental import get_local_object_locations

    by_hex = {reference.hex(): need for need, reference in payloads.items()}
    named = by_hex.get(error.object_ref_hex)
    if named is None:
        return []
    alive = ray_machines().live
    suspects = [need for need in by_hex.values() if need != named and workers[need] not in alive]
    # The places that Ray knows do not help: for a lost object it names the one where it put the error. A copy on a live
    # machine is therefore not looked for; at worst a payload is made once more than necessary.
    known = get_local_object_locations([payloads[need] for need in suspects]) if suspects else {}
    sizes = {need: known.get(payloads[need], {}).get("object_size") or 0 for need in suspects}
    return [named, *(need for need in suspects if sizes[need] > _INLINE_BYTES)]
