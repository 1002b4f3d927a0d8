"""Builds adapters from settings. Nobody else chooses one."""
