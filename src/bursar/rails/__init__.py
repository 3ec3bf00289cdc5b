"""The outside systems, one folder each. A rail knows the model and the ports, and nothing of who calls it."""
