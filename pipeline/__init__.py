"""DECIDES: command line, options, discovery, the DAG, records, progress and estimates. No tensor bytes."""
