"""``tierlog demo``: the main job on this machine, with real servers, real data and two crashes."""

from tierlog.cli.demo.command import demo

__all__ = ["demo"]
