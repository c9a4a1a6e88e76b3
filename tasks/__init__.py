"""DOES: geometry, families, formats, storage and the three kinds of tasks. Knows nothing of Ray."""
