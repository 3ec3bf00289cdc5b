"""Flows: what moves money between systems, each a machine, its checks, its actions and its views."""
