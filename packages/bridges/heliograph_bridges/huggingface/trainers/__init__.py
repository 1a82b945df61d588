"""Our plugins in the Trainer of Hugging Face, and in those that are made of it, such as TRL's."""

from heliograph.spi import require

require("transformers", "HeliographCallback", extra="transformers")
