"""The Trainer of Hugging Face: its callbacks in our loop, our plugins in its loop."""

from .from_huggingface import from_huggingface as from_huggingface
