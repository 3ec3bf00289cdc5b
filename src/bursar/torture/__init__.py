"""Torture: the whole system as real processes under load, killed at random, then healed and judged from outside.

The torturer keeps its own account of everything that it asked for and was told, and compares it in the end with what is
in the database and in the cores. It believes nothing that the system under test says about itself.
"""

from bursar.torture.cluster import ClusterUnavailable
from bursar.torture.outages import Fault, Outage
from bursar.torture.run import Report, torture
from bursar.torture.scene import STORES

__all__ = ["STORES", "ClusterUnavailable", "Fault", "Outage", "Report", "torture"]
