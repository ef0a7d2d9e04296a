"""The lab: hosts in network namespaces on this machine, with real links, rates, losses and late ranks."""

from paceline.lab.available import unavailable
from paceline.lab.hosts import LabHost, LabRank
from paceline.lab.lab import Lab
from paceline.lab.lateness import late_s
from paceline.lab.network import PortBytes

__all__ = ["Lab", "LabHost", "LabRank", "PortBytes", "late_s", "unavailable"]
