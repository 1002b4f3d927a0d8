"""Ledgers to objects and back: the offloader, its reader, verification and cleaning."""

from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.interface import LedgerOffloader, UnconfiguredOffloader
from tierlog.offload.ranges import RangeLimits
from tierlog.offload.tier2_reader import FramesRead, Tier2Handle

__all__ = [
    "BlockOffloader",
    "FramesRead",
    "LedgerOffloader",
    "RangeLimits",
    "Tier2Handle",
    "Tier2Settings",
    "UnconfiguredOffloader",
]
