"""The rules for plugins; docs/developers/plugin_rules.md lists them."""

from .check import check_plugin

__all__ = ["check_plugin"]
