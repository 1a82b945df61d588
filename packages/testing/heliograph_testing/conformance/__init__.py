"""The rules for plugins; docs/developers/plugin_rules.md lists them."""

from .rules import check_plugin

__all__ = ["check_plugin"]
