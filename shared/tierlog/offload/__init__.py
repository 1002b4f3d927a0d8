"""Ledgers to objects and back: the offloader, its reader, verification and cleaning."""

from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers, MakeDriver
from tierlog.offload.export import Exporter, ExportingOffloader
from tierlog.offload.interface import LedgerOffloader, UnconfiguredOffloader
from tierlog.offload.ranges import RangeLimits
from tierlog.offload.single_driver import SingleObjectOffloader
from tierlog.offload.tier2_reader import FramesRead, Tier2Handle
from tierlog.offload.verify import ReadBack

__all__ = [
    "BlockOffloader",
    "DriverParts",
    "Drivers",
    "Exporter",
    "ExportingOffloader",
    "FramesRead",
    "LedgerOffloader",
    "MakeDriver",
    "RangeLimits",
    "ReadBack",
    "SingleObjectOffloader",
    "Tier2Handle",
    "Tier2Settings",
    "UnconfiguredOffloader",
]
