"""Chaos tests: the whole system as real processes under load, killed at random, then healed and checked from outside.

The run records all its requests and their answers, and compares them in the end with what is in the database and in the
cores. It does not rely on what the system under test reports about itself.
"""

from bursar.chaos.cluster import ClusterUnavailable
from bursar.chaos.outages import Fault, Outage
from bursar.chaos.run import Report, chaos
from bursar.chaos.scene import STORES

__all__ = ["STORES", "ClusterUnavailable", "Fault", "Outage", "Report", "chaos"]
