"""Alerts and dashboards, written here and generated into the chart by ``tools/deploy_files.py``."""
