"""Chaos tests: the whole system as real processes under load, killed at random, then healed and judged from outside.

The run keeps its own account of everything that it asked for and was told, and compares it in the end with what is
in the database and in the cores. It believes nothing that the system under test says about itself.
"""

from bursar.chaos.cluster import ClusterUnavailable
from bursar.chaos.outages import Fault, Outage
from bursar.chaos.run import Report, chaos
from bursar.chaos.scene import STORES

__all__ = ["STORES", "ClusterUnavailable", "Fault", "Outage", "Report", "chaos"]
