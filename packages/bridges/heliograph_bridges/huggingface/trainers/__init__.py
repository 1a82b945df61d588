"""Plugins in the Trainer of Hugging Face and its subclasses, such as TRL's."""

from heliograph.spi import require

require("transformers", "HeliographCallback", extra="transformers")
