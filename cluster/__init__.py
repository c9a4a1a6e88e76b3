"""PLACES: the Ray session, resources and the loop that runs a DAG. Knows nothing of checkpoints."""
