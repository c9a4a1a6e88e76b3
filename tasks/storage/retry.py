"""How often and how long a request to remote storage is repeated.

Only named transient errors are repeated. The delays double and are jittered, so that many nodes which fail together do
not come back together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

# Eight requests wait at most 23 s in all: longer than a store which sheds load, short enough that a task fails while
# somebody still looks. What lives longer is the caller's to repeat.
ATTEMPTS = 8
_FIRST_DELAY_SECONDS = 0.2
_LONGEST_DELAY_SECONDS = 10.0


def delays_seconds() -> Iterator[float]:
    """Give the pauses between ATTEMPTS attempts: one fewer than attempts.

    >>> len(list(delays_seconds())) == ATTEMPTS - 1
    True
    """
    for attempt in range(ATTEMPTS - 1):
        longest = min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2**attempt)
        yield random.uniform(longest / 2, longest)
