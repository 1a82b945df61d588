"""Callbacks of the Hugging Face Trainer and of TRL as plugins."""
