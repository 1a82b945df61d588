"""The rules for all plugins, built-in or third-party; docs/plugin_rules.md lists them."""

from .check import check_plugin

__all__ = ["check_plugin"]
